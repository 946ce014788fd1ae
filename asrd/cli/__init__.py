"""The command `asrd`. An error is one line on standard error and exit code 2.

commands                           the options of every command and what is wrong with them; diagnose_options,
                                   eval_options, serve_options
settings                           options that several commands share
demo, generate, chat, trace, compare, diagnose, eval, serve, batch  one module per command, imported when it runs
loading                            plugins, model and task of a command
requests                           a file of prompts and the file of its results
display                            a canvas in the terminal
doctor, doctor_options             what will work with a checkpoint
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Any

from asrd.cli.commands import parser
from asrd.files import require_text

INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    try:
        return run(parser().parse_args(argv))
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the pipe is closed: nothing to flush
            return 0
        print(f"asrd: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("asrd: interrupted", file=sys.stderr)
        return INTERRUPTED


def run(arguments: argparse.Namespace) -> int:
    """Check the arguments, then import what does the work and do it."""
    for file in getattr(arguments, "plugin", ()):
        if not file.is_file():
            raise ValueError(f"--plugin {file}: there is no such file")
    for name, value in vars(arguments).items():
        if isinstance(value, str):
            require_text(value, name)
    arguments.check(arguments)
    return _function(arguments.run)(arguments) or 0


def _function(name: str) -> Callable[[Any], int | None]:
    """The function of "module:name". What it imports takes seconds, in which libraries may catch an interruption."""
    module, _, function = name.partition(":")
    with _leaving_at_once():
        found: Callable[[Any], int | None] = getattr(import_module(module), function)
        return found


@contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Ctrl-C ends the process with one line, whatever runs."""

    def leave(number: int, frame: FrameType | None) -> None:
        os.write(2, b"asrd: interrupted\n")
        os._exit(INTERRUPTED)

    try:
        before = signal.signal(signal.SIGINT, leave)
    except ValueError:  # not in the main thread, to which alone signals come
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
