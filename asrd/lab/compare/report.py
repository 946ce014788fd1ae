"""Summaries of runs: accuracy with intervals, rates, speed, and accuracy at equal forward passes."""

from __future__ import annotations

import csv
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from asrd.files import replacing, write_text
from asrd.lab.compare.aup import aup
from asrd.lab.compare.plan import RunSpec
from asrd.lab.compare.records import Record


@dataclass(frozen=True)
class Summary:
    """One setting over all problems and seeds; means are per problem. None: undefined (a ratio with denominator 0, or
    no reference to compare with)."""

    label: str
    decoder: str
    settings: dict[str, Any]
    n: int
    accuracy: float
    low: float  # 95 % interval: Wilson's over the problems, with several seeds Student's over the seeds' means
    high: float
    forwards: float  # forward passes
    tokens_per_forward: float
    seconds: float | None  # None: not all of them timed under the same conditions
    speed: float | None  # seconds of `standard` / seconds
    revoked: float  # tokens
    precision: float | None  # of revocation: share of the revoked tokens that were wrong
    recall: float | None  # of revocation: share of the wrong tokens checked that were revoked
    anchors: float
    contamination: float | None  # share of the anchors that are wrong in the result
    error_rate: float  # share of the tokens that are wrong in the result
    long_span: float | None  # R, share of the wrong tokens in runs of at least 15
    flip_flop_rate: float | None = None  # share of the revocations that the next draft undoes
    aup: float | None = None  # accuracy under parallelism of the decoder over its settings, where it has several


def summarise(runs: Sequence[RunSpec], records: Sequence[Sequence[Record]], timed: str | None = None) -> list[Summary]:
    """One summary per setting, over all its seeds, in the order of the runs.

    timed: the conditions of this comparison (`timing_conditions`); seconds of records with others are left out.
    """
    groups: dict[str, tuple[RunSpec, list[Sequence[Record]]]] = {}
    for run, found in zip(runs, records, strict=True):
        groups.setdefault(RunSpec(run.decoder, run.settings).name, (run, []))[1].append(found)
    merged = [(run, [record for seed in seeds for record in seed], len(seeds)) for run, seeds in groups.values()]
    clocks = [seconds_of(found, timed) for _, found, _ in merged]
    standards = [
        (run.deviations, clock)
        for (run, _, _), clock in zip(merged, clocks, strict=True)
        if run.decoder == "standard" and clock is not None
    ]
    return with_aup(
        [
            _summary(run, found, seeds, clock, reference_seconds(run, standards))
            for (run, found, seeds), clock in zip(merged, clocks, strict=True)
        ]
    )


def seconds_of(records: Sequence[Record], timed: str | None = None) -> float | None:
    """Seconds per problem; None unless all of them were measured under one and the same conditions."""
    conditions = {record.get("timed", timed) for record in records}
    same = len(conditions) == 1 and (timed is None or conditions == {timed})
    return sum(record["seconds"] for record in records) / len(records) if same else None


def reference_seconds(run: RunSpec, standards: Sequence[tuple[dict[str, Any], float]]) -> float | None:
    """Seconds per problem of the standard decoder without a cache; where there are several, of the one that shares most
    settings with the run (the same block length, for example)."""
    own = run.deviations.items()
    plain = [(settings, clock) for settings, clock in standards if "kv_cache" not in settings] or standards
    alike = [(len(settings), clock) for settings, clock in plain if settings.items() <= own]
    if alike:
        return max(alike, key=lambda it: it[0])[1]
    return statistics.fmean(clock for _, clock in plain) if plain else None


