"""Tests of Triton kernels run in processes of their own: Triton reads TRITON_INTERPRET once, when it is imported.

tests/kernels/interpreted  values and memory, in Triton's interpreter on the CPU; values and decisions once more on what
                           Triton compiles for NVIDIA GPUs, executed by the PTX machine (support/kernels/ptx)
tests/kernels/compiled     machine code for GPUs that are not here

By default a process takes several files, since it spends five seconds on its imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no build for this platform")

HERE = Path(__file__).parent
_SETTINGS = ("TRITON_INTERPRET", "PTX_TARGET", "PTX_ORDER", "PTX_EX2_ULPS")


def files(kind: str) -> list[str]:
    """The test files of a folder."""
    return sorted(path.relative_to(HERE).as_posix() for path in HERE.glob(f"{kind}/test_*.py"))


def kernels(*names: str) -> list[str]:
    """The parity tests of these kernels."""
    return [f"interpreted/test_{name}_kernel.py" for name in names]


DECISIONS = "interpreted/test_decisions.py"
FILES = [*files("interpreted"), *files("compiled")]
APART = {
    "decisions": [DECISIONS, "../engine/test_impl.py"],  # and that kernels run where they are asked for
    "interpreted": [file for file in files("interpreted") if file != DECISIONS],
    "compiled": files("compiled"),
}
PARITY = kernels("vocab_stats", "anchor_embed", "commit", "draft_commit", "leave_one_out")
NEWER = [("sm_90", "reverse", file) for file in PARITY]
NEWER += [("sm_100", "random", file) for file in PARITY]  # what has tcgen05 is skipped there


def run_apart(chosen: list[str], selection: str, *machine: str, cases: int | None = None) -> None:
    """Run the tests of files in a process with the right environment; fail with its report if any fails. `machine`:
    target and order of the PTX machine, which then executes what Triton compiles; cases: of each test, at most."""
    environment = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    if machine:
        environment |= dict(zip(("PTX_TARGET", "PTX_ORDER", "PTX_EX2_ULPS"), machine, strict=False))
    elif chosen[0].startswith("interpreted/"):
        environment["TRITON_INTERPRET"] = "1"
    paths = [str(HERE / file) for file in chosen]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", selection, *paths]
    command += [] if cases is None else ["--cases", str(cases)]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
    if done.returncode != 0 and not (selection == "long" and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED):
        pytest.fail(f"{' '.join(command)}\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}", pytrace=False)


@pytest.mark.parametrize("group", APART)
def test_kernels_hold_in_their_own_process(group: str) -> None:
    """One case of each test."""
    run_apart(APART[group], "not slow and not long", cases=1)


@pytest.mark.slow
@pytest.mark.parametrize("group", APART)
def test_kernels_hold_with_every_case(group: str) -> None:
    run_apart(APART[group], "not long")


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=pytest.mark.slow if file == DECISIONS else pytest.mark.long) for file in FILES]
)
def test_kernels_hold_on_every_shape(file: str) -> None:
    run_apart([file], "long")


def test_compiled_kernels_executed_for_sm_80_hold() -> None:
    """One case of each test."""
    run_apart(PARITY, "not slow and not long", "sm_80", "lockstep", cases=1)


@pytest.mark.slow
def test_compiled_kernels_executed_for_sm_80_hold_with_every_case() -> None:
    run_apart(PARITY, "not long", "sm_80", "lockstep")


@pytest.mark.slow
def test_the_machines_settings_reach_it() -> None:
    """Else the runs above would pass whatever they are asked for."""
    with pytest.raises(pytest.fail.Exception, match="order is 'backwards'"):
        run_apart(PARITY[:1], "not long", "sm_80", "backwards")


@pytest.mark.parametrize(
    "selection",
    [pytest.param("not long", marks=pytest.mark.slow, id="39"), pytest.param("long", marks=pytest.mark.long, id="216")],
)
def test_decodes_by_compiled_kernels_executed_for_sm_80_decide_alike(selection: str) -> None:
    run_apart([DECISIONS], selection, "sm_80", "lockstep")


@pytest.mark.long
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("file", PARITY)
def test_compiled_kernels_hold_in_every_order_of_their_warps(file: str, order: str) -> None:
    """In reverse order also with an error of two units in the last place of ex2.approx, as hardware may have it."""
    run_apart([file], "not long", "sm_80", order, "2" if order == "reverse" else "0")


@pytest.mark.long
@pytest.mark.parametrize(("target", "order", "file"), NEWER)
def test_compiled_kernels_executed_for_newer_gpus_hold(target: str, order: str, file: str) -> None:
    run_apart([file], "not long", target, order)
