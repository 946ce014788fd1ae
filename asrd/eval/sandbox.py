"""Runs generated programs: each in a process of its own without network, with limits on time, memory and files, in a
scratch folder that is deleted afterwards. sandbox_child.py is its inner side.

Layers, from the outside: a time limit and a new session that is killed as a whole; an empty environment; limits of the
kernel (memory, CPU time, file size); Landlock (no writing outside the scratch folder, no reading outside of Python's
own) and seccomp (no sockets, no processes) on Linux; Python's audit hook, which names what was attempted. The audit
hook alone stops accidents and simple attacks, not a determined one: without the two kernel layers run the evaluation
in a container. `protections` says which layers hold here.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CHILD = Path(__file__).with_name("sandbox_child.py")
PATIENCE = 3  # a busy machine must not make programs fail
WANTED = ("limits", "files (Landlock)", "calls (seccomp)", "audit")


@dataclass(frozen=True)
class Outcome:
    """How a program ended; `reason` is empty if it passed."""

    passed: bool
    reason: str
    protections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """What a program may use: seconds of the processor, `PATIENCE` times as many of the clock, and bytes of memory."""

    seconds: float = 10.0
    memory: int = 2 << 30


def run_program(program: str, limits: Limits = Limits()) -> Outcome:
    """Run the program to its end. It has passed if it ends without an exception; leaving early is a failure."""
    token = secrets.token_hex(16)
    receive, send = os.pipe()
    with tempfile.TemporaryDirectory(prefix="asrd-eval-", ignore_cleanup_errors=True) as scratch:
        given = {"program": program, "token": token, "scratch": scratch, "report": send}
        given |= {"memory": limits.memory, "seconds": limits.seconds}
        process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-B", str(CHILD)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            pass_fds=(send,), cwd=scratch, start_new_session=True, env=_environment(scratch),
        )  # fmt: skip
        os.close(send)
        late = False
        try:
            process.communicate(json.dumps(given).encode(), timeout=PATIENCE * limits.seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _kill(process)
        said = _read(receive, token)
    return _outcome(said, late, process.returncode, limits)


def protections() -> tuple[str, ...]:
    """The layers that hold on this machine, of `WANTED`."""
    return run_program("").protections


def _environment(scratch: str) -> dict[str, str]:
    own = {"PATH": "/usr/bin:/bin", "HOME": scratch, "TMPDIR": scratch, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    return own | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and whatever is left of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(receive: int, token: str) -> dict[str, object]:
    """What the child has said, by kind; lines without the token are the program's own."""
    os.set_blocking(receive, False)
    content = b""
    try:
        while part := os.read(receive, 65536):
            content += part
    except BlockingIOError:  # somebody still holds the other end
        pass
    os.close(receive)
    said: dict[str, object] = {}
    for line in content.decode("utf-8", "replace").splitlines():
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(found, list) and len(found) == 3 and found[0] == token:
            said.setdefault(str(found[1]), found[2])
    return said


def _outcome(said: dict[str, object], late: bool, code: int, limits: Limits) -> Outcome:
    held = said.get("protections", [])
    layers = tuple(map(str, held)) if isinstance(held, list) else ()
    if "failed" in said:
        return Outcome(False, str(said["failed"]), layers)
    if "passed" in said:
        return Outcome(True, "", layers)
    if late or code in (-signal.SIGXCPU, -signal.SIGKILL):
        return Outcome(False, f"timed out after {limits.seconds:g} s", layers)
    if code < 0:
        return Outcome(False, f"killed by {signal.Signals(-code).name}", layers)
    return Outcome(False, f"left with exit code {code} before its tests were over", layers)
