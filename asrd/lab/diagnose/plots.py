"""The plots of the diagnoses, each with its intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from asrd.lab.diagnose.attention import PAIRS, Redistribution
from asrd.lab.diagnose.errors import ErrorFigures
from asrd.lab.diagnose.intervals import Estimate
from asrd.lab.diagnose.persistence import Persistence
from asrd.lab.diagnose.runtime import COLUMNS, Breakdown, PublishedTimes
from asrd.lab.diagnose.visible import DISTANCES, KINDS, Suitability
from asrd.lab.plotting import Label, Theme, caption, decoder_style, figure, log_axis, place_labels, save, series_style

INTERVALS = "Bars are 95 % intervals over prompts."
Spots = list[tuple[float, float]]


def draw_attention(found: Sequence[Redistribution], path: Path, title: str) -> list[Path]:
    """Attention between roles by layer, with the edit off and on; below, the relative change."""
    return save(path, partial(_attention, found, title))


def _attention(found: Sequence[Redistribution], title: str, theme: Theme) -> Figure:
    made, panels = figure(5.6, 2, len(PAIRS), sharex="col", sharey="row", height_ratios=(3, 2))
    for column, (of, to) in enumerate(PAIRS):
        layers = [r for r in found if (r.of, r.to) == (of, to)]
        above, below = panels[:, column]
        off, on = series_style(theme, 0), series_style(theme, 1)
        _intervals(above, [r.layer - 0.1 for r in layers], [r.off for r in layers], off | {"label": "clean"}, 100)
        edited = on | {"label": f"with {layers[0].edit}"}
        _intervals(above, [r.layer + 0.1 for r in layers], [r.on for r in layers], edited, 100)
        above.legend(loc="upper left", handlelength=1.2)
        above.set_title(f"{of} to {to}")
        changes = [_relative(r.change, r.off.value) for r in layers]
        _intervals(below, [r.layer for r in layers], changes, on, 100)
        below.axhline(0, color=theme.soft, linewidth=1)
        numbers = [r.layer for r in layers]
        below.set(xlabel="layer", xticks=numbers if len(numbers) <= 8 else numbers[:: len(numbers) // 8])
    top = panels[0, 0].get_ylim()[1]
    panels[0, 0].set_ylim(0, 1.3 * top)
    panels[0, 0].set_ylabel("mean attention, %")
    panels[1, 0].set_ylabel("change, %")
    caption(made, theme, f"Attention between roles, with and without guidance and probe\n{title}", INTERVALS)
    return made


def draw_errors(found: Sequence[ErrorFigures], path: Path, title: str) -> list[Path]:
    """Error rate and R of each method, and wrong anchors by window."""
    return save(path, partial(_errors, found, title))


def _errors(found: Sequence[ErrorFigures], title: str, theme: Theme) -> Figure:
    made, panels = figure(1.9 + 0.35 * max(len(found), 4), 1, 3, width_ratios=(1, 1, 1.2))
    names = [f.method if f.window is None else f"{f.method} k={f.window}" for f in found]
    for panel, field, label in zip(
        panels[0],
        ("error_rate", "long_span"),
        ("wrong tokens, %", "R: of these in runs of 15 or more, %"),
        strict=False,
    ):
        for place, figures in enumerate(found):
            _across(panel, place, getattr(figures, field), decoder_style(theme, figures.method))
        panel.set_yticks(range(len(names)), names if field == "error_rate" else [])
        panel.invert_yaxis()
        panel.set(xlabel=label, ylim=(len(names) - 0.4, -0.6))
        _from_zero(panel, "x")
    last, labels, lines = panels[0, 2], list[Label](), list[Spots]()
    for method in dict.fromkeys(f.method for f in found if f.window is not None):
        some = sorted((f for f in found if f.method == method and f.window is not None), key=lambda f: f.window or 0)
        style = decoder_style(theme, method)
        spots = _intervals(last, [f.window or 0 for f in some], [f.contamination for f in some], style, 100, line=True)
        colour = theme.as_text(style["color"])
        labels.append(Label(method, spots[::-1], colour, bold=True))
        known = [f for f in some if not math.isnan(f.contamination.value)]
        labels += [Label(f"{f.anchors.value:.0f}", [spot], colour) for f, spot in zip(known, spots, strict=True)]
        lines += [spots, *_bars([f.window or 0 for f in some], [f.contamination for f in some], 100)]
        last.set_xticks([f.window or 0 for f in some])
    last.set(xlabel="window k", ylabel="wrong anchors, %")
    last.margins(x=0.15, y=0.15)
    _from_zero(last, "y")
    note = "Bars are 95 % intervals over texts. Numbers at the points: anchors per text."
    caption(made, theme, f"Errors of finished texts\n{title}", note)
    place_labels(last, [label for label in labels if label.points], [line for line in lines if line])
    return made


def draw_visible(found: Suitability, path: Path, title: str) -> list[Path]:
    """By distance to the nearest mask: right tokens kept, planted ones flipped, without and with the probe."""
    return save(path, partial(_visible, found, title))


def _visible(found: Suitability, title: str, theme: Theme) -> Figure:
    made, panels = figure(3.6, 1, 1 + len(KINDS), sharey=True)
    labels = [str(low) if low == high else f"{low}-{high}" if high else f"{low}+" for low, high in DISTANCES]
    series = [("right tokens kept", [b.kept for b in found.by_distance])]
    series += [(f"{kind} wrong tokens flipped", [b.flipped[kind] for b in found.by_distance]) for kind in KINDS]
    for panel, (name, pairs) in zip(panels[0], series, strict=True):
        for which, label in enumerate(("without probe", "with probe")):
            x = [place + (which - 0.5) * 0.2 for place in range(len(labels))]
            _intervals(panel, x, [pair[which] for pair in pairs], series_style(theme, which) | {"label": label}, 100)
        panel.set_xticks(range(len(labels)), labels)
        panel.set(title=name, xlabel="tokens to the nearest mask", ylim=(-3, 105))
    panels[0, 0].set_ylabel("share of tokens, %")
    panels[0, 0].legend(loc="lower right")
    caption(made, theme, f"Predictions at visible tokens, right and planted wrong\n{title}", INTERVALS)
    return made


def draw_stability(
    lasting: Mapping[str, Persistence], windows: Mapping[str, Sequence[ErrorFigures]], path: Path, title: str
) -> list[Path]:
    """P(k) with that of independent steps on a log scale, the ratios P(k+1) / P(k), and wrong anchors by window."""
    return save(path, partial(_stability, lasting, windows, title))


def _stability(
    lasting: Mapping[str, Persistence], windows: Mapping[str, Sequence[ErrorFigures]], title: str, theme: Theme
) -> Figure:
    made, panels = figure(4.0, 1, 3)
    decay, ratios, anchors = panels[0]
    known = [e for found in lasting.values() for e in found.lasting if e.value > 0]
    lowest, highest = min((e.value for e in known), default=0.1), max((e.high for e in known), default=1)
    log_axis(decay.yaxis, [100 * lowest / 4, 100 * highest])
    for index, (name, found) in enumerate(lasting.items()):
        style = series_style(theme, index) | {"label": name}
        aside = 0.07 * (index - (len(lasting) - 1) / 2)
        k = [place + 1 + aside for place in range(len(found.lasting))]
        dotted = {"color": style["color"], "linestyle": ":", "linewidth": 1.3}
        _intervals(decay, k, found.lasting, style, 100, line=True)
        _intervals(ratios, k[:-1], found.factors, style, line=True)
        if found.lasting[0].value > 0:
            decay.plot(k, [100 * p for p in found.independent], **dotted)
            ratios.axhline(found.lasting[0].value, **dotted)
        some = windows.get(name, ())
        x = [(f.window or 0) + aside for f in some]
        _intervals(anchors, x, [f.contamination for f in some], style, 100, line=True)
        anchors.set_xticks([f.window or 0 for f in some])
    decay.set(title="wrong and unchanged k steps", xlabel="steps k", ylabel="P(k), %")
    ratios.set(title="ratio of successive P", xlabel="steps k", ylabel="P(k+1) / P(k)", ylim=(-0.03, 1.05))
    anchors.set(title="wrong anchors", xlabel="window k", ylabel="share of anchors, %")
    _from_zero(anchors, "y")
    decay.legend()
    note = f"Dotted: if steps were independent. A constant ratio is an exponential decay. {INTERVALS}"
    caption(made, theme, f"How long wrong predictions last, and anchors that are wrong\n{title}", note)
    return made


def draw_runtime(found: Sequence[Breakdown], published: Sequence[PublishedTimes], path: Path, title: str) -> list[Path]:
    """Shares of a step's time, one bar per decoder; hatched, the paper's on an A100."""
    return save(path, partial(_runtime, found, published, title))


def _runtime(found: Sequence[Breakdown], published: Sequence[PublishedTimes], title: str, theme: Theme) -> Figure:
    made, panels = figure(1.5 + 0.34 * (len(found) + len(published)))
    panel = panels[0, 0]
    bars = [(b.label, {n: e.value for n, e in b.parts.items()}, f"{b.step.value:.1f} ms", "") for b in found]
    bars += [(f"{p.label} (paper)", dict(p.parts), f"{sum(p.parts.values()):.1f} ms, A100", "//") for p in published]
    for place, (_, parts, total, hatch) in enumerate(bars):
        whole, left = sum(parts.values()), 0.0
        for name in COLUMNS:
            width = 100 * parts.get(name, 0.0) / whole
            label = {"head": "LM head"}.get(name, name) if place == 0 else None
            panel.barh(place, width, left=left, color=theme.part(name), hatch=hatch, edgecolor=theme.paper,
                       linewidth=0.5, label=label)  # fmt: skip
            left += width
        panel.text(101, place, total, va="center")
    panel.set_yticks(range(len(bars)), [bar[0] for bar in bars])
    panel.invert_yaxis()
    panel.set(xlabel="share of a step's time, %", xlim=(0, 120), xticks=range(0, 101, 20))
    panel.grid(visible=False)
    panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(COLUMNS), columnspacing=1.2, handlelength=1.2)
    caption(made, theme, f"Time of a step by part\n{title}", "Hatched: published by the paper.")
    return made


def _intervals(
    panel: Any, x: Sequence[float], estimates: Sequence[Estimate], style: dict[str, Any], scale: float = 1.0,
    line: bool = False,
) -> Spots:  # fmt: skip
    """Points with their intervals, as far as they are defined; returns the points."""
    known = [(at, e) for at, e in zip(x, estimates, strict=True) if not math.isnan(e.value)]
    if not known:
        return []
    spots = [(at, scale * e.value) for at, e in known]
    error = [[scale * max(e.value - e.low, 0) for _, e in known], [scale * max(e.high - e.value, 0) for _, e in known]]
    clip = panel.get_yscale() == "log"  # elsewhere a marker at the edge is shown in full
    shown = style | {"linestyle": "-" if line else "none", "elinewidth": 1.1, "capsize": 2.5, "clip_on": clip}
    panel.errorbar(*zip(*spots, strict=True), error, **shown)
    return spots


def _bars(x: Sequence[float], estimates: Sequence[Estimate], scale: float) -> list[Spots]:
    return [
        [(at, scale * e.low), (at, scale * e.high)] for at, e in zip(x, estimates, strict=True) if e.value == e.value
    ]


def _across(panel: Any, place: float, estimate: Estimate, style: dict[str, Any]) -> None:
    """One point in per cent with a horizontal interval, if it is defined."""
    if not math.isnan(estimate.value):
        low, high = max(estimate.value - estimate.low, 0), max(estimate.high - estimate.value, 0)
        error = [[100 * low], [100 * high]]
        shown = style | {"elinewidth": 1.1, "capsize": 2.5, "clip_on": False}
        panel.errorbar([100 * estimate.value], [place], xerr=error, **shown)


def _relative(change: Estimate, whole: float) -> Estimate:
    """A change as a share of what it changes."""
    if not whole > 0:
        return Estimate(math.nan, math.nan, math.nan)
    return Estimate(change.value / whole, change.low / whole, change.high / whole)


def _from_zero(panel: Any, axis: str) -> None:
    """Start an axis at 0, with room for markers there."""
    low, high = getattr(panel, f"get_{axis}lim")()
    top = max(low, high)
    getattr(panel, f"set_{axis}lim")(-0.03 * top, top)
