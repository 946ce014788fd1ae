"""Results of an evaluation as tables: terminal, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asrd.eval.summary import Row
from asrd.lab.tables import console, print_table

HEADINGS = (
    "task", "decoder", "score", "95 %", "to standard", "passes", "tokens/pass", "ms", "speed", "flip-flops", "AUP", "n",
)  # fmt: skip
LEGEND = (
    "score: the task's metric in percent. to standard: difference in points on the same problems, with its 95 %"
    " interval. Per problem: passes (forward passes), ms. speed: relative to standard. flip-flops: share of the"
    " revocations that the next draft undoes. AUP: of the decoder over its settings."
)


def cells(row: Row) -> list[str]:
    """A row as text, in the order of HEADINGS."""
    return [
        row.task,
        row.label,
        f"{100 * row.score:.1f}",
        f"{100 * row.low:.1f} - {100 * row.high:.1f}",
        points(row.difference, row.difference_low, row.difference_high),
        _text(row.steps, "{:.1f}"),
        _text(row.tokens_per_forward, "{:.2f}"),
        "" if row.seconds is None else f"{1e3 * row.seconds:.0f}",
        _text(row.speed, "{:.1f}x"),
        _text(row.flip_flop_rate, "{:.0%}"),
        _text(row.aup, "{:.0f}"),
        f"{row.n}" if row.seeds == 1 else f"{row.n} x {row.seeds}",
    ]


def points(value: float | None, low: float | None, high: float | None) -> str:
    """A difference in points with its interval."""
    if value is None or low is None or high is None:
        return ""
    return f"{100 * value:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [list(headings), ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(rows: Sequence[Row]) -> None:
    """Print the table."""
    out = console()
    print_table(out, HEADINGS, [cells(row) for row in rows], keys=2)
    out.print(LEGEND, highlight=False)


def save(rows: Sequence[Row], folder: Path, about: dict[str, Any], extra: str = "") -> list[Path]:
    """results.json, results.csv and results.md. extra: what a preset has to say, in Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"results.{kind}" for kind in ("json", "csv", "md")]
    content = {"about": about, "results": [asdict(row) for row in rows]}
    files[0].write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    with files[1].open("w", newline="", encoding="utf-8") as file:
        lines = [asdict(row) | {"settings": json.dumps(row.settings)} for row in rows]
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    parts = [f"    {about['environment']['command']}", markdown_table(HEADINGS, [cells(row) for row in rows]), LEGEND]
    parts += [extra] if extra else []
    files[2].write_text("\n\n".join([*parts, _about(about)]) + "\n", encoding="utf-8")
    return files


def _about(about: dict[str, Any]) -> str:
    """What decides the figures, as a list."""
    model, machine = about["model"], about["environment"]
    lines = [
        f"model {model['name']}, weights sha256 {model['sha256'][:16]}, {model['dtype']} on {model['device']},"
        f" attention {model['attention']}",
        f"batch size {about['batch_size']}, {about['limit'] or 'all'} problems per task",
        "versions " + ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number),
        f"commit {machine['commit']}, Python {machine['python']}, {machine['machine']['platform']}",
    ]
    for task, data in about["data"].items():
        documents = data.get("documents", {})
        lines.append(f"{task}: {documents.get('number')} problems of {data['source']}, sha256"
                     f" {str(documents.get('sha256'))[:16]}")  # fmt: skip
    if about.get("sandbox"):
        lines.append("programs run with " + ", ".join(about["sandbox"]))
    return "\n".join(f"- {line}" for line in lines)
