"""Tables on the terminal that are never cut off: columns that do not fit go below, beside the first ones again.

Also numbers with their nouns.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import rich.box
import rich.table
from rich.cells import cell_len
from rich.console import Console

PADDING = 3  # characters between two columns


def console() -> Console:
    """Standard output; 80 characters wide where it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 80)


def counted(number: int, noun: str) -> str:
    """1 hard problem, 2 hard problems."""
    return f"{number} {noun}{'s' * (number != 1)}"


def print_table(
    out: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], title: str = "", keys: int = 1
) -> None:
    """Print the table; each part of it begins with the first `keys` columns. Empty columns are left out."""
    kept = [n for n, column in enumerate(zip(*rows, strict=True)) if n < keys or any(column)] or range(len(headings))
    headings, rows = [headings[n] for n in kept], [[row[n] for n in kept] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(headings, *rows, strict=True)]
    for number, part in enumerate(split(widths, out.width, keys)):
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1), title_justify="left")
        table.title = title if number == 0 else None
        for column in part:
            table.add_column(headings[column], no_wrap=True)
        for row in rows:
            table.add_row(*(row[column] for column in part))
        out.print(table)


def split(widths: Sequence[int], total: int, keys: int) -> list[list[int]]:
    """Columns in parts that fit `total` characters, each with the first `keys` columns; at least one more in each."""
    first = list(range(keys))
    parts: list[list[int]] = [[]]
    for column in range(keys, len(widths)):
        wanted = sum(widths[c] + PADDING for c in [*first, *parts[-1], column]) + 1
        if parts[-1] and wanted > total:
            parts.append([])
        parts[-1].append(column)
    return [first + part for part in parts]
