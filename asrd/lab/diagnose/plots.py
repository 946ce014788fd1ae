"""The pictures of the diagnoses, each with its intervals; colours told apart by all eyes.

Knows matplotlib and the results' dataclasses. Computes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from asrd.lab.compare.plots import COLOURS, MARKERS
from asrd.lab.diagnose.attention import PAIRS, Redistribution
from asrd.lab.diagnose.errors import ErrorFigures
from asrd.lab.diagnose.intervals import Estimate
from asrd.lab.diagnose.persistence import Persistence
from asrd.lab.diagnose.runtime import COLUMNS, Breakdown, PublishedTimes
from asrd.lab.diagnose.visible import DISTANCES, KINDS, Suitability

OFF, ON = "#56B4E9", "#D55E00"
GREY = "#777777"


def draw_attention(found: Sequence[Redistribution], path: Path, title: str) -> None:
    """Four panels: who looks at whom, layer by layer, with the edit off and on; below each, the change."""
    figure, axes = plt.subplots(
        2, len(PAIRS), figsize=(13, 5), sharex="col", height_ratios=(2, 1), constrained_layout=True
    )
    for column, (of, to) in enumerate(PAIRS):
        layers = [r for r in found if (r.of, r.to) == (of, to)]
        x = [r.layer for r in layers]
        above, below = axes[0, column], axes[1, column]
        for name, estimates, colour, marker in (
            ("off", [r.off for r in layers], OFF, "o"),
            (f"{layers[0].edit} on", [r.on for r in layers], ON, "s"),
        ):
            _band(above, x, estimates, colour, marker, name)
        _whiskers(below, x, [r.change for r in layers], COLOURS[0], "D")
        below.axhline(0, color=GREY, linewidth=1)
        above.set_title(f"{of} to {to}", fontsize=11)
        above.legend(fontsize=8, frameon=False)
        above.set_ylim(bottom=0)
        below.set(xlabel="layer", xticks=x if len(x) <= 8 else x[:: len(x) // 8])
        below.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
        for panel in (above, below):
            panel.grid(alpha=0.25)
    axes[0, 0].set_ylabel("mean attention")
    axes[1, 0].set_ylabel("change: on - off")
    _save(figure, path, title)


def draw_errors(found: Sequence[ErrorFigures], path: Path, title: str) -> None:
    """Error rate and R of each method, and contamination and number of anchors by window."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    names = [f.method if f.window is None else f"{f.method} k={f.window}" for f in found]
    for panel, field, label in zip(
        axes, ("error_rate", "long_span"), ("wrong tokens, %", "of these in runs of 15 or more, %"), strict=False
    ):
        for place, figures in enumerate(found):
            _whiskers(panel, [place], [getattr(figures, field)], COLOURS[0], "o", scale=100)
        panel.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
        panel.set(ylabel=label, ylim=(0, None), xlim=(-0.6, len(names) - 0.4))
    methods = list(dict.fromkeys(f.method for f in found if f.window is not None))
    for index, method in enumerate(methods):
        some = sorted((f for f in found if f.method == method and f.window is not None), key=lambda f: f.window or 0)
        k = [f.window or 0 for f in some]
        style = COLOURS[(index + 1) % len(COLOURS)], MARKERS[index % len(MARKERS)]
        _whiskers(axes[2], k, [f.contamination for f in some], *style, label=method, scale=100, line=True)
        for figures in some:
            if figures.contamination.value == figures.contamination.value:
                at = (figures.window or 0, 100 * figures.contamination.value)
                axes[2].annotate(f"{figures.anchors.value:.0f}", at, (6, 5), textcoords="offset points", fontsize=8)
        axes[2].set_xticks(k)
    axes[2].set(xlabel="window k (beside each point: anchors a text)", ylabel="wrong anchors, %", ylim=(0, None))
    if len(methods) > 1:
        axes[2].legend(frameon=False, fontsize=8)
    for panel in axes:
        panel.grid(alpha=0.25)
    _save(figure, path, title)


def draw_visible(found: Suitability, path: Path, title: str) -> None:
    """By distance to the nearest mask: right tokens kept, planted ones flipped, without and with the probe."""
    figure, axes = plt.subplots(1, 1 + len(KINDS), figsize=(12, 3.8), sharey=True, constrained_layout=True)
    labels = [str(low) if low == high else f"{low}-{high}" if high else f"{low}+" for low, high in DISTANCES]
    series = [("right tokens kept", [b.kept for b in found.by_distance])]
    series += [(f"planted {kind} errors flipped", [b.flipped[kind] for b in found.by_distance]) for kind in KINDS]
    for panel, (name, pairs) in zip(axes, series, strict=True):
        for which, (label, colour, marker) in enumerate((("no probe", OFF, "o"), ("probe", ON, "s"))):
            x = [place + (which - 0.5) * 0.18 for place in range(len(labels))]
            _whiskers(panel, x, [pair[which] for pair in pairs], colour, marker, label=label, scale=100)
        panel.set_xticks(range(len(labels)), labels)
        panel.set_title(name, fontsize=11)
        panel.set(xlabel="distance to the nearest mask", ylim=(0, 105))
        panel.grid(alpha=0.25)
    axes[0].set_ylabel("%")
    axes[0].legend(frameon=False, fontsize=9, loc="lower right")
    _save(figure, path, title)


