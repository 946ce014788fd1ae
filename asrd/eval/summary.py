"""Cells as rows of a table: score with its interval, paired difference to the standard decoder, passes, speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from asrd.config import FIELDS
from asrd.eval.generations import Record
from asrd.eval.run import Cell, Scored
from asrd.lab.compare.aup import aup
from asrd.lab.compare.plan import RunSpec
from asrd.lab.compare.report import STUDENT, wilson

Z = 1.959964
Interval = tuple[float, float]


@dataclass(frozen=True)
class Row:
    """A setting on a task over all its problems and seeds; means are per problem. None: undefined."""

    task: str
    label: str
    decoder: str
    settings: dict[str, Any]
    metric: str
    n: int  # problems
    seeds: int
    score: float
    low: float  # 95 % interval: Wilson's over problems, Student's over several seeds, normal where scores are graded
    high: float
    steps: float | None  # forward passes
    tokens_per_forward: float | None
    seconds: float | None
    speed: float | None  # seconds of the standard decoder / seconds
    difference: float | None  # to the standard decoder on the same problems
    difference_low: float | None
    difference_high: float | None
    flip_flop_rate: float | None  # share of the revocations that the next draft undoes
    aup: float | None  # of the decoder over its settings, where it has several
    truncated: int  # problems whose prompt lost tokens


def summarise(cells: Sequence[Scored]) -> list[Row]:
    """One row per task and setting, in the order of the cells."""
    groups: dict[tuple[str, str], list[Scored]] = {}
    for scored in cells:
        run = scored.cell.run
        groups.setdefault((scored.cell.task, RunSpec(run.decoder, run.settings).name), []).append(scored)
    references = {_place(group[0].cell): group for group in groups.values() if group[0].cell.run.decoder == "standard"}
    rows = [_row(group, references.get(_place(group[0].cell))) for group in groups.values()]
    return [_with_aup(row, rows) for row in rows]


def _place(cell: Cell) -> tuple[Any, ...]:
    """Cells that differ in the decoder only share this."""
    own = ("max_new_tokens", "block_length", "temperature")
    return (cell.task, *(cell.run.settings.get(name, FIELDS[name].default) for name in own))


def _row(seeds: Sequence[Scored], reference: Sequence[Scored] | None) -> Row:
    records = [record for scored in seeds for record in scored.records]
    run, generated = seeds[0].cell.run, [record for record in records if "steps" in record]
    means = [statistics.fmean(record["score"] for record in scored.records) for scored in seeds]
    low, high = score_interval(records, means)
    steps = sum(record["steps"] for record in generated)
    revoked = sum(record["revoked"] for record in generated)
    watched = generated and all(record["flip_flops"] is not None for record in generated)
    seconds = _mean(generated, "seconds")
    other = _mean([record for scored in reference for record in scored.records], "seconds") if reference else None
    difference: tuple[float | None, float | None, float | None] = (None, None, None)
    if reference and run.decoder != "standard":
        difference = paired(_by_document(seeds), _by_document(reference))
    return Row(
        task=seeds[0].cell.task,
        label=run.label,
        decoder=run.decoder,
        settings=dict(run.settings),
        metric=seeds[0].metric[0],
        n=len(seeds[0].records),
        seeds=len(seeds),
        score=statistics.fmean(means),
        low=low,
        high=high,
        steps=_mean(generated, "steps"),
        tokens_per_forward=sum(record["length"] for record in generated) / steps if steps else None,
        seconds=seconds,
        speed=other / seconds if other and seconds else None,
        difference=difference[0],
        difference_low=difference[1],
        difference_high=difference[2],
        flip_flop_rate=sum(record["flip_flops"] for record in generated) / revoked if watched and revoked else None,
        aup=None,
        truncated=sum(record["truncated"] > 0 for record in generated),
    )


def _mean(records: Sequence[Record], name: str) -> float | None:
    found = [record[name] for record in records if name in record]
    return statistics.fmean(found) if found else None


def score_interval(records: Sequence[Record], means: Sequence[float]) -> Interval:
    """95 % interval of the mean score; `means` are those of the seeds."""
    scores = [record["score"] for record in records]
    if len(means) > 1:
        half = STUDENT[min(len(means) - 1, len(STUDENT)) - 1] * statistics.stdev(means) / math.sqrt(len(means))
        return statistics.fmean(means) - half, statistics.fmean(means) + half
    if all(score in (0.0, 1.0) for score in scores):
        return wilson(int(sum(scores)), len(scores))
    return _normal(scores)[1:]


def _normal(values: Sequence[float]) -> tuple[float, float, float]:
    mean = statistics.fmean(values)
    half = Z * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return mean, mean - half, mean + half


def _by_document(seeds: Sequence[Scored]) -> dict[int, float]:
    """Each problem's score, averaged over the seeds."""
    found: dict[int, list[float]] = {}
    for scored in seeds:
        for record in scored.records:
            found.setdefault(record["document"], []).append(record["score"])
    return {document: statistics.fmean(scores) for document, scores in found.items()}


def paired(ours: dict[int, float], other: dict[int, float]) -> tuple[float, float, float]:
    """Mean difference on the problems that both have, with its 95 % interval."""
    return _normal([ours[document] - other[document] for document in ours if document in other])


def _with_aup(row: Row, rows: Sequence[Row]) -> Row:
    """AUP over the decoder's settings on the task (docs/eval.md)."""
    place = ("max_new_tokens", "block_length", "temperature")
    same = [other for other in rows if other.task == row.task and other.tokens_per_forward is not None
            and all(other.settings.get(name) == row.settings.get(name) for name in place)]  # fmt: skip
    own = [other for other in same if other.decoder == row.decoder]
    best = 100 * max((other.score for other in same), default=0.0)
    if len(own) < 2 or best <= 0:
        return row
    points = [_Point(cast(float, other.tokens_per_forward), other.score) for other in own]
    return Row(**{**row.__dict__, "aup": aup(points, best)})


@dataclass(frozen=True)
class _Point:
    tokens_per_forward: float
    accuracy: float
