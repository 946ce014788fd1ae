"""A barrier that a kernel loses is found by executing what Triton compiles; one of commit's by its values as well."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from asrd_kernels import dispatch
from asrd_kernels.commit_triton import commit_kernel, commit_triton
from tests.support.kernels.cases import a_reopened_block
from tests.support.kernels.ptx.decode import program
from tests.support.kernels.ptx.launch import executed
from tests.support.kernels.ptx.mutants import SUBJECTS, mutants
from tests.support.kernels.ptx.unit import Options


def third_barrier() -> str:
    """The source line of commit's third `tl.debug_barrier`, the one before the slots."""
    lines, first = inspect.getsourcelines(commit_kernel.fn)
    places = [first + i for i, line in enumerate(lines) if "tl.debug_barrier()" in line]
    assert len(places) == 3
    return f"commit_triton.py:{places[2]}"


def run(order: str, without: tuple[str, int] | None = None) -> tuple[list[list[int]], list[Any], str]:
    """Slots, faults and PTX of a commit that reopens a block."""
    arguments = a_reopened_block()
    with executed("sm_80", Options(order=order), forgiving=True, without_barrier=without) as machine:
        commit_triton(*arguments)
    (launch,) = machine.launches
    return arguments[3].position.tolist(), launch.faults, launch.ptx.text


@pytest.mark.parametrize("order", ["lockstep", "forward", "reverse", "random"])
def test_commits_third_barrier_keeps_the_slots_right(order: str) -> None:
    wanted = a_reopened_block()
    dispatch.commit(*wanted, "torch")
    slots, faults, text = run(order)
    assert (slots, faults) == (wanted[3].position.tolist(), [])
    lines = [line for _, line in program(text).kernel.barriers]
    slots, faults, _ = run(order, ("commit_kernel", lines.index(third_barrier())))
    assert any("p_guided, byte" in fault.text for fault in faults if fault.kind == "race"), faults
    if order == "forward":
        assert slots[0][8:] == list(range(72, 80)), "the masks of the later block are wanted, too"


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
