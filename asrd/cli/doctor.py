"""`asrd doctor`: what will work with a checkpoint on this machine. Exit code 1 if a check failed."""

from __future__ import annotations

import argparse
import json
import sys

from transformers.utils.logging import disable_progress_bar

from asrd.cli.loading import limit_threads
from asrd.lab.doctor import Finding, examine

MARKS = {"ok": "ok      ", "warning": "warning ", "failed": "FAILED  ", "not checked": "-       "}


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
