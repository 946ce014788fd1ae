"""Runs decoders over problems in an engine. Results are kept on disk; finished problems are not decoded again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch

from asrd.config import AsrdConfig
from asrd.engine.observers.events import Moment, moment_of
from asrd.engine.request import Request
from asrd.lab.compare.grading import Grade, Grader
from asrd.lab.compare.plan import RunSpec
from asrd.lab.compare.records import Record, Store, now, reused_sentence, timing_conditions
from asrd.lab.progress import Progress
from asrd.lab.tasks import Problem, length_and_blocks
from asrd.lab.tiny.batch import prompt_ids
from asrd.many import Engine, checked_decoder
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState

GRADED = tuple(field.name for field in fields(Grade))


def measure(
    model: Any,
    runs: Sequence[RunSpec],
    problems: Sequence[Any],
    store: Store,
    batch_size: int = 32,
    quiet: bool = False,
    note: Callable[[str], None] = lambda sentence: None,
    decode: Callable[[Any, RunSpec, Sequence[Any], int], Iterator[Record]] | None = None,
    names: Sequence[str] = GRADED,
) -> list[list[Record]]:
    """The records of every run over all problems, in order; only those that are not in the store are decoded.

    `note` is told how many were. decode: what decodes and grades problems (`decode_problems`), and the names of the
    fields of its records. What is slow the first time is not timed: the first problem is decoded once more, before.
    """
    decode = decode or decode_problems
    records, reused, warm = [], [], False
    with Progress(len(runs) * len(problems), "problem", quiet) as progress:
        for run in runs:
            file = store.open(run)
            done = file.read(names)
            known = [done[problem.seed] for problem in problems if problem.seed in done]
            missing = list({problem.seed: problem for problem in problems if problem.seed not in done}.values())
            progress.start(run.label, len(known))
            reused += known
            timed = timing_conditions(min(batch_size, len(missing)), model)
            if missing and not warm:
                list(decode(model, run, missing[:1], 1))
                warm = True
            for record in decode(model, run, missing, batch_size):
                record |= {"timed": timed, "date": now()}
                file.append(record)
                done[record["problem"]] = record
                progress.advance()
            records.append([done[problem.seed] for problem in problems])
    if sentence := reused_sentence(reused, len(runs) * len(problems), len(runs)):
        note(sentence)
    return records


def check_runs(model: Any, runs: Sequence[RunSpec]) -> None:
    """Raise ValueError if a run cannot be made with this model, before any of them begins."""
    adapter = ModelAdapter(model)
    for run in runs:
        checked_decoder(adapter, AsrdConfig(decoder=run.decoder, **run.settings))


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
    settings = length_and_blocks(problems[0], model) | {"seed": run.seed} | dict(run.settings)
    engine = Engine(model, slots=slots, observers=[watch], decoder=run.decoder, **settings)
    for result in engine.run({"prompt": prompt_ids(problem), "row_id": problem.seed} for problem in problems):
        if result.error is not None:
            raise ValueError(result.error)
        (grade,) = watch.graders[result.index].grades(torch.tensor([result.tokens]))
        counts = {"steps": result.forwards, "drafted": result.drafted, "rows": result.computed}
        seconds = {"seconds": watch.seconds[result.index]}
        yield {"problem": problems[result.index].seed} | counts | seconds | asdict(grade)
        watch.since = time.perf_counter()


class _Grading:
    """An observer of an engine with one grader for each problem, and the seconds that each has taken."""

    def __init__(self, problems: Sequence[Problem], early_stop: bool) -> None:
        self.graders = [Grader([problem], early_stop) for problem in problems]
        self.seconds = [0.0] * len(problems)
        self.since = time.perf_counter()

    def __call__(self, state: DecodeState, handles: tuple[Request | None, ...]) -> None:
        running = [(slot, handle.index) for slot, handle in enumerate(handles) if handle is not None]
        share = (time.perf_counter() - self.since) / len(running)
        moment = moment_of(state)
        for slot, index in running:
            self.seconds[index] += share
            self.graders[index].observer.see(Moment(*(values[slot : slot + 1] for values in moment)))
        self.since = time.perf_counter()
