"""Generated programs can harm nobody: each attack ends as a failed program with a reason, and the next one runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from asrd.eval.sandbox import WANTED, Limits, protections, run_program

LIMITS = Limits(seconds=8, memory=1 << 30)

ATTACKS = {  # program, and a part of the reason for which it has failed
    "fork bomb": ("import os\nwhile True:\n    os.fork()", "started a process"),
    "fork bomb by the C library": ("import ctypes\nassert ctypes.CDLL(None).fork() >= 0", "AssertionError"),
    "shell": ("import os\nos.system('true')", "started a process"),
    "subprocess": ("import subprocess\nsubprocess.run(['true'])", "started a process"),
    "8 GB": ("block = bytearray(8 << 30)", "out of memory"),
    "8 GB in pieces": ("blocks = []\nwhile True:\n    blocks.append(bytearray(64 << 20))", "out of memory"),
    "write outside": ("open({outside!r}, 'w').write('x')", "for writing"),
    "write outside by the C library": (
        "import ctypes\nassert ctypes.CDLL(None).open({outside!r}.encode(), 0o101, 0o600) >= 0", "AssertionError"
    ),
    "remove a file": ("import os\nos.remove({precious!r})", "os.remove"),
    "remove a folder": ("import shutil\nshutil.rmtree({folder!r})", "shutil.rmtree"),
    "delete the working directory": ("import os, shutil\nshutil.rmtree(os.getcwd())", "shutil.rmtree"),
    "environment": ("import os\nassert os.environ['ASRD_SECRET']", "KeyError"),
    "environment of the parent": ("import os\nopen(f'/proc/{{os.getppid()}}/environ').read()", "environment"),
    "read a file of ours": ("open({precious!r}).read()", "PermissionError"),
    "socket": ("import socket\nsocket.socket()", "opened a socket"),
    "socket by the C library": ("import ctypes\nassert ctypes.CDLL(None).socket(2, 1, 0) >= 0", "AssertionError"),
    "download": ("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')", "opened a socket"),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)", "sent a signal"),
    "large file": ("with open('a', 'wb') as f:\n    for _ in range(99):\n        f.write(bytes(1 << 20))", "too large"),
    "leave early": ("import os\nos._exit(0)", "before its tests were over"),
    "leave early by an exception": ("raise SystemExit(0)", "SystemExit"),
    "pretend to have passed": (
        "import os, contextlib\nfor n in range(3, 64):\n    with contextlib.suppress(OSError):\n"
        "        os.write(n, b'[\"\", \"passed\", \"\"]\\n')\nos._exit(0)", "before its tests were over"
    ),
    "no Python": ("def f(:", "SyntaxError"),
    "endless recursion": ("def f():\n    return f()\nf()", "RecursionError"),
}  # fmt: skip
NEEDS_KERNEL = ("by the C library", "read a file")


@pytest.fixture(scope="module")
def layers() -> tuple[str, ...]:
    return protections()


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_fails_with_a_reason_and_does_no_harm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: tuple[str, ...]
) -> None:
    if any(part in name for part in NEEDS_KERNEL) and set(layers) != set(WANTED):
        pytest.skip(f"the kernel has no Landlock or seccomp: {layers}")
    monkeypatch.setenv("ASRD_SECRET", "secret")
    precious, outside = tmp_path / "folder" / "precious.txt", tmp_path / "outside.txt"
    precious.parent.mkdir()
    precious.write_text("mine")
    program, reason = ATTACKS[name]
    program = program.format(outside=str(outside), precious=str(precious), folder=str(precious.parent))
    found = run_program(program, LIMITS)
    assert not found.passed
    assert reason in found.reason
    assert precious.read_text() == "mine"
    assert not outside.exists()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["while True:\n    pass", "import time\ntime.sleep(1000)"])
def test_an_endless_program_is_stopped(program: str) -> None:
    began = time.monotonic()
    found = run_program(program, Limits(seconds=2))
    assert found.reason == "timed out after 2 s"
    assert time.monotonic() - began < 60


def test_a_program_that_ends_has_passed_and_may_use_its_scratch_folder() -> None:
    program = (
        "import os, threading, re, math, heapq, collections\nopen('a', 'w').write('x')\nassert open('a').read() == 'x'"
    )
    program += "\nt = threading.Thread(target=lambda: None)\nt.start()\nt.join()\nos.remove('a')"
    assert run_program(program, LIMITS).reason == ""


def test_a_failed_assertion_is_named() -> None:
    assert run_program("assert 1 + 1 == 3, 'not three'", LIMITS).reason == "AssertionError: not three"


def test_nothing_is_left_behind() -> None:
    import tempfile

    before = set(os.listdir(tempfile.gettempdir()))
    run_program("open('a', 'w').write('x')", LIMITS)
    assert not {name for name in set(os.listdir(tempfile.gettempdir())) - before if name.startswith("asrd-eval-")}


def test_sets_of_words_are_in_the_same_order_in_every_run() -> None:
    program = "raise ValueError(str({'a', 'b', 'c', 'd', 'e', 'f'}))"
    assert run_program(program, LIMITS).reason == run_program(program, LIMITS).reason
