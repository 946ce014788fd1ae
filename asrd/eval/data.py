"""Benchmark files on disk, as their authors publish them, in the place of the Hub's data sets.

`--data DIR` looks for the file names of `FILES`; few-shot examples are drawn from a `..._train.jsonl` where the task
wants a training set.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A benchmark's files: the first that exists counts. `split` is the name of the test set in lm-eval's task."""

    names: tuple[str, ...]
    split: str
    fields: tuple[str, ...]  # that each row must have
    train: tuple[str, ...] = ()
    change: Callable[[Row], Row | None] = lambda row: row  # to the Hub's form; None: not in the test set


def _mbpp(row: Row) -> Row | None:
    """The test set is task_id 11 to 510."""
    return row if 11 <= int(row["task_id"]) <= 510 else None


def _nq_open(row: Row) -> Row:
    return {"question": row["question"], "answer": row.get("answer", row.get("answers"))}


FILES = {
    "gsm8k": Source(
        ("gsm8k_test.jsonl", "gsm8k.jsonl"), "test", ("question", "answer"), ("gsm8k_train.jsonl",)
    ),
    "math500": Source(("math500.jsonl", "math500_test.jsonl"), "test", ("problem", "solution")),
    "humaneval": Source(
        ("humaneval.jsonl", "HumanEval.jsonl"), "test", ("task_id", "prompt", "test", "entry_point")
    ),
    "mbpp": Source(("mbpp.jsonl",), "test", ("task_id", "text", "code", "test_list"), change=_mbpp),
    "nq_open": Source(
        ("nq_open_dev.jsonl", "nq_open.jsonl", "NQ-open.dev.jsonl"), "validation", ("question",),
        ("nq_open_train.jsonl",), change=_nq_open,
    ),
    "cnn_dailymail": Source(("cnn_dailymail.jsonl", "cnn_dailymail_test.jsonl"), "test", ("article", "highlights")),
}  # fmt: skip


@dataclass(frozen=True)
class Local:
    """The rows of a benchmark and where they come from."""

    splits: dict[str, list[Row]]
    files: dict[str, str]  # path: sha256


def read_local(benchmark: str, folder: Path) -> Local:
    """The files of a benchmark in a folder."""
    source = FILES[benchmark]
    path = _first(folder, source.names)
    if path is None:
        raise ValueError(f"--data {folder}: {benchmark} needs a file {' or '.join(source.names)}")
    rows = [row for found in _rows(path, source.fields) if (row := source.change(found)) is not None]
    if not rows:
        raise ValueError(f"{path} has no row of the test set of {benchmark}")
    splits, files = {source.split: rows}, {str(path): sha256(path)}
    train = _first(folder, source.train)
    if train is not None:
        splits["train"] = _rows(train, source.fields)
        files[str(train)] = sha256(train)
    return Local(splits, files)


def sha256(path: Path) -> str:
    """Of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _rows(path: Path, fields: tuple[str, ...]) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error.msg}") from None
        missing = [name for name in fields if not isinstance(row, dict) or name not in row]
        if missing:
            raise ValueError(f"{path}, line {number} has no field {', '.join(missing)}")
        rows.append(row)
    return rows
