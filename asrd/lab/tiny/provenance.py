"""Origin of the weights: command, commit, seed and time, for training.json."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from asrd.lab.tiny.state import Settings, State


def provenance(state: State, settings: Settings, commit: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": " ".join(["python -m asrd.lab.tiny.train", *sys.argv[1:]]),
        **asdict(settings),
        **commit,
        "updates_done": state.update,
        "processor_minutes": round(state.seconds / 60, 1),
        "sequences": state.sequences,
        "parameters": sum(weight.numel() for weight in state.model.parameters()),
        "torch": torch.__version__,
    }


def git_commit() -> dict[str, Any]:
    """The commit of this code, and whether the training code has uncommitted changes."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!weights")
    return {"commit": git("rev-parse", "HEAD") or None, "dirty": bool(changed)}
