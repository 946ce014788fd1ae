"""The head-to-head as pictures: growth with length and with batch, where the time goes, accuracy against speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

from asrd.lab.compare.plots import COLOURS, MARKERS
from benchmarks.head_to_head.clock import PARTS

Row = dict[str, Any]
LINES = {None: "-", "prefix": ":", "dual": "--"}
DECODERS = ("LLaDA's loop", "asrd", "standard", "threshold", "factor", "wino", "saber")


def look(decoder: str) -> dict[str, Any]:
    """The same colour and marker in all pictures."""
    index = DECODERS.index(decoder) if decoder in DECODERS else len(DECODERS)
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def label(row: Row) -> str:
    """A contender in a legend."""
    refresh = [word for word in row["settings"].split(", ") if word.startswith("kv_refresh")]
    return " ".join([row["decoder"], *([f"+ {row['cache']}"] if row["cache"] else []), *refresh])


def draw_growth(rows: Sequence[Row], folder: Path) -> list[str]:
    """growth-length.png (batch 1) and growth-batch.png (the length with most batches), if there is growth to show."""
    drawn = []
    lengths = [row for row in rows if row["batch"] == 1]
    by_length: dict[int, set[int]] = {}
    for row in rows:
        by_length.setdefault(row["length"], set()).add(row["batch"])
    common = max(by_length, key=lambda length: len(by_length[length]), default=0)
    batches = [row for row in rows if row["length"] == common]
    for axis, mine, title in (
        ("length", lengths, "batch 1"),
        ("batch", batches, f"length {common}"),
    ):
        if len({row[axis] for row in mine}) > 1:
            _draw_growth(mine, axis, title, folder / f"growth-{axis}.png")
            drawn.append(f"growth-{axis}.png")
    return drawn


def _draw_growth(rows: Sequence[Row], axis: str, title: str, path: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(12, 4.8))
    names = [name for name in dict.fromkeys(map(label, rows)) if len([r for r in rows if label(r) == name]) > 1]
    for name in names:
        line = sorted((row for row in rows if label(row) == name), key=lambda row: row[axis])
        style = look(line[0]["decoder"]) | {"linestyle": LINES[line[0]["cache"]], "linewidth": 1.2, "label": name}
        x = [row[axis] for row in line]
        panels[0].plot(x, [row["tokens_per_second"] for row in line], **style)
        error = [[row["ratio"] - row["ratio_low"] for row in line], [row["ratio_high"] - row["ratio"] for row in line]]
        panels[1].errorbar(x, [row["ratio"] for row in line], error, capsize=2, **style)
    ticks = sorted({row[axis] for row in rows})
    for panel, what in zip(panels, ("tokens per second", "times LLaDA's own loop (range over rounds)"), strict=True):
        panel.set(xscale="log", yscale="log", xlabel=axis, ylabel=what)
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle(f"wide model of random weights, {title}, forward passes as on tiny")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_parts(rows: Sequence[Row], path: Path) -> list[str]:
    """Milliseconds of a forward pass by part, a stacked bar each: the case with most contenders of every model."""
    panels_of = {}
    for model in dict.fromkeys(row["model"] for row in rows if row["parts"]):
        cases: dict[tuple[int, int], list[Row]] = {}
        for row in rows:
            if row["model"] == model and row["parts"]:
                cases.setdefault((row["batch"], row["length"]), []).append(row)
        panels_of[model] = max(cases.values(), key=len)
    if not panels_of:
        return []
    figure, panels = plt.subplots(1, len(panels_of), figsize=(7 * len(panels_of), 5.2), squeeze=False)
    for panel, (model, mine) in zip(panels[0], panels_of.items(), strict=True):
        places = range(len(mine))
        left = [0.0] * len(mine)
        for index, part in enumerate(PARTS):
            widths = [row["parts"].get(part, 0.0) for row in mine]
            panel.barh(places, widths, left=left, color=COLOURS[index % len(COLOURS)], label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        panel.set_yticks(places, [label(row) for row in mine], fontsize=8)
        panel.invert_yaxis()
        panel.set(xlabel="milliseconds a step", title=f"{model}: batch {mine[0]['batch']}, length {mine[0]['length']}")
        panel.grid(alpha=0.3, axis="x")
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return [path.name]


def draw_tiny(rows: Sequence[Row], path: Path) -> list[str]:
    """Accuracy against tokens per second of the settings that were timed, one panel a batch and number of threads.

    Filled markers have a cache.
    """
    cases = list(dict.fromkeys((row["batch"], row["threads"]) for row in rows))
    if not cases:
        return []
    figure, panels = plt.subplots(1, len(cases), figsize=(5 * len(cases), 4.5), squeeze=False)
    for panel, (batch, threads) in zip(panels[0], cases, strict=True):
        mine = [row for row in rows if (row["batch"], row["threads"]) == (batch, threads)]
        standard = max((row["accuracy"] for row in mine if row["decoder"] == "standard"), default=None)
        for row in mine:
            accuracy = standard if row["accuracy"] is None else row["accuracy"]
            fill = "full" if row["cache"] else "none"
            style = look(row["decoder"]) | {"linestyle": "", "fillstyle": fill, "label": label(row)}
            panel.plot(row["tokens_per_second"], 100 * accuracy, **style)
        panel.set(
            xlabel="tokens per second", ylabel="answers right, %", title=f"tiny, batch {batch}, {threads} thread(s)"
        )
        panel.grid(alpha=0.3)
    handles, names = panels[0][-1].get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    panels[0][-1].legend(unique.values(), unique.keys(), fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return [path.name]
