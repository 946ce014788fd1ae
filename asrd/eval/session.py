"""A whole evaluation: model and tasks loaded once, cells run one after the other, the record written beside them."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asrd.eval.code_metric import Executor
from asrd.eval.record import environment, model_record
from asrd.eval.run import Cell, Scored, run_cell
from asrd.eval.sandbox import WANTED, Limits, protections
from asrd.eval.tasks import Loaded, load_task


@dataclass
class Session:
    """Runs cells on one model.

    out     folder of the results; cells go to out/cells
    limits  None: no program may be executed
    """

    name: str
    model: Any
    tokenizer: Any
    out: Path
    data: Path | None = None
    limit: int | None = None
    level: str = "hard"
    batch_size: int = 16
    events: bool = True
    limits: Limits | None = None
    max_length: int | None = None
    arguments: dict[str, Any] = field(default_factory=dict)  # how the model was loaded, for the record
    loaded: dict[tuple[str, int | None], Loaded] = field(default_factory=dict)

    def task(self, name: str, shots: int | None) -> Loaded:
        """A task; loaded once."""
        key = (name, shots)
        if key not in self.loaded:
            self.loaded[key] = load_task(name, self.data, shots, self.level, self.limit)
        return self.loaded[key]

    def check(self, cells: Sequence[Cell]) -> None:
        """Raise ValueError if a cell cannot be run, before any of them begins."""
        from asrd.lab.compare.measure import check_runs

        for cell in cells:
            if self.task(cell.task, cell.shots).code and self.limits is None:
                raise ValueError(
                    f"--tasks {cell.task} executes programs that a model has written; allow it with"
                    " --allow-code-execution (they run in a sandbox: docs/eval.md)"
                )
            if cell.chat and getattr(self.tokenizer, "chat_template", None) is None:
                raise ValueError(f"--chat on: the tokenizer of {self.name} has no chat template")
        check_runs(self.model, [cell.run for cell in cells])

    def about(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """The record of the run."""
        runs_code = any(self.task(cell.task, cell.shots).code for cell in cells)
        return {
            "environment": environment(),
            "model": self.model_record,
            "arguments": self.arguments,
            "data": {cell.task: self.task(cell.task, cell.shots).data for cell in cells},
            "batch_size": self.batch_size,
            "limit": self.limit,
            "level": self.level,
            "max_length": self.max_length,
            "events": self.events,
            "code": None if self.limits is None else {"seconds": self.limits.seconds, "memory": self.limits.memory},
            "sandbox": list(protections()) if runs_code else [],
            "cells": [cell.as_dict() for cell in cells],
        }

    @functools.cached_property
    def model_record(self) -> dict[str, Any]:
        """The model as it is run, its weights hashed."""
        return model_record(self.name, self.model, self.tokenizer)

    def folder(self, cell: Cell) -> Path:
        """Of a cell."""
        context = {"weights": self.model_record["sha256"], "level": self.level}
        data = self.task(cell.task, cell.shots).data
        documents = data["sha256"] if "sha256" in data else data["source"]
        return self.out / "cells" / cell.key(data=documents, **context)

    def run(self, cells: Sequence[Cell], about: dict[str, Any]) -> Iterator[Scored]:
        """The cells' results, one after the other; record.json (`about`) is written first."""
        self.out.mkdir(parents=True, exist_ok=True)
        content = json.dumps(about, indent=2, default=str) + "\n"
        (self.out / "record.json").write_text(content, encoding="utf-8")
        for cell in cells:
            yield self.run_one(cell, self.folder(cell))

    def run_one(self, cell: Cell, folder: Path | None) -> Scored:
        """One cell."""
        from asrd.eval.model import AsrdLM

        make = functools.partial(
            AsrdLM, self.model, self.tokenizer, batch_size=self.batch_size, events=self.events,
            max_length=self.max_length,
        )  # fmt: skip
        loaded = self.task(cell.task, cell.shots)
        executor = None
        if loaded.code and self.limits is not None:
            executor = Executor(None if folder is None else folder / "executions.jsonl", self.limits)
        return run_cell(make, loaded, cell, folder, self.limit, executor)


def missing_layers(found: Sequence[str]) -> list[str]:
    """Protections that this machine does not have."""
    return [layer for layer in WANTED if layer not in found]