def _summary(
    run: RunSpec, records: Sequence[Record], seeds: int, seconds: float | None, reference: float | None
) -> Summary:
    n = len(records)
    total = {name: sum(r[name] for r in records) for name in records[0] if name not in ("problem", "timed", "date")}
    accuracy = total["right"] / n
    low, high = interval([r["right"] for r in records], seeds)
    return Summary(
        label=run.label,
        decoder=run.decoder,
        settings=dict(run.settings),
        n=n,
        accuracy=accuracy,
        low=low,
        high=high,
        forwards=total["steps"] / n,
        tokens_per_forward=total["length"] / total["steps"],
        seconds=seconds,
        speed=None if reference is None or not seconds else reference / seconds,
        revoked=total["revoked"] / n,
        precision=_share(total["revoked_wrong"], total["revoked"]),
        recall=_share(total["revoked_wrong"], total["checked_wrong"]),
        anchors=total["anchors"] / n,
        contamination=_share(total["anchors_wrong"], total["anchors"]),
        error_rate=total["errors"] / total["length"],
        long_span=_share(total["long_errors"], total["errors"]),
        flip_flop_rate=_share(total.get("flip_flops", 0), total["revoked"]),
    )


def with_aup(summaries: Sequence[Summary]) -> list[Summary]:
    """The summaries with the AUP of each decoder that has several settings."""
    best = 100 * max((s.accuracy for s in summaries), default=0.0)
    groups: dict[str, list[Summary]] = {}
    for summary in summaries:
        groups.setdefault(summary.decoder, []).append(summary)
    values = {name: aup(own, best) for name, own in groups.items() if len(own) > 1 and best > 0}
    return [replace(summary, aup=values.get(summary.decoder)) for summary in summaries]


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)  # t(0.975), 1 to 10 degrees


def interval(right: Sequence[bool], seeds: int) -> tuple[float, float]:
    """95 % interval of the accuracy over the problems of one seed, or of the mean over several seeds; over the problems
    also where all seeds have the same accuracy, from which nothing follows about others."""
    if seeds == 1:
        return wilson(sum(right), len(right))
    each = len(right) // seeds
    means = [sum(right[seed * each : (seed + 1) * each]) / each for seed in range(seeds)]
    if len(set(means)) == 1:
        return wilson(sum(right[:each]), each)
    half = STUDENT[min(seeds - 1, len(STUDENT)) - 1] * statistics.stdev(means) / math.sqrt(seeds)
    centre = statistics.fmean(means)
    return max(0.0, centre - half), min(1.0, centre + half)


