"""Answers of a model on disk, one JSON line each, written as they come; a file that exists is continued."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Generations:
    """Records by key. path None: nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.done: dict[str, Record] = {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.done = {record["key"]: record for record in read_lines(path)}

    def __contains__(self, key: str) -> bool:
        return key in self.done

    def __getitem__(self, key: str) -> Record:
        return self.done[key]

    def add(self, record: Record) -> None:
        """It is in the file when this returns."""
        self.done[record["key"]] = record
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_lines(path: Path) -> list[Record]:
    """The records of a file, none if there is no file. A line cut short by an interruption is removed from the file."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return [json.loads(line) for line in whole.decode("utf-8").split("\n") if line]


def count_lines(path: Path) -> int:
    """How many records a file has."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def key_of(task: str | None, document: int | None, repeat: int, arguments: Any) -> str:
    """Identifies a request of lm-eval: task, document, repetition and everything that the model is given."""
    digest = hashlib.sha256(json.dumps(arguments, sort_keys=True, default=str).encode()).hexdigest()[:16]
    return f"{task}/{document}/{repeat}/{digest}"
