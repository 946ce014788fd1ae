"""Tests of Triton kernels run in processes of their own: Triton reads TRITON_INTERPRET once, when it is imported.

tests/kernels/interpreted  values and memory, in Triton's interpreter on the CPU
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
FILES = sorted(
    path.relative_to(HERE).as_posix() for kind in ("interpreted", "compiled") for path in HERE.glob(f"{kind}/test_*.py")
)


def run_apart(file: str, selection: str) -> None:
    """Run the tests of a file in a process with the right environment; fail with its report if any fails."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if file.startswith("interpreted/"):
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
