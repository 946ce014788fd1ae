"""A barrier that a kernel loses is found by executing what Triton compiles."""

from __future__ import annotations

import inspect

import pytest

from asrd_kernels import DecodeState, dispatch
from asrd_kernels.commit_triton import commit_kernel, commit_triton
from tests.kernels.interpreted.parity import differences
from tests.support.kernels.cases import a_reopened_block
from tests.support.kernels.ptx.decode import program
from tests.support.kernels.ptx.faults import Fault
from tests.support.kernels.ptx.launch import executed
from tests.support.kernels.ptx.mutants import SUBJECTS, mutants
from tests.support.kernels.ptx.unit import Options


def last_barrier() -> str:
    """The source line of commit's last `tl.debug_barrier`, the one before it writes the row's numbers."""
    lines, first = inspect.getsourcelines(commit_kernel.fn)
    places = [first + i for i, line in enumerate(lines) if "tl.debug_barrier()" in line]
    assert len(places) == 2
    return f"commit_triton.py:{places[1]}"


def run(order: str, without: tuple[str, int] | None = None) -> tuple[DecodeState, list[Fault], str]:
    """State, faults and PTX of a commit that reopens a block."""
    state, stats = a_reopened_block()
    with executed("sm_80", Options(order=order), forgiving=True, without_barrier=without) as machine:
        commit_triton(state, stats)
    (launch,) = machine.launches
    return state, launch.faults, launch.ptx.text


@pytest.mark.parametrize("order", ["lockstep", "forward", "reverse", "random"])
def test_commits_last_barrier_keeps_the_counts_right(order: str) -> None:
    wanted, stats = a_reopened_block()
    dispatch.commit(wanted, stats, impl="torch")
    found, faults, text = run(order)
    assert (differences(found, wanted), faults) == ([], [])
    lines = [line for _, line in program(text).kernel.barriers]
    _, faults, _ = run(order, ("commit_kernel", lines.index(last_barrier())))
    assert any("p_drafted, byte" in fault.text for fault in faults if fault.kind == "race"), faults


def test_every_lost_barrier_of_a_small_kernel_is_found_by_the_detector() -> None:
    found = list(mutants("vocab_stats", "sm_80"))
    assert len(found) >= 8
    assert all(mutant.by_detector for mutant in found), found
    assert any(mutant.by_values for mutant in found)


@pytest.mark.long
@pytest.mark.parametrize("name", SUBJECTS)
def test_most_lost_barriers_of_every_kernel_are_found(name: str) -> None:
    """The others order accesses that the input does not have, or that another barrier orders as well."""
    found = list(mutants(name, "sm_80"))
    noticed = [mutant for mutant in found if mutant.by_detector]
    assert all(mutant.by_detector for mutant in found if mutant.by_values), "values never find what the detector misses"
    assert len(noticed) >= 0.8 * len(found), [mutant for mutant in found if not mutant.by_detector]
