"""malloc keeps what a step of the engine frees."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys, threading
from asrd.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def steps():
    for _ in range(20):  # as a forward pass: several pieces, all freed in the end
        pieces = [libc.malloc(12 << 20) for _ in range(8)]
        for piece in pieces:
            ctypes.memset(piece, 1, 12 << 20)
        for piece in pieces:
            libc.free(piece)

thread = threading.Thread(target=steps)
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_memory_that_a_step_frees_is_not_taken_from_the_system_again() -> None:
    def faults(how: str) -> int:
        own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        done = subprocess.run([sys.executable, "-c", PROGRAM, how], env=own, capture_output=True, text=True, check=True)
        return int(done.stdout)

    once = 8 * (12 << 20) // resource.getpagesize()
    assert faults("keep") < 3 * once
    assert faults("plain") > 5 * once, "nothing was to be gained: is this glibc?"
