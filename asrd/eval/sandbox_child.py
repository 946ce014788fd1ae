"""The inner side of the sandbox: a script of its own that gives up its rights and then runs one program.

Started by sandbox.py, which writes {"program", "token", "scratch", "memory", "seconds", "report"} to its standard
input. It answers on the file descriptor `report`: first which protections hold, then how the program ended. It imports
nothing of the package.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import platform
import resource
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

MACHINES = {  # machine: (audit architecture, system calls that are refused, clone, clone3)
    "x86_64": (0xC000003E, (41, 42, 49, 50, 57, 58, 59, 101, 165, 272, 308, 310, 311, 321, 322, 425), 56, 435),
    "aarch64": (0xC00000B7, (198, 203, 200, 201, 221, 117, 40, 97, 268, 270, 271, 280, 281, 425), 220, 435),
}  # socket, connect, bind, listen, fork, vfork, execve, ptrace, mount, unshare, setns, process_vm_*, bpf, execveat,
#    io_uring_setup
CLONE_THREAD, ALLOW, REFUSE = 0x10000, 0x7FFF0000, 0x00050000
READ, READ_FILE = 0b1101, 0b0100  # execute, read files, read folders
EVERYTHING = (1 << 13) - 1


def limit(memory: int, seconds: float) -> list[str]:
    """Limits of the kernel on what the process may use; above them it gets errors or is killed."""
    for what, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, math.ceil(seconds)),
        (resource.RLIMIT_FSIZE, 16 << 20),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    return ["limits"]


def confine_files(scratch: str) -> list[str]:
    """Landlock: writing in the scratch folder only, reading there and in Python's own folders; no TCP, no signals."""
    libc = ctypes.CDLL(None, use_errno=True)
    abi = libc.syscall(444, None, 0, 1)
    if abi < 1:
        return []
    rights = EVERYTHING | (1 << 13 if abi >= 2 else 0) | (1 << 14 if abi >= 3 else 0) | (1 << 15 if abi >= 5 else 0)
    attributes = struct.pack("QQQ", rights, 0b11, 0b11)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    rules = libc.syscall(444, attributes, len(attributes), 0)
    if rules < 0:
        return []
    own = [p for p in sys.path if "python" in p] + [sys.base_prefix + "/lib", sys.prefix + "/lib"]
    own += [os.path.realpath(p) for p in own] + ["/usr/lib", "/usr/share/zoneinfo", "/lib", "/lib64", "/etc/localtime"]
    for path, allowed in [(scratch, rights), *((p, READ) for p in own), ("/dev/null", 0b110), ("/dev/urandom", 0b100)]:
        if os.path.exists(path):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed &= rights if os.path.isdir(path) else 0b110 | 1
            libc.syscall(445, rules, 1, struct.pack("=Qi", allowed, folder), 0)
            os.close(folder)
    libc.prctl(38, 1, 0, 0, 0)
    done = libc.syscall(446, rules, 0)
    os.close(rules)
    return ["files (Landlock)"] if done == 0 else []


def refuse_calls() -> list[str]:
    """seccomp: no sockets, no processes, no tracing; threads are allowed."""
    machine = MACHINES.get(platform.machine())
    if machine is None:
        return []
    architecture, refused, clone, clone3 = machine
    program = [(0x20, 0, 0, 4), (0x15, 1, 0, architecture), (0x06, 0, 0, REFUSE | errno.EPERM), (0x20, 0, 0, 0)]
    for number in refused:
        program += [(0x15, 0, 1, number), (0x06, 0, 0, REFUSE | errno.EPERM)]
    program += [(0x15, 0, 1, clone3), (0x06, 0, 0, REFUSE | errno.ENOSYS)]
    program += [(0x15, 0, 4, clone), (0x20, 0, 0, 16), (0x45, 1, 0, CLONE_THREAD), (0x06, 0, 0, REFUSE | errno.EPERM)]
    program += [(0x06, 0, 0, ALLOW), (0x06, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    whole = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)
    done = libc.prctl(22, 2, ctypes.c_char_p(whole), 0, 0)
    return ["calls (seccomp)"] if done == 0 else []


def audit(scratch: str, stop: Callable[[str], NoReturn]) -> None:
    """Python's audit events: ends the program at the first forbidden act, with its name."""
    inside = os.path.realpath(scratch)
    acts = {
        "socket": "opened a socket", "os.fork": "started a process", "os.forkpty": "started a process",
        "os.exec": "started a process", "os.posix_spawn": "started a process", "os.spawn": "started a process",
        "os.system": "started a process", "subprocess.Popen": "started a process", "pty.spawn": "started a process",
        "os.kill": "sent a signal", "os.killpg": "sent a signal", "signal.pthread_kill": "sent a signal",
    }  # fmt: skip
    changes = ("os.remove", "os.rmdir", "os.rename", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink",
               "os.truncate", "os.utime", "shutil.rmtree", "shutil.move")  # fmt: skip

    def outside(path: Any) -> bool:
        if isinstance(path, int):
            return False
        place = os.path.realpath(os.fsdecode(path))
        return not place.startswith(inside + os.sep) and place != os.devnull

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            if writes and isinstance(path, str | bytes) and outside(path):
                stop(f"opened {os.fsdecode(path)} for writing")
            if isinstance(path, str) and path.startswith("/proc/") and "environ" in path:
                stop(f"read the environment ({path})")
        elif event in changes:
            for path in arguments[: 2 if event in ("os.rename", "os.link", "shutil.move") else 1]:
                if outside(path):
                    stop(f"{event}({os.fsdecode(path)})")
        elif event in acts:
            stop(acts[event])
        elif event.startswith("socket."):
            stop(acts["socket"])

    sys.addaudithook(hook)


def main() -> None:
    given = json.loads(sys.stdin.read())
    report, token, scratch = given["report"], given["token"], given["scratch"]
    write, leave = os.write, os._exit

    def say(kind: str, detail: Any) -> None:
        write(report, (json.dumps([token, kind, detail]) + "\n").encode())

    def stop(reason: str) -> NoReturn:
        say("failed", f"not allowed: {reason}")
        leave(1)

    os.chdir(scratch)
    code = None
    try:
        code = compile(given["program"], "<program>", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        say("failed", f"{type(error).__name__}: {error}"[:500])
        leave(1)
    say("protections", limit(given["memory"], given["seconds"]) + confine_files(scratch) + refuse_calls() + ["audit"])
    audit(scratch, stop)
    try:
        exec(code, {})
        say("passed", "")
    except BaseException as error:
        text = "out of memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
        say("failed", text[:500])
    leave(0)


if __name__ == "__main__":
    main()
