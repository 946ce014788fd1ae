"""Runs decoders over problems in an engine. Results are kept on disk; finished problems are not decoded again."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from asrd.config import AsrdConfig
from asrd.engine.observers.events import Moment, moment_of
from asrd.generate import checked_decoder
from asrd.lab.compare.grading import Grader
from asrd.lab.compare.plan import RunSpec
from asrd.lab.tasks import Problem
from asrd.lab.tiny.batch import prompt_ids
from asrd.many import Engine, Handle
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState

Record = dict[str, Any]  # a Grade's fields and: problem (its seed), steps, seconds, drafted, rows (positions computed)


def measure(
    model: Any,
    runs: Sequence[RunSpec],
    problems: Sequence[Problem],
    folder: Path,
    context: dict[str, Any],
    batch_size: int = 32,
    quiet: bool = False,
) -> list[list[Record]]:
    """The records of every run over all problems, in order. `context` (model, level) is part of a run's file name."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    with tqdm(total=len(runs) * len(problems), unit="problem", disable=quiet or None) as bar:
        for run in runs:
            bar.set_description(run.label)
            path = folder / f"{run.key(**context)}.jsonl"
            done = read_records(path)
            bar.update(sum(problem.seed in done for problem in problems))
            missing = [problem for problem in problems if problem.seed not in done]
            for record in decode_problems(model, run, missing, batch_size):
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
                done[record["problem"]] = record
                bar.update()
            records.append([done[problem.seed] for problem in problems])
    return records


def check_runs(model: Any, runs: Sequence[RunSpec]) -> None:
    """Raise ValueError if a run cannot be made with this model, before any of them begins."""
    adapter = ModelAdapter(model)
    for run in runs:
        checked_decoder(adapter, AsrdConfig(decoder=run.decoder, **run.settings))


def read_records(path: Path) -> dict[int, Record]:
    """A run's records on disk, by problem. A line cut short by an interruption is removed from the file."""
    if not path.exists():
        return {}
    content = path.read_text(encoding="utf-8")
    whole = content[: content.rfind("\n") + 1]
    if whole != content:
        path.write_text(whole, encoding="utf-8")
    return {record["problem"]: record for record in map(json.loads, whole.splitlines())}


def decode_batch(model: Any, run: RunSpec, problems: Sequence[Problem]) -> list[Record]:
    """Decode and grade problems of one level, all at a time; the records in their order."""
    records = {record["problem"]: record for record in decode_problems(model, run, problems, len(problems))}
    return [records[problem.seed] for problem in problems]


def decode_problems(model: Any, run: RunSpec, problems: Sequence[Problem], slots: int) -> Iterator[Record]:
    """Decode and grade problems of one level, `slots` at a time; the records in the order in which they end.

    A step's seconds, without the time of grading, are shared equally by the problems that take part in it.
    """
    if not problems:
        return
    watch = _Grading(problems, bool(run.settings.get("early_stop", True)))
    shape = {"max_new_tokens": problems[0].response_length, "block_length": problems[0].block_length}
    settings = shape | dict(run.settings) | {"seed": run.seed}
    engine = Engine(model, slots=slots, observers=[watch], decoder=run.decoder, **settings)
    for result in engine.run({"prompt": prompt_ids(problem), "row_id": problem.seed} for problem in problems):
        if result.error is not None:
            raise ValueError(result.error)
        (grade,) = watch.graders[result.index].grades(torch.tensor([result.tokens]))
        counts = {"steps": result.steps, "drafted": result.drafted, "rows": result.computed}
        seconds = {"seconds": watch.seconds[result.index]}
        yield {"problem": problems[result.index].seed} | counts | seconds | asdict(grade)
        watch.since = time.perf_counter()


class _Grading:
    """An observer of an engine with one grader for each problem, and the seconds that each has taken."""

    def __init__(self, problems: Sequence[Problem], early_stop: bool) -> None:
        self.graders = [Grader([problem], early_stop) for problem in problems]
        self.seconds = [0.0] * len(problems)
        self.since = time.perf_counter()

    def __call__(self, state: DecodeState, handles: tuple[Handle | None, ...]) -> None:
        running = [(slot, handle.index) for slot, handle in enumerate(handles) if handle is not None]
        share = (time.perf_counter() - self.since) / len(running)
        moment = moment_of(state)
        for slot, index in running:
            self.seconds[index] += share
            self.graders[index].observer.see(Moment(*(values[slot : slot + 1] for values in moment)))
        self.since = time.perf_counter()
