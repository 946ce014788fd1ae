"""Our figures beside the paper's."""

from __future__ import annotations

from collections.abc import Sequence

from asrd.eval.paper import Figures, figures, paper_name
from asrd.eval.presets import NOTES, Entry, Preset
from asrd.eval.report import markdown_table, points
from asrd.eval.summary import Row

HEADINGS = (
    "benchmark", "length", "method", "score", "95 %", "paper", "difference (95 %)", "to standard", "steps", "paper",
    "speed", "paper", "tokens/pass", "n",
)  # fmt: skip
LEGEND = (
    "difference: our score less the paper's, in points, with the interval of ours; the paper's figure is taken as it is"
    " (it has an error of its own, over as many problems or five seeds). to standard: on the same problems."
)


def compared(preset: Preset, entries: Sequence[Entry], rows: Sequence[Row], model: str) -> list[list[str]]:
    """The table, one line per method, for the cells that are done."""
    found, seen = [], set()
    for entry in entries:
        run = entry.cell.run
        row = next((r for r in rows if (r.task, r.decoder, r.settings)
                    == (entry.cell.task, run.decoder, dict(run.settings))), None)  # fmt: skip
        place = (entry.benchmark, entry.length, entry.method)
        if row is None or place in seen:
            continue
        seen.add(place)
        theirs = figures(preset.table, paper_name(model), entry.length, entry.method, entry.benchmark)
        found.append(_line(entry, row, theirs))
    return found


def _line(entry: Entry, row: Row, paper: Figures) -> list[str]:
    difference = ""
    if paper.score is not None:
        share = paper.score / 100
        difference = points(row.score - share, row.low - share, row.high - share)
    score = "" if paper.score is None else f"{paper.score:.1f}"
    if paper.half_width is not None:
        score += f" ± {paper.half_width:.2f}"
    return [
        entry.benchmark, str(entry.length), entry.method, f"{100 * row.score:.1f}",
        f"{100 * row.low:.1f} - {100 * row.high:.1f}", score, difference,
        points(row.difference, row.difference_low, row.difference_high),
        "" if row.steps is None else f"{row.steps:.1f}", "" if paper.steps is None else f"{paper.steps:.1f}",
        "" if row.speed is None else f"{row.speed:.1f}x", "" if paper.speed is None else f"{paper.speed:.1f}x",
        "" if row.tokens_per_forward is None else f"{row.tokens_per_forward:.2f}",
        f"{row.n}" if row.seeds == 1 else f"{row.n} x {row.seeds}",
    ]  # fmt: skip


def page(preset: Preset, lines: Sequence[Sequence[str]], model: str) -> str:
    """The table and every setting, as Markdown."""
    name = paper_name(model)
    who = f"The paper's {name}." if name else f"The paper has no figures for {model}."
    notes = "\n".join(f"- {note}" for note in (*NOTES, *preset.notes))
    return f"## {preset.title}\n\n{who}\n\n{markdown_table(HEADINGS, lines)}\n\n{LEGEND}\n\nSettings:\n\n{notes}"
