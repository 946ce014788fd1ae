"""The picture that matters: accuracy against forward passes, one curve a decoder over its settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from asrd.compare.report import Summary, at_equal_forwards

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # told apart by all eyes
MARKERS = "osD^vP*X"


def draw(summaries: Sequence[Summary], path: Path, title: str, axis: str | None = None) -> None:
    """Accuracy with 95 % intervals over mean forward passes, and the gain over `threshold` at equal passes.

    With `axis`, a setting that was swept: accuracy and forward passes over its values.
    """
    if axis is not None:
        _draw_sweep(summaries, path, title, axis)
        return
    equal = at_equal_forwards(summaries)
    figure, axes = plt.subplots(1, 2 if equal else 1, figsize=(11 if equal else 6.5, 4.5), squeeze=False)
    decoders = list(dict.fromkeys(s.decoder for s in summaries))
    for index, decoder in enumerate(decoders):
        points = sorted((s for s in summaries if s.decoder == decoder), key=lambda s: s.forwards)
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        x, y = [s.forwards for s in points], [100 * s.accuracy for s in points]
        error = [[100 * (s.accuracy - s.low) for s in points], [100 * (s.high - s.accuracy) for s in points]]
        axes[0, 0].errorbar(x, y, error, color=colour, marker=marker, capsize=2, linewidth=1.2, label=decoder)
        gains = [(e["forwards"], 100 * e["difference"]) for e in equal if e["label"].split()[0] == decoder]
        if gains:
            axes[0, 1].plot(*zip(*sorted(gains), strict=True), color=colour, marker=marker, label=decoder)
    axes[0, 0].set(xlabel="forward passes a problem", ylabel="answers right, %", title=title, xscale="log")
    axes[0, 0].legend()
    axes[0, 0].grid(alpha=0.3)
    if equal:
        axes[0, 1].axhline(0, color="grey", linewidth=1)
        axes[0, 1].set(
            xlabel="forward passes a problem", ylabel="points above threshold-only", title="at equal forward passes"
        )
        axes[0, 1].legend()
        axes[0, 1].grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_sweep(summaries: Sequence[Summary], path: Path, title: str, axis: str) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5))
    swept = [s for s in summaries if axis in s.settings]
    for index, decoder in enumerate(dict.fromkeys(s.decoder for s in swept)):
        points = [s for s in swept if s.decoder == decoder]
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "label": decoder}
        x = [s.settings[axis] for s in points]
        x = x if all(isinstance(value, int | float) for value in x) else [str(value) for value in x]
        error = [[100 * (s.accuracy - s.low) for s in points], [100 * (s.high - s.accuracy) for s in points]]
        panels[0].errorbar(x, [100 * s.accuracy for s in points], error, capsize=2, linewidth=1.2, **style)
        panels[1].plot(x, [s.forwards for s in points], linewidth=1.2, **style)
    for panel, label in zip(panels, ("answers right, %", "forward passes a problem"), strict=True):
        panel.set(xlabel=axis, ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
