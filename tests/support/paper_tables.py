"""Reads the figures of the paper's result tables off its LaTeX source, to compare them with asrd/eval/paper.csv."""

from __future__ import annotations

import os
import re
from pathlib import Path

FOUR = ("HumanEval", "MBPP", "GSM8K", "MATH500")
TABLES = {  # label: (name, benchmarks, figures of each)
    "tab:main_result": ("main", FOUR, ("score", "steps", "speed")),
    "tab:diff_models": ("base-rl", FOUR, ("score", "steps", "speed")),
    "tab:multiseed": ("multiseed", FOUR, ("score", "steps", "speed")),
    "tab:threshold_only": ("threshold-only", FOUR, ("score", "speed")),
    "tab:block_models": ("block-models", FOUR, ("score", "speed")),
}
METHODS = {"baseline": "standard", "native": "native", "standard decoder": "standard", "ours": "asrd", "asrd": "asrd",
           "+asrd": "asrd", "wino": "wino", "saber": "saber"}  # fmt: skip
Row = tuple[str, str, str, str, str, str, str]  # table, model, length, method, benchmark, figure, value


def source() -> Path | None:
    """asrd.tex: $ASRD_PAPER, else ../shared/paper/asrd.tex beside the clone; None: not here."""
    given = os.environ.get("ASRD_PAPER")
    place = Path(given) if given else Path(__file__).parents[3] / "shared" / "paper" / "asrd.tex"
    return place if place.is_file() else None


def plain(text: str) -> str:
    """A cell without its markup."""
    text = text.replace("\\sysname{}", "ASRD").replace("\\sysname", "ASRD").replace("$\\times$", "\u00d7")
    text = re.sub(r"\$?_\{\\textcolor\{\w+\}\{[^}]*\}\}\$?", "", text)
    text = re.sub(r"\\multirow\{[\d.]+\}\{\*\}", "", text)
    for _ in range(3):
        text = re.sub(r"\\(?:textbf|mathbf|emph)\{([^{}]*)\}", r"\1", text)
        text = re.sub(r"\\textcolor\{\w+\}\{([^{}]*)\}", r"\1", text)
    return text.replace("$", "").replace("{", "").replace("}", "").replace("\\pm", "±").strip()


def table(tex: str, label: str) -> list[list[str]]:
    """The rows of the table with this label, as plain cells."""
    end = tex.index(f"\\label{{{label}}}")
    body = tex[tex.rindex("\\begin{tabular}", 0, end) : end]
    body = body[: body.index("\\end{tabular}")]
    body = re.sub(r"\\(?:toprule|bottomrule|midrule|hline|cmidrule)(?:\[[^]]*\]|\([^)]*\))?(?:\{[^}]*\})?", "", body)
    return [[plain(cell) for cell in row.split("&")] for row in re.split(r"\\\\", body)]


def figures(tex: str) -> list[Row]:
    """Every figure of the tables, in order."""
    found: list[Row] = []
    for label, (name, benchmarks, kinds) in TABLES.items():
        model, length = ("Dream-Ins-7B", "512") if name == "threshold-only" else ("", "512")
        for cells in table(tex, label):
            wanted = len(benchmarks) * len(kinds)
            if len(cells) < wanted + 1 or not re.match(r"\d", cells[-1]):
                continue
            head, values = cells[:-wanted], cells[-wanted:]
            if name in ("main", "base-rl", "multiseed"):
                model, length = head[0] or model, head[1] or length
            elif name == "block-models":
                model = head[0] or model
            found += _row(name, model, length, _method(head[-1]), benchmarks, kinds, values)
    return found + _open_ended(tex)


def _row(
    name: str,
    model: str,
    length: str,
    method: str,
    benchmarks: tuple[str, ...],
    kinds: tuple[str, ...],
    values: list[str],
) -> list[Row]:
    found: list[Row] = []
    for number, benchmark in enumerate(benchmarks):
        for kind, value in zip(kinds, values[number * len(kinds) :], strict=False):
            value = value.rstrip("\u00d7")
            if "±" in value:
                value, half = value.split("±")
                found.append((name, model, length, method, benchmark, "half-width", half))
            found.append((name, model, length, method, benchmark, kind, value))
    return found


def _method(text: str) -> str:
    threshold = re.search(r"tau=?(0\.\d+)", text.replace("\\", ""))
    return f"threshold {threshold[1]}" if threshold else METHODS[text.lower()]


def _open_ended(tex: str) -> list[Row]:
    found: list[Row] = []
    model = ""
    kinds = (("NQ-Open", "score"), ("NQ-Open", "speed"), ("CNN/DailyMail", "bertscore"), ("CNN/DailyMail", "score"),
             ("CNN/DailyMail", "rougeL"), ("CNN/DailyMail", "speed"))  # fmt: skip
    for cells in table(tex, "tab:open_ended"):
        if len(cells) == 8 and re.match(r"\d", cells[-1]):
            model = cells[0] or model
            for (benchmark, kind), value in zip(kinds, cells[2:], strict=True):
                found.append(("open-ended", model, "512", _method(cells[1]), benchmark, kind, value.rstrip("\u00d7")))
    return found
