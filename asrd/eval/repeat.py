"""An evaluation run again from its record, and compared with it token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asrd.eval.generations import Record, read_lines
from asrd.eval.run import Cell


@dataclass(frozen=True)
class Agreement:
    """One cell then and now."""

    cell: Cell
    texts: int
    equal: int  # token by token
    scores: int  # problems with the same score
    first: str  # where the first difference is; empty: nowhere


def read_record(folder: Path) -> dict[str, Any]:
    """record.json of an evaluation."""
    path = folder / "record.json"
    if not path.is_file():
        raise ValueError(f"--repeat {folder}: expected the folder of an evaluation, with record.json in it")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def next_folder(folder: Path) -> Path:
    """Where the repetition goes: repeat-1, repeat-2, ..."""
    return next(place for number in range(1, 1000) if not (place := folder / f"repeat-{number}").exists())


def agreements(then: Path, now: Path, cells: list[Cell]) -> Iterator[Agreement]:
    """The cells of two folders of results, compared."""
    by_cell = {name: {_key(path): path for path in sorted((name / "cells").glob("*"))} for name in (then, now)}
    for cell in cells:
        key = json.dumps(cell.as_dict(), sort_keys=True)
        if key not in by_cell[then] or key not in by_cell[now]:
            raise ValueError(f"{then if key not in by_cell[then] else now} has no finished cell of {cell.task}")
        yield compare(cell, by_cell[then][key], by_cell[now][key])


def _key(folder: Path) -> str:
    path = folder / "cell.json"
    return json.dumps(json.loads(path.read_text(encoding="utf-8")), sort_keys=True) if path.exists() else ""


def compare(cell: Cell, then: Path, now: Path) -> Agreement:
    """Two folders of a cell."""
    before, after = (_by_key(folder / "generations.jsonl") for folder in (then, now))
    scored = [{r["key"]: r["score"] for r in read_lines(folder / "scores.jsonl")} for folder in (then, now)]
    equal, first = 0, ""
    for key, record in after.items():
        other = before.get(key)
        same = other is not None and other.get("tokens") == record.get("tokens")
        same = same and other is not None and other.get("loglikelihood") == record.get("loglikelihood")
        equal += same
        if not same and not first:
            first = f"document {record.get('document')}, {_place(other, record)}"
    same_scores = sum(scored[0].get(key) == score for key, score in scored[1].items())
    return Agreement(cell, len(after), equal, same_scores, first)


def _by_key(path: Path) -> dict[str, Record]:
    return {record["key"]: record for record in read_lines(path)}


def _place(then: Record | None, now: Record) -> str:
    if then is None:
        return "which was not there"
    old, new = then.get("tokens", []), now.get("tokens", [])
    at = next((p for p, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    return f"token {at}"