def draw_stability(
    lasting: Mapping[str, Persistence], windows: Mapping[str, Sequence[ErrorFigures]], path: Path, title: str
) -> None:
    """P(k) with the fitted and the independent fall on a log scale, the factors, and wrong anchors by window."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2), constrained_layout=True)
    for index, (name, found) in enumerate(lasting.items()):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        k = [place + 1 for place in range(len(found.lasting))]
        _whiskers(axes[0], [x + 0.06 * index for x in k], found.lasting, colour, marker, label=name, line=True)
        if found.lasting[0].value > 0:
            axes[0].plot(k, found.independent, color=colour, linestyle=":", linewidth=1.2)
        _whiskers(axes[1], [x + 0.06 * index for x in k[:-1]], found.factors, colour, marker, label=name, line=True)
        q = found.lasting[0].value
        axes[1].axhline(q, color=colour, linestyle=":", linewidth=1.2)
        if name in windows:
            some = windows[name]
            x = [(f.window or 0) + 0.06 * index for f in some]
            _whiskers(axes[2], x, [f.contamination for f in some], colour, marker, label=name, scale=100, line=True)
            axes[2].set_xticks([f.window or 0 for f in some])
    axes[0].set(
        yscale="log",
        xlabel="steps k",
        ylabel="wrong, and the same for k steps",
        title="how long wrong predictions last",
    )
    known = [e.value for found in lasting.values() for e in found.lasting if e.value > 0]
    axes[0].set_ylim(min(known, default=0.1) / 20, 1)
    axes[0].plot([], [], color=GREY, linestyle=":", label="independent steps: P(1)^k")
    axes[0].legend(frameon=False, fontsize=8)
    axes[1].set(
        xlabel="steps k", ylabel="P(k+1) / P(k)", ylim=(0, 1.05), title="level: exponential; dotted: independent"
    )
    axes[2].set(xlabel="window k", ylabel="wrong anchors, %", ylim=(0, None), title="anchors of decodes with window k")
    for panel in axes:
        panel.title.set_fontsize(10)
        panel.grid(alpha=0.25)
    _save(figure, path, title)


def draw_runtime(found: Sequence[Breakdown], published: Sequence[PublishedTimes], path: Path, title: str) -> None:
    """Shares of a step, one bar a decoder; below, hatched, what the paper says of an A100."""
    figure, panel = plt.subplots(figsize=(10, 1.2 + 0.42 * (len(found) + len(published))), constrained_layout=True)
    bars = [(b.label, {n: e.value for n, e in b.parts.items()}, f"{b.step.value:.1f} ms", "") for b in found]
    bars += [
        (f"paper's {e.label}", dict(e.parts), f"{sum(e.parts.values()):.1f} ms on an A100", "//") for e in published
    ]
    for place, (_, parts, total, hatch) in enumerate(bars):
        whole, left = sum(parts.values()), 0.0
        for index, name in enumerate(COLUMNS):
            width = 100 * parts.get(name, 0.0) / whole
            panel.barh(
                -place, width, left=left, color=COLOURS[index], hatch=hatch, edgecolor="white", linewidth=0.5,
                label=name.replace("head", "LM head") if place == 0 else None,
            )  # fmt: skip
            left += width
        panel.text(101, -place, total, va="center", fontsize=9)
    panel.set_yticks([-place for place in range(len(bars))], [bar[0] for bar in bars], fontsize=9)
    panel.set(xlabel="share of a step, %", xlim=(0, 122), xticks=range(0, 101, 20))
    panel.legend(ncols=len(COLUMNS), frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    _save(figure, path, title)


def _whiskers(
    panel: Any, x: Sequence[float], estimates: Sequence[Estimate], colour: str, marker: str, label: str | None = None,
    scale: float = 1.0, line: bool = False,
) -> None:  # fmt: skip
    known = [(at, e) for at, e in zip(x, estimates, strict=True) if not math.isnan(e.value)]
    if not known:
        return
    y = [scale * e.value for _, e in known]
    error = [[scale * max(e.value - e.low, 0) for _, e in known], [scale * max(e.high - e.value, 0) for _, e in known]]
    panel.errorbar(
        [at for at, _ in known], y, error, color=colour, marker=marker, capsize=3, markersize=5,
        linewidth=1.3, linestyle="-" if line else "none", label=label,
    )  # fmt: skip


def _band(panel: Any, x: Sequence[float], estimates: Sequence[Estimate], colour: str, marker: str, label: str) -> None:
    panel.plot(x, [e.value for e in estimates], color=colour, marker=marker, markersize=5, linewidth=1.5, label=label)
    panel.fill_between(
        x, [e.low for e in estimates], [e.high for e in estimates], color=colour, alpha=0.15, linewidth=0
    )


def _save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=12)
    figure.savefig(path, dpi=110)
    plt.close(figure)
