"""Pictures of a comparison: curves over forward passes, curves over a setting, a grid of two, or the table's rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from asrd.lab.compare.report import Summary, at_equal_forwards

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # told apart by all eyes
MARKERS = "osD^vP*X"
ACCURACY, FORWARDS = "answers right, %", "forward passes a problem"
CHANGE_COST = ("kv_cache", "kv_refresh", "block_length")  # settings that change what one forward pass costs


def draw(summaries: Sequence[Summary], path: Path, title: str, axes: tuple[str, ...] | None = None) -> None:
    """Draw the table as its `axes` say.

    None: accuracy with 95 % intervals over mean forward passes, and the gain over `threshold` at equal passes.
    One: accuracy and forward passes over the values of that setting. Two: a grid of them. Empty: a line for each row.
    """
    figure = _curves(summaries) if axes is None else (_rows, _sweep, _grid)[len(axes)](summaries, *axes)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _style(index: int, label: str) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "label": label}


def _error(points: Sequence[Summary]) -> list[list[float]]:
    """The 95 % intervals as matplotlib wants them."""
    return [[100 * (s.accuracy - s.low) for s in points], [100 * (s.high - s.accuracy) for s in points]]


def _curves(summaries: Sequence[Summary]) -> Any:
    equal = at_equal_forwards(summaries)
    figure, axes = plt.subplots(1, 2 if equal else 1, figsize=(11 if equal else 6.5, 4.5), squeeze=False)
    for index, decoder in enumerate(dict.fromkeys(s.decoder for s in summaries)):
        points = sorted((s for s in summaries if s.decoder == decoder), key=lambda s: s.forwards)
        style = _style(index, decoder)
        x, y = [s.forwards for s in points], [100 * s.accuracy for s in points]
        axes[0, 0].errorbar(x, y, _error(points), capsize=2, linewidth=1.2, **style)
        gains = [(e["forwards"], 100 * e["difference"]) for e in equal if e["label"].split()[0] == decoder]
        if gains:
            axes[0, 1].plot(*zip(*sorted(gains), strict=True), **style)
    axes[0, 0].set(xlabel=FORWARDS, ylabel=ACCURACY, xscale="log")
    for which in ("major", "minor"):
        getattr(axes[0, 0].xaxis, f"set_{which}_formatter")("{x:.0f}")
    if equal:
        axes[0, 1].axhline(0, color="grey", linewidth=1)
        axes[0, 1].set(xlabel=FORWARDS, ylabel="points above threshold-only", title="at equal forward passes")
    for panel in axes[0]:
        panel.legend()
        panel.grid(alpha=0.3)
    return figure


def _sweep(summaries: Sequence[Summary], axis: str) -> Any:
    labels = [ACCURACY, FORWARDS, *(["ms a problem"] if axis in CHANGE_COST else [])]
    figure, panels = plt.subplots(1, len(labels), figsize=(5.5 * len(labels), 4.5))
    swept = [s for s in summaries if axis in s.settings]
    values = list(dict.fromkeys(s.settings[axis] for s in swept))
    decoders = list(dict.fromkeys(s.decoder for s in swept))
    for index, decoder in enumerate(decoders):
        points, style = [s for s in swept if s.decoder == decoder], _style(index, decoder)
        aside = 0.05 * (index - (len(decoders) - 1) / 2)  # so that no interval hides another
        x = [values.index(s.settings[axis]) + aside for s in points]
        panels[0].errorbar(x, [100 * s.accuracy for s in points], _error(points), capsize=2, linewidth=1.2, **style)
        panels[1].plot(x, [s.forwards for s in points], linewidth=1.2, **style)
        if len(panels) > 2:
            panels[2].plot(x, [1e3 * s.seconds for s in points], linewidth=1.2, **style)
    for fixed in (s for s in summaries if axis not in s.settings):
        panels[0].axhline(100 * fixed.accuracy, color="grey", linestyle="--", linewidth=1, label=fixed.label)
    for panel, label in zip(panels, labels, strict=True):
        panel.set(xlabel=axis, ylabel=label)
        panel.set_xticks(range(len(values)), [str(value) for value in values])
        panel.grid(alpha=0.3)
        panel.legend()
    return figure


def _grid(summaries: Sequence[Summary], across: str, up: str) -> Any:
    swept = [s for s in summaries if across in s.settings and up in s.settings]
    columns = list(dict.fromkeys(s.settings[across] for s in swept))
    rows = list(dict.fromkeys(s.settings[up] for s in swept))
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5))
    for panel, label, value, form in (
        (panels[0], ACCURACY, lambda s: 100 * s.accuracy, "{:.0f}"),
        (panels[1], FORWARDS, lambda s: s.forwards, "{:.1f}"),
    ):
        found = {(rows.index(s.settings[up]), columns.index(s.settings[across])): value(s) for s in swept}
        image = panel.imshow(
            [[found[row, column] for column in range(len(columns))] for row in range(len(rows))],
            cmap="cividis", origin="lower", aspect="auto",
        )  # fmt: skip
        for (row, column), number in found.items():
            panel.text(column, row, form.format(number), ha="center", va="center",
                       bbox={"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 2})  # fmt: skip
        panel.set_xticks(range(len(columns)), [str(c) for c in columns])
        panel.set_yticks(range(len(rows)), [str(r) for r in rows])
        panel.set(xlabel=across, ylabel=up, title=label)
        figure.colorbar(image)
    return figure


def _rows(summaries: Sequence[Summary]) -> Any:
    height = 1.6 + 0.4 * len(summaries)
    figure, panels = plt.subplots(1, 2, figsize=(11, height), sharey=True, width_ratios=(3, 2))
    decoders = list(dict.fromkeys(s.decoder for s in summaries))
    for place, summary in enumerate(summaries):
        style = _style(decoders.index(summary.decoder), summary.label)
        panels[0].errorbar([100 * summary.accuracy], [place], xerr=_error([summary]), capsize=3, linewidth=1.2, **style)
        panels[1].plot([summary.forwards], [place], **style)
        panels[1].annotate(f"{summary.forwards:.1f}", (summary.forwards, place), xytext=(7, -3),
                           textcoords="offset points", fontsize=8)  # fmt: skip
    panels[0].set_yticks(range(len(summaries)), [s.label for s in summaries])
    panels[0].invert_yaxis()
    panels[0].set(xlabel=ACCURACY)
    panels[1].set(xlabel=FORWARDS, xlim=(0, 1.15 * max(s.forwards for s in summaries)))
    for panel in panels:
        panel.grid(alpha=0.3)
    return figure
