"""`asrd doctor`: what will work with a checkpoint on this machine. Exit code 1 if a check failed."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from transformers.utils.logging import disable_progress_bar

from asrd.cli.settings import limit_threads
from asrd.lab.doctor import Finding, examine

MARKS = {"ok": "ok      ", "warning": "warning ", "failed": "FAILED  ", "not checked": "-       "}


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
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print each finding as it is there."""
    limit_threads()
    if not sys.stderr.isatty():
        disable_progress_bar()
    asked = {} if arguments.block_length is None else {"block_length": arguments.block_length}
    found: list[Finding] = []
    for finding in examine(
        arguments.model,
        own_code=arguments.compare_own_code,
        dtype=arguments.dtype,
        device_map=arguments.device,
        attn_implementation=arguments.attn,
        **asked,
    ):
        found.append(finding)
        shown = (
            json.dumps(finding.as_row())
            if arguments.json
            else f"{MARKS[finding.status]}{finding.check}: {finding.text}"
        )
        print(shown, flush=True)
    failed = [finding.check for finding in found if finding.status == "failed"]
    if not arguments.json:
        print(conclusion(arguments.model, found))
    return 1 if failed else 0


def conclusion(model: str, found: list[Finding]) -> str:
    """One sentence."""
    failed = sorted({finding.check for finding in found if finding.status == "failed"})
    warned = sorted({finding.check for finding in found if finding.status == "warning"})
    if failed:
        return f"{model} cannot be used as it is: {', '.join(failed)} failed."
    return f"{model} can be decoded." + (f" Read the warnings: {', '.join(warned)}." if warned else "")
