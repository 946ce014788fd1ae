"""Our figures beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from asrd.eval.paper import Figures, figures, paper_name
from asrd.eval.presets import Entry, Preset
from asrd.eval.report import markdown_table, points, span
from asrd.eval.run import Scored
from asrd.eval.summary import Row, by_metric, summarise

HEADINGS = (
    "benchmark", "length", "method", "score", "95 %", "paper's", "difference (95 %)", "to baseline", "passes",
    "paper's passes", "speed", "paper's speed", "tokens/pass", "n",
)  # fmt: skip
LEGEND = (
    "score: in percent. difference: our score less the paper's, in points, with the interval of ours; the paper's own"
    " error is in it only where the paper gives one (five seeds). to baseline: difference to the standard decoder"
    " (native on block-diffusion models) on the same problems. passes: forward passes per problem; the paper's steps."
    " speed: relative to the baseline, in wall-clock time."
)
METRICS = {  # benchmark: name, metric of the task (empty: the one that counts) and figure of the paper, of each score
    "CNN/DailyMail": (
        ("ROUGE-1", "", "score"), ("ROUGE-L", "rougeL,none", "rougeL"), ("BERTScore", "bertscore_f1,none", "bertscore")
    ),
}  # fmt: skip


def compared(preset: Preset, entries: Sequence[Entry], done: Sequence[Scored], model: str) -> list[list[str]]:
    """The table, one line per method and score, for the cells that are done."""
    found: list[list[str]] = []
    seen = set()
    rows = {"": summarise(done)}
    for name in {metric for scores in METRICS.values() for _, metric, _ in scores if metric}:
        rows[name] = summarise(by_metric(done, name))
    for entry in entries:
        place = (entry.benchmark, entry.length, entry.method)
        if place in seen or _row_of(entry, rows[""]) is None:
            continue
        seen.add(place)
        theirs = figures(preset.table, paper_name(model), entry.length, entry.method, entry.benchmark)
        for name, metric, figure in METRICS.get(entry.benchmark, (("", "", "score"),)):
            found.append(_line(entry, name, _row_of(entry, rows[metric]), getattr(theirs, figure), theirs))
    return found


def _row_of(entry: Entry, rows: Sequence[Row]) -> Row | None:
    wanted = (entry.cell.task, entry.cell.run.decoder, dict(entry.cell.run.settings))
    return next((row for row in rows if (row.task, row.decoder, row.settings) == wanted), None)


def _line(entry: Entry, name: str, row: Row | None, score: float | None, paper: Figures) -> list[str]:
    length = entry.cell.run.settings["max_new_tokens"]
    first = [
        f"{entry.benchmark} {name}".strip(),
        str(entry.length) if length == entry.length else f"{length}, paper {entry.length}",
        entry.method,
    ]
    theirs = "" if score is None else f"{score:.1f}"
    if paper.half_width is not None:
        theirs += f" ± {paper.half_width:.2f}"
    if row is None:
        return [*first, "not computed", "", theirs, *[""] * (len(HEADINGS) - 6)]
    return [
        *first,
        f"{100 * row.score:.1f}",
        span(row.low, row.high),
        theirs,
        _difference(row, score, paper.half_width),
        points(row.difference, row.difference_low, row.difference_high),
        "" if row.forwards is None else f"{row.forwards:.1f}",
        "" if paper.steps is None else f"{paper.steps:.1f}",
        "" if row.speed is None else f"{row.speed:.1f}x",
        "" if paper.speed is None else f"{paper.speed:.1f}x",
        "" if row.tokens_per_forward is None else f"{row.tokens_per_forward:.2f}",
        f"{row.n}" if row.seeds == 1 else f"{row.n} x {row.seeds}",
    ]


def _difference(row: Row, score: float | None, half_width: float | None) -> str:
    """Our score less the paper's, with its interval."""
    if score is None:
        return ""
    difference, theirs = row.score - score / 100, (half_width or 0.0) / 100
    if row.low is None or row.high is None:
        return points(difference, None, None)
    below, above = (math.hypot(side, theirs) for side in (row.score - row.low, row.high - row.score))
    return points(difference, difference - below, difference + above)


def remarks(preset: Preset, base: bool, model: str, changed: Mapping[str, Any], limit: int | None) -> list[str]:
    """What has to be known to compare the two: where the settings come from, and what is not as in the paper."""
    name = paper_name(model)
    found = [f"the paper's {name}" if name else f"the paper has no figures for {model}", *preset.remarks(base)]
    if changed:
        found.append("changed by --set: " + ", ".join(f"{key}={value}" for key, value in changed.items()))
    if limit is not None:
        found.append(f"the first {limit} problems of each benchmark; the paper's figures are over all of them")
    return found


def page(preset: Preset, lines: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """The table and where its settings come from, as Markdown."""
    listed = "\n".join(f"- {note}" for note in notes)
    return f"## {preset.title}\n\n{markdown_table(HEADINGS, lines)}\n\n{LEGEND}\n\n{listed}\n\n## All figures"
