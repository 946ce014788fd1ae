"""Texts of an evaluation for an annotator of errors, from the folders that `asrd eval` writes.

The file has the format of docs/diagnose.md; `asrd diagnose errors --annotations FILE` reads it when it has been filled.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asrd.config import FIELDS
from asrd.decoders import DECODERS
from asrd.eval.generations import Record
from asrd.eval.run import Cell, read_scored

CODE = ("humaneval", "mbpp")


def kind_of(task: str) -> str:
    """Which of the annotator's instructions a task wants."""
    return "code" if task.startswith(CODE) else "math"


def annotation_samples(folder: Path, kind: str, number: int | None = None) -> list[dict[str, Any]]:
    """Every text of the finished cells whose task is of this kind, at most so many per cell."""
    found = []
    for place in sorted((folder / "cells").glob("*")):
        if not (place / "scores.jsonl").exists():
            continue
        cell, records = read_scored(place)
        if kind_of(cell.task) == kind:
            found += [_sample(cell, record) for record in records[:number] if "tokens" in record]
    if not found:
        raise ValueError(f"--eval {folder}: no finished task of the kind {kind!r}; expected a folder of asrd eval")
    return found


def _sample(cell: Cell, record: Record) -> dict[str, Any]:
    run, pieces = cell.run, record["pieces"]
    seed = f"/seed {run.seed}" if run.seed else ""
    sample = {
        "id": f"{cell.task}/{record['document']}{seed}",
        "method": " ".join([run.decoder, *(f"{n}={run.settings[n]}" for n in run.swept if n != "window")]),
        "prompt": record["prompt"],
        "reference": record["reference"],
        "text": "".join(pieces),
        "tokens": pieces,
        "token_spans": token_spans(pieces),  # of each token in the text
        "score": record["score"],
    }
    if "window" in DECODERS[run.decoder].reads:
        sample["window"] = run.settings.get("window", FIELDS["window"].default)
        if record["anchor_positions"] is not None:
            sample["anchors"] = sorted({p for p in record["anchor_positions"] if p < len(pieces)})
    return sample


def token_spans(pieces: Sequence[str]) -> list[list[int]]:
    """First character and one past the last of each token."""
    ends = list(itertools.accumulate(map(len, pieces)))
    return [[end - len(piece), end] for piece, end in zip(pieces, ends, strict=True)]
