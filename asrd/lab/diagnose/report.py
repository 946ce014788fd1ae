"""The report of a diagnosis: tables, sentences and a plot; printed, and saved to a folder if asked."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from asrd.files import replacing, write_text
from asrd.lab.diagnose.intervals import Estimate
from asrd.lab.tables import console, print_table

Columns = dict[str, Callable[[Any], str]]  # the columns shown, and their formats
Row = dict[str, Any]  # a column's name to text, a number or an `Estimate`


@dataclass(frozen=True)
class Table:
    """One table: `rows` with all values, and the columns that are shown."""

    name: str  # of its CSV file
    title: str
    rows: Sequence[Row]
    columns: Columns
    keys: int = 1  # columns that identify a row

    def cells(self) -> list[list[str]]:
        """The cells shown, row by row."""
        return [
            ["" if row.get(name) is None else form(row[name]) for name, form in self.columns.items()]
            for row in self.rows
        ]


@dataclass(frozen=True)
class Report:
    """A diagnosis. `draw` writes its plot to a path and returns the files."""

    name: str
    tables: Sequence[Table]
    words: Sequence[str]
    about: dict[str, Any] = field(default_factory=dict)
    draw: Callable[[Path], list[Path]] | None = None

    def show(self) -> None:
        """Print it."""
        out = console()
        for table in self.tables:
            print_table(out, list(table.columns), table.cells(), table.title, table.keys)
        for sentence in self.words:
            out.print(sentence, highlight=False, soft_wrap=not sys.stdout.isatty())

    def save(self, folder: Path) -> list[Path]:
        """Write NAME.json with everything, NAME-TABLE.csv per table, NAME.md, NAME.png and NAME-dark.png; returns the
        files."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "about": self.about,
            "words": list(self.words),
            "tables": {table.name: [_plain(row) for row in table.rows] for table in self.tables},
        }
        files = [folder / f"{self.name}.json"]
        write_text(files[0], json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        for table in self.tables:
            files.append(folder / f"{self.name}-{table.name}.csv")
            with replacing(files[-1]) as beside, beside.open("w", newline="", encoding="utf-8") as file:
                rows = [_flat(row) for row in table.rows]
                names = list(dict.fromkeys(name for row in rows for name in row))
                writer = csv.DictWriter(file, fieldnames=names, restval="")
                writer.writeheader()
                writer.writerows(rows)
        files.append(folder / f"{self.name}.md")
        write_text(files[-1], self.markdown())
        if self.draw is not None:
            files += self.draw(folder / f"{self.name}.png")
        return files

    def markdown(self) -> str:
        """Tables and sentences as Markdown."""
        lines = [f"    {self.about['command']}", ""] if "command" in self.about else []
        for table in self.tables:
            rows = [list(table.columns), ["---"] * len(table.columns), *table.cells()]
            lines += [table.title, "", *("| " + " | ".join(cells) + " |" for cells in rows), ""]
        return "\n".join([*lines, *self.words, ""])


def text(value: Any) -> str:
    """A cell as it is."""
    return str(value)


def percent(value: Any) -> str:
    """A share or its estimate in per cent."""
    return value.percent if isinstance(value, Estimate) else f"{100 * value:.1f} %"


def number(form: str) -> Callable[[Any], str]:
    """A number or estimate in this form."""
    return lambda value: value.show(form) if isinstance(value, Estimate) else form.format(value)


def _plain(row: Row) -> dict[str, Any]:
    """A row for JSON: NaN becomes null."""
    plain: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Estimate):
            plain[name] = {"value": _known(value.value), "low": _known(value.low), "high": _known(value.high)}
        else:
            plain[name] = _known(value)
    return plain


def _flat(row: Row) -> dict[str, Any]:
    """A row for CSV: an estimate takes three columns."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Estimate):
            flat |= {name: value.value, f"{name} low": value.low, f"{name} high": value.high}
        else:
            flat[name] = value
    return flat


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
