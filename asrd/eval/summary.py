"""Cells as rows of a table: score with its interval, paired difference to the baseline, passes, speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from asrd.config import FIELDS
from asrd.eval.generations import Record
from asrd.eval.run import Cell, Scored
from asrd.lab.compare.aup import aup
from asrd.lab.compare.plan import RunSpec
from asrd.lab.compare.report import STUDENT, wilson

Z = 1.959964
BASELINES = ("standard", "native")  # the first that was run is what others are compared with
Interval = tuple[float, float]
Difference = tuple[float | None, float | None, float | None]  # with its interval


@dataclass(frozen=True)
class Row:
    """A setting on a task over all its problems and seeds; means are per problem. None: undefined."""

    task: str
    label: str
    decoder: str
    settings: dict[str, Any]
    metric: str  # of lm-eval, and its filter
    n: int  # problems
    seeds: int
    score: float
    low: float | None  # 95 % interval: Wilson's over problems, Student's over several seeds, normal of graded scores
    high: float | None
    forwards: float | None  # forward passes
    tokens_per_forward: float | None
    seconds: float | None
    speed: float | None  # seconds of the baseline / seconds
    difference: float | None  # to the baseline on the same problems
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
    references: dict[tuple[Any, ...], list[Scored]] = {}
    for name in BASELINES:
        for group in groups.values():
            if group[0].cell.run.decoder == name:
                references.setdefault(_place(group[0].cell), group)
    rows = [_row(group, references.get(_place(group[0].cell))) for group in groups.values()]
    return [_with_aup(row, rows) for row in rows]


def by_metric(cells: Sequence[Scored], metric: str) -> list[Scored]:
    """Those cells that have this metric ("name,filter"), with it as their score."""
    return [
        replace(
            scored,
            metric=(metric.partition(",")[0], metric.partition(",")[2]),
            records=[record | {"score": record["metrics"][metric]} for record in scored.records],
        )
        for scored in cells
        if all(metric in record["metrics"] for record in scored.records)
    ]


def _place(cell: Cell) -> tuple[Any, ...]:
    """Cells that differ in the decoder only share this."""
    own = ("max_new_tokens", "block_length", "temperature")
    return (cell.task, *(cell.run.settings.get(name, FIELDS[name].default) for name in own))


def _row(seeds: Sequence[Scored], reference: Sequence[Scored] | None) -> Row:
    records = [record for scored in seeds for record in scored.records]
    run, generated = seeds[0].cell.run, [record for record in records if "forwards" in record]
    means = [statistics.fmean(record["score"] for record in scored.records) for scored in seeds]
    low, high = score_interval(records, means)
    forwards = sum(record["forwards"] for record in generated)
    revoked = sum(record["revoked"] for record in generated)
    watched = generated and all(record["flip_flops"] is not None for record in generated)
    seconds = _mean(generated, "seconds")
    other = _mean([record for scored in reference for record in scored.records], "seconds") if reference else None
    difference: Difference = (None, None, None)
    if reference and run.decoder != reference[0].cell.run.decoder:
        difference = paired(_by_document(seeds), _by_document(reference))
    return Row(
        task=seeds[0].cell.task,
        label=run.label,
        decoder=run.decoder,
        settings=dict(run.settings),
        metric=", ".join(seeds[0].metric),
        n=len(seeds[0].records),
        seeds=len(seeds),
        score=statistics.fmean(means),
        low=low,
        high=high,
        forwards=_mean(generated, "forwards"),
        tokens_per_forward=sum(record["length"] for record in generated) / forwards if forwards else None,
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


def score_interval(records: Sequence[Record], means: Sequence[float]) -> tuple[float | None, float | None]:
    """95 % interval of the mean score; `means` are those of the seeds. Over the problems of one seed, and where all
    seeds have the same mean, from which nothing follows about others."""
    if len(set(means)) > 1:
        half = STUDENT[min(len(means) - 1, len(STUDENT)) - 1] * statistics.stdev(means) / math.sqrt(len(means))
        return max(0.0, statistics.fmean(means) - half), min(1.0, statistics.fmean(means) + half)
    scores = [record["score"] for record in records[: len(records) // len(means)]]
    if all(score in (0.0, 1.0) for score in scores):
        return wilson(int(sum(scores)), len(scores))
    _, low, high = _normal(scores)
    return (None, None) if low is None or high is None else (max(0.0, low), min(1.0, high))


def _normal(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None, None
    half = Z * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def _by_document(seeds: Sequence[Scored]) -> dict[int, float]:
    """Each problem's score, averaged over the seeds."""
    found: dict[int, list[float]] = {}
    for scored in seeds:
        for record in scored.records:
            found.setdefault(record["document"], []).append(record["score"])
    return {document: statistics.fmean(scores) for document, scores in found.items()}


def paired(ours: dict[int, float], other: dict[int, float]) -> Difference:
    """Mean difference on the problems that both have, with its 95 % interval: that of Bonett and Price (2012) where
    problems are right or wrong, which is not empty if none differ; else the normal one."""
    each = [ours[document] - other[document] for document in ours if document in other]
    if not each:
        return None, None, None
    if any(score not in (0.0, 1.0) for scores in (ours, other) for score in scores.values()):
        return _normal(each)
    n = len(each) + 2
    gained, lost = (each.count(1.0) + 1) / n, (each.count(-1.0) + 1) / n
    half = Z * math.sqrt((gained + lost - (gained - lost) ** 2) / n)
    return statistics.fmean(each), max(-1.0, gained - lost - half), min(1.0, gained - lost + half)


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