def wilson(successes: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % interval of a proportion."""
    share = successes / n
    centre, spread = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n)
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # rounding at 0 and 1 must not exclude the share


def at_equal_forwards(summaries: Sequence[Summary], against: str = "threshold") -> list[dict[str, Any]]:
    """For each setting of another decoder: the accuracy of `against` at as many forward passes, interpolated linearly.

    A setting outside the range of the points of `against` is left out. The result is empty if these points differ in
    more than the threshold.
    """
    points = [s for s in summaries if s.decoder == against]
    if len({json.dumps({k: v for k, v in s.settings.items() if k != "threshold"}, sort_keys=True) for s in points}) > 1:
        return []
    curve = sorted((s.forwards, s.accuracy) for s in points)
    found = []
    for summary in summaries:
        if summary.decoder in (against, "standard") or len(curve) < 2:
            continue
        other = interpolate(curve, summary.forwards)
        if other is not None:
            gain = summary.accuracy - other
            found.append({"label": summary.label, "forwards": summary.forwards, "accuracy": summary.accuracy,
                          against: other, "difference": gain})  # fmt: skip
    return found


def interpolate(curve: Sequence[tuple[float, float]], x: float) -> float | None:
    """The piecewise linear curve through the points (sorted by x), None outside of them."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= x <= x1:
            return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


COLUMNS = (  # heading, field, format
    ("accuracy", "accuracy", "{:.1%}"),
    ("95 %", None, ""),
    ("passes", "forwards", "{:.1f}"),
    ("ms", "seconds", "{:.0f}"),
    ("speed", "speed", "{:.1f}x"),
    ("tokens/pass", "tokens_per_forward", "{:.2f}"),
    ("revoked", "revoked", "{:.1f}"),
    ("precision", "precision", "{:.0%}"),
    ("recall", "recall", "{:.0%}"),
    ("anchors", "anchors", "{:.1f}"),
    ("wrong anchors", "contamination", "{:.1%}"),
    ("errors", "error_rate", "{:.1%}"),
    ("R", "long_span", "{:.0%}"),
    ("flip-flops", "flip_flop_rate", "{:.0%}"),
    ("AUP", "aup", "{:.0f}"),
)
SHOWN = tuple(c for c in COLUMNS if c[0] in ("accuracy", "95 %", "passes", "ms", "speed", "revoked"))
LEGEND = (
    "Per problem: passes (forward passes), ms, revoked (tokens). 95 %: interval of the accuracy. speed: relative to"
    " standard. results.md and results.csv have more columns."
)
MORE = (
    "Per problem also anchors. precision, recall: of revocation. errors: share of tokens that are wrong in the result;"
    " R: share of these in runs of 15 or more. flip-flops: share of the revocations that the next draft undoes. AUP:"
    " accuracy under parallelism of the decoder over its settings (d3LLM)."
)


def cells(summary: Summary, columns: Sequence[tuple[str, str | None, str]] = COLUMNS) -> list[str]:
    """A summary as the cells of a table row, in the order of the columns, the label first."""
    shown = [summary.label]
    for _, name, form in columns:
        if name is None:
            shown.append(f"{100 * summary.low:.1f} - {100 * summary.high:.1f}")
            continue
        value = getattr(summary, name)
        scaled = value * 1e3 if name == "seconds" and value is not None else value
        shown.append("" if value is None else form.format(scaled))
    return shown


def markdown(summaries: Sequence[Summary]) -> str:
    """The table as Markdown."""
    head = ["decoder", *(heading for heading, _, _ in COLUMNS)]
    rows = [head, ["---"] * len(head), *(cells(s) for s in summaries)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def save(summaries: Sequence[Summary], folder: Path, about: dict[str, Any], title: str = "") -> None:
    """Write results.json (with the command), results.csv and results.md."""
    folder.mkdir(parents=True, exist_ok=True)
    equal = at_equal_forwards(summaries)
    content = {"about": about, "results": [asdict(s) for s in summaries], "at_equal_forwards": equal}
    write_text(folder / "results.json", json.dumps(content, indent=2) + "\n")
    heading = [f"# {title}", ""] if title else []
    lines = [*heading, f"    {about['command']}", "", markdown(summaries), "", f"{LEGEND} {MORE}", ""]
    write_text(folder / "results.md", "\n".join(lines))
    with replacing(folder / "results.csv") as beside, beside.open("w", newline="", encoding="utf-8") as file:
        rows = [{"model": about["model"]} | asdict(s) | {"settings": json.dumps(s.settings)} for s in summaries]
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


ADDED = ("flip_flop_rate", "aup")  # columns that older files do not have


def read_csv(path: Path) -> dict[str, list[Summary]]:
    """The summaries in a results.csv, by model; without a column "model" the file's name is taken for it."""
    found: dict[str, list[Summary]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            try:
                values = {
                    field.name: _parsed(
                        field.name, row[field.name] if field.name not in ADDED else row.get(field.name, "")
                    )
                    for field in fields(Summary)
                }
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: expected the columns of results.csv: {error!r}") from error
            found.setdefault(row.get("model") or path.stem, []).append(Summary(**values))
    if not found:
        raise ValueError(f"{path} has no rows: expected a results.csv of asrd compare")
    return found


def _parsed(name: str, text: str) -> Any:
    if name in ("label", "decoder"):
        return text
    if name == "settings":
        return json.loads(text)
    return None if text == "" else int(text) if name == "n" else float(text)


def save_overview(folder: Path, command: str, made: Sequence[tuple[str, str, Sequence[Summary]]]) -> None:
    """results.md of a preset: the command, and every table made so far (name, title, rows) with its plot."""
    parts = [f"    {command}\n", f"{LEGEND} {MORE}\n"]
    for name, title, summaries in made:
        parts.append(f"## {title}\n\n{markdown(summaries)}\n\n![{title}]({name}/results.png)\n")
    write_text(folder / "results.md", "\n".join(parts))
