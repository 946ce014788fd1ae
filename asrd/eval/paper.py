"""The figures of the paper's result tables, transcribed from its source (paper.csv; a test compares them with it)."""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import dataclass
from pathlib import Path

NAMES = {  # a part of a checkpoint's name: the paper's name
    r"llada-8b-instruct": "LLaDA-Ins-8B",
    r"llada-8b-base": "LLaDA-Base-8B",
    r"llada-1\.5": "LLaDA-1.5-8B",
    r"dream.*(instruct|ins)": "Dream-Ins-7B",
    r"dream.*base": "Dream-Base-7B",
    r"sdar-8b-chat": "SDAR-8B-Chat",
    r"llada2\.0-mini": "LLaDA2.0-mini",
    r"llada2\.1-mini": "LLaDA2.1-mini",
}


@dataclass(frozen=True)
class Figures:
    """One cell of a table: percent, forward passes, times the standard decoder's speed; None: not in the paper."""

    score: float | None = None
    half_width: float | None = None  # of the 95 % interval over five seeds
    steps: float | None = None
    speed: float | None = None
    rougeL: float | None = None
    bertscore: float | None = None


@functools.cache
def _all() -> dict[tuple[str, str, int, str, str], dict[str, float]]:
    found: dict[tuple[str, str, int, str, str], dict[str, float]] = {}
    with Path(__file__).with_name("paper.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            place = (row["table"], row["model"], int(row["length"]), row["method"], row["benchmark"])
            found.setdefault(place, {})[row["figure"].replace("-", "_")] = float(row["value"])
    return found


def figures(table: str, model: str | None, length: int, method: str, benchmark: str) -> Figures:
    """Of one cell; empty if the paper does not have it."""
    found = {} if model is None else _all().get((table, model, length, method, benchmark), {})
    return Figures(**{name: found.get(name) for name in Figures.__dataclass_fields__})


def paper_name(model: str) -> str | None:
    """The paper's name of a checkpoint; None: it has no figures for it."""
    return next((name for pattern, name in NAMES.items() if re.search(pattern, model.lower())), None)
