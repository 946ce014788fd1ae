"""The options of `asrd doctor`. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "doctor",
        help="check what will work with a checkpoint on this machine",
        description="Load a checkpoint, run it on a few tokens, and say what will work. Exit code 1 if a check failed.",
        epilog="example: asrd doctor JetLM/SDAR-8B-Chat --device cuda --compare-own-code",
    )
    command.add_argument("model", help="folder, Hub id, or a packaged model such as tiny")
    command.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, float16, float64")
    command.add_argument("--device", default=None, help="device map, such as cpu, cuda, cuda:1 or auto")
    command.add_argument("--attn", default="auto", help="attention: auto, sdpa, eager, flash_attention_2")
    command.add_argument("--block-length", type=int, help="of a block-diffusion model whose config.json does not say")
    command.add_argument(
        "--compare-own-code",
        action="store_true",
        help="run the code in the checkpoint's own repository, if you trust it, and compare its logits with ours",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object per check")
    command.set_defaults(run="asrd.cli.doctor:run", check=_check_doctor, plugin=[])


def _check_doctor(arguments: argparse.Namespace) -> None:
    if arguments.block_length is not None and arguments.block_length < 1:
        raise ValueError(f"--block-length {arguments.block_length}: it must be at least 1")
