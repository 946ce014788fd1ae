"""A whole evaluation: model and tasks loaded once, cells run one after the other, the record written beside them."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asrd.arguments import resolve_config
from asrd.config import FIELDS
from asrd.decoders import DECODERS
from asrd.engine.decoder import WHOLE
from asrd.engine.defaults import with_defaults
from asrd.eval.code_metric import Executor
from asrd.eval.generations import count_lines
from asrd.eval.likelihood import NO_BLOCKS, Estimate, published_estimate
from asrd.eval.record import differences, environment, model_record
from asrd.eval.run import Cell, Scored, run_cell
from asrd.eval.sandbox import WANTED, Limits, protections
from asrd.eval.summaries import BERT
from asrd.eval.tasks import Loaded, load_task
from asrd.files import write_text
from asrd.many import checked_decoder
from asrd.models import ModelAdapter

log = logging.getLogger("asrd")


@dataclass
class Session:
    """Runs cells on one model.

    out        folder of the results; cells go to out/cells
    limits     None: no program may be executed
    draws      of likelihoods; None: as LLaDA has published for the task
    bertscore  the model of BERTScore
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
    draws: int | None = None
    bertscore: str = BERT
    arguments: dict[str, Any] = field(default_factory=dict)  # how the model was loaded, for the record
    loaded: dict[tuple[str, int | None], Loaded] = field(default_factory=dict)

    def task(self, name: str, shots: int | None) -> Loaded:
        """A task; loaded once."""
        key = (name, shots)
        if key not in self.loaded:
            self.loaded[key] = load_task(name, self.data, shots, self.level, self.limit, self.bertscore)
        return self.loaded[key]

    def check(self, cells: Sequence[Cell]) -> None:
        """Raise ValueError if a cell cannot be run, before any of them begins."""
        from asrd.lab.compare.measure import check_runs

        adapter = ModelAdapter(self.model)
        for cell in cells:
            loaded = self.task(cell.task, cell.shots)
            if loaded.code and self.limits is None:
                raise ValueError(
                    f"--tasks {cell.task} executes programs that a model has written; allow it with"
                    " --allow-code-execution (they run in a sandbox: docs/eval.md)"
                )
            if not loaded.generates and adapter.block_length is not None:
                raise ValueError(f"--tasks {cell.task}: {NO_BLOCKS.format(self.name)}")
            self._check_length(cell, loaded, self.max_length or adapter.context_length or 4096)
            if cell.chat and getattr(self.tokenizer, "chat_template", None) is None:
                raise ValueError(f"--chat on: the tokenizer of {self.name} has no chat template")
        check_runs(self.model, [cell.run for cell in cells])

    def _check_length(self, cell: Cell, loaded: Loaded, most: int) -> None:
        asked = (loaded.task.config.generation_kwargs or {}).get("max_gen_toks", FIELDS["max_new_tokens"].default)
        length = cell.run.settings.get("max_new_tokens", asked)
        if loaded.generates and length >= most:
            raise ValueError(
                f"{cell.task} with max_new_tokens={length} leaves no room for a prompt in {most} tokens"
                " (--max-length, or what the model was trained for): give --set max_new_tokens=, with fewer"
            )

    def about(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """The record of the run."""
        runs_code = any(self.task(cell.task, cell.shots).code for cell in cells)
        return {
            "environment": environment(),
            "model": self.model_record,
            "arguments": self.arguments,
            "tasks": {cell.task: self._task_record(cell) for cell in cells},
            "settings": self._settings(cells),
            "batch_size": self.batch_size,
            "limit": self.limit,
            "level": self.level,
            "max_length": self.max_length,
            "events": self.events,
            "code": None if self.limits is None else {"seconds": self.limits.seconds, "memory": self.limits.memory},
            "sandbox": list(protections()) if runs_code else [],
            "cells": [cell.as_dict() for cell in cells],
        }

    def _task_record(self, cell: Cell) -> dict[str, Any]:
        loaded = self.task(cell.task, cell.shots)
        found = loaded.about() | {"chat": cell.chat}
        return found if loaded.generates else found | {"likelihood": asdict(self.estimate(cell))}

    def _settings(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """Every setting of each decoder, defaults and the model's own values included, and on which tasks."""
        found: dict[str, dict[str, Any]] = {}
        adapter = ModelAdapter(self.model)
        for cell in cells:
            run = cell.run
            given = resolve_config(None, {"decoder": run.decoder, **run.settings})
            config = with_defaults(given, adapter)
            block = checked_decoder(adapter, given).block_length(config)
            config.block_length = int(config.max_new_tokens) if block == WHOLE else block
            reads = DECODERS[run.decoder].reads
            values = {n: value for n, value in config.settings().items() if n in reads and n != "seed"}
            if "max_new_tokens" not in run.settings:
                values["max_new_tokens"] = None  # the task's
            line = found.setdefault(json.dumps(values, default=str), {"tasks": {}, "seeds": {}, "settings": values})
            line["tasks"][cell.task] = line["seeds"][run.seed] = None
        return [{n: list(v) if n != "settings" else v for n, v in line.items()} for line in found.values()]

    def estimate(self, cell: Cell) -> Estimate:
        """How likelihoods are estimated in a cell."""
        own = published_estimate(cell.task)
        draws = own.draws if self.draws is None else self.draws
        return Estimate(draws, min(own.batch, draws), cell.run.settings.get("cfg_scale", own.cfg_scale))

    @functools.cached_property
    def model_record(self) -> dict[str, Any]:
        """The model as it is run, its weights hashed."""
        return model_record(self.name, self.model, self.tokenizer)

    def folder(self, cell: Cell) -> Path:
        """Of a cell."""
        model = self.model_record
        context = {"weights": model["sha256"], "level": self.level, "device": model["device"]}
        context |= {"attention": model["attention"], "batch": self.batch_size, "max_length": self.max_length}
        context |= {"events": self.events}
        data = self.task(cell.task, cell.shots).data
        documents = data["sha256"] if "sha256" in data else data["source"]
        return self.out / "cells" / cell.key(data=documents, **context)

    def run(self, cells: Sequence[Cell], about: dict[str, Any]) -> Iterator[Scored]:
        """The cells' results, one after the other; record.json (`about`) is written first."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._note_earlier(cells, about)
        write_text(self.out / "record.json", json.dumps(about, indent=2, default=str) + "\n")
        for cell in cells:
            yield self.run_one(cell, self.folder(cell))

    def _note_earlier(self, cells: Sequence[Cell], about: dict[str, Any]) -> None:
        """Answers that are there already count; if other versions have made them, the record says so."""
        kept = sum(count_lines(self.folder(cell) / "generations.jsonl") for cell in cells)
        path = self.out / "record.json"
        if not kept or not path.is_file():
            return
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = differences(about["environment"], before["environment"])
        about["earlier"] = [*before.get("earlier", []), *([before["environment"]] if changed else [])]
        log.warning("%d answers of an earlier run are in %s and count", kept, self.out)
        for line in changed:
            log.warning("they were made with another %s", line)

    def run_one(self, cell: Cell, folder: Path | None) -> Scored:
        """One cell."""
        from asrd.eval.model import AsrdLM

        loaded, estimate = self.task(cell.task, cell.shots), self.estimate(cell)
        likelihood: dict[str, Any] = {}
        if not loaded.generates:
            likelihood = {"mc_num": estimate.draws, "mc_batch": estimate.batch, "check_greedy": loaded.wants_greedy}
            likelihood |= {} if "cfg_scale" in cell.run.settings else {"cfg_scale": estimate.cfg_scale}
        make = functools.partial(
            AsrdLM, self.model, self.tokenizer, batch_size=self.batch_size, events=self.events,
            max_length=self.max_length, **likelihood,
        )  # fmt: skip
        executor = None
        if loaded.code and self.limits is not None:
            executor = Executor(None if folder is None else folder / "executions.jsonl", self.limits)
        return run_cell(make, loaded, cell, folder, self.limit, executor)


def missing_layers(found: Sequence[str]) -> list[str]:
    """Protections that this machine does not have."""
    return [layer for layer in WANTED if layer not in found]
