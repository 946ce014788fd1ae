"""The command `asrd`. An error is one line on standard error and exit code 2.

demo, generate, trace, compare, diagnose, serve, batch  one module per subcommand, each with `add(subparsers)`
settings                                                options that several commands share
requests                                                a file of prompts and the file of its results
display                                                 a canvas in the terminal
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import metadata

from asrd.cli import batch, compare, demo, diagnose, generate, serve, trace


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="asrd",
        description="Anchor-supervised revocable decoding for diffusion LLMs.",
        epilog="asrd COMMAND --help shows a command's options.",
    )
    top.add_argument("--version", action="version", version=f"asrd {metadata.version('asrd')}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (demo, generate, trace, compare, diagnose, serve, batch):
        module.add(commands)
    return top


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the pipe is closed: nothing to flush
            return 0
        print(f"asrd: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("asrd: interrupted", file=sys.stderr)
        return 130
    return 0
