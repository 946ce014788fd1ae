"""Runs decoders over problems, batch by batch. Results are kept on disk; finished problems are not decoded again."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from asrd.config import AsrdConfig
from asrd.generate import checked_decoder, fast_generate
from asrd.lab.compare.grading import Grader
from asrd.lab.compare.plan import RunSpec
from asrd.lab.tiny.batch import collate
from asrd.lab.tiny.task import Problem
from asrd.models.adapter import ModelAdapter
from asrd.output import AsrdOutput

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
            for start in range(0, len(missing), batch_size):
                batch = missing[start : start + batch_size]
                fresh = decode_batch(model, run, batch)
                with path.open("a", encoding="utf-8") as file:
                    file.write("".join(json.dumps(record) + "\n" for record in fresh))
                done |= {record["problem"]: record for record in fresh}
                bar.update(len(batch))
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
    """Decode and grade one batch. The seconds are the batch's, in equal shares, without the time of grading."""
    batch = collate(problems)
    width = batch.prompt.shape[1]
    early_stop = bool(run.settings.get("early_stop", True))
    settings = {"max_new_tokens": batch.length} | dict(run.settings) | {"seed": run.seed}
    arguments = (model, batch.prompt, batch.attention_mask[:, :width])
    options = {
        "decoder": run.decoder,
        "row_ids": [problem.seed for problem in problems],
        "return_dict_in_generate": True,
        **settings,
    }
    grader = Grader(problems, early_stop)
    watch = _Stopwatch(grader)
    started = time.perf_counter()
    out = fast_generate(*arguments, observers=[watch], **options)
    seconds = time.perf_counter() - started - watch.seconds
    assert isinstance(out, AsrdOutput)
    grades = grader.grades(out.sequences[:, width:])
    return [
        {"problem": problem.seed, "steps": steps, "drafted": drafted, "seconds": seconds / len(problems), "rows": rows}
        | asdict(grade)
        for problem, steps, drafted, rows, grade in zip(
            problems, out.steps.tolist(), out.drafted.tolist(), out.computed.tolist(), grades, strict=True
        )
    ]


class _Stopwatch:
    """The grader's observer, and how long it took in all."""

    def __init__(self, grader: Grader) -> None:
        self.grader, self.seconds = grader, 0.0

    def __call__(self, state: Any) -> None:
        started = time.perf_counter()
        self.grader.observer(state)
        self.seconds += time.perf_counter() - started
