"""Tests of Triton kernels run in processes of their own: Triton reads TRITON_INTERPRET once, when it is imported.

tests/kernels/interpreted  values and memory, in Triton's interpreter on the CPU; values and decisions once more on what
                           Triton compiles for NVIDIA GPUs, executed by the PTX machine (benchmarks/kernels/ptx)
tests/kernels/compiled     machine code for GPUs that are not here
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
FILES = sorted(
    path.relative_to(HERE).as_posix() for kind in ("interpreted", "compiled") for path in HERE.glob(f"{kind}/test_*.py")
)


HEAD, DECISIONS = "interpreted/test_fused_head.py", "interpreted/test_decisions.py"
EXECUTED = [f"interpreted/test_{name}_kernel.py" for name in ("vocab_stats", "anchor_embed", "commit")] + [HEAD]
NEWER = [("sm_90", "reverse", file) for file in EXECUTED]
NEWER += [("sm_100", "random", file) for file in EXECUTED if file != HEAD]  # whose tcgen05 the machine does not know


def run_apart(file: str, selection: str, *machine: str) -> None:
    """Run the tests of a file in a process with the right environment; fail with its report if any fails. `machine`:
    target and order of the PTX machine, which then executes what Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    if machine:
        environment |= dict(zip(("PTX_TARGET", "PTX_ORDER", "PTX_EX2_ULPS"), machine, strict=False))
    elif file.startswith("interpreted/"):
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", selection, str(HERE / file)]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
    if done.returncode != 0 and not (selection == "long" and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED):
        pytest.fail(f"{' '.join(command)}\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}", pytrace=False)


@pytest.mark.parametrize("file", FILES)
def test_kernels_hold_in_their_own_process(file: str) -> None:
    run_apart(file, "not long")


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_kernels_hold_on_every_shape(file: str) -> None:
    run_apart(file, "long")


@pytest.mark.parametrize("file", EXECUTED)
def test_compiled_kernels_executed_for_sm_80_hold(file: str) -> None:
    run_apart(file, "not long", "sm_80", "lockstep")


def test_the_machines_settings_reach_it() -> None:
    """Else the runs above would pass whatever they are asked for."""
    with pytest.raises(pytest.fail.Exception, match="order is 'backwards'"):
        run_apart(HEAD, "not long", "sm_80", "backwards")


@pytest.mark.long
def test_decodes_by_compiled_kernels_executed_for_sm_80_decide_alike() -> None:
    run_apart(DECISIONS, "not long", "sm_80", "lockstep")


@pytest.mark.long
@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("file", EXECUTED)
def test_compiled_kernels_hold_in_every_order_of_their_warps(file: str, order: str) -> None:
    """In reverse order also with an error of two units in the last place of ex2.approx, as hardware may have it."""
    run_apart(file, "not long", "sm_80", order, "2" if order == "reverse" else "0")


@pytest.mark.long
@pytest.mark.parametrize(("target", "order", "file"), NEWER)
def test_compiled_kernels_executed_for_newer_gpus_hold(target: str, order: str, file: str) -> None:
    run_apart(file, "not long", target, order)
