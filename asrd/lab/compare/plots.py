"""Plots of a comparison: accuracy against forward passes, curves over a setting, a grid of two, or the table's rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from matplotlib.figure import Figure

from asrd.lab.compare.report import Summary
from asrd.lab.plotting import Label, Theme, caption, decoder_style, figure, log_axis, place_labels, save

ACCURACY, FORWARDS, TIME = "accuracy, %", "forward passes per problem", "ms per problem"
CHANGE_COST = ("kv_cache", "kv_refresh", "block_length")  # settings that change what one forward pass costs
INTERVALS = "Bars are 95 % intervals."


class Point(Protocol):
    """A setting of a decoder on the plot of accuracy against forward passes."""

    @property
    def decoder(self) -> str: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def forwards(self) -> float: ...
    @property
    def accuracy(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


def draw(summaries: Sequence[Summary], path: Path, title: str, axes: tuple[str, ...] | None = None) -> list[Path]:
    """Plot a table as its `axes` say; returns the files, for light and for dark backgrounds.

    None: accuracy against forward passes, one curve per decoder. One: accuracy and forward passes over the values of
    that setting. Two: a grid of them. Empty: one line per row of the table.
    """
    if axes is None:
        return draw_frontier({"": summaries}, path, title)
    kinds: tuple[Callable[..., Figure], ...] = (_rows, _sweep, _grid)
    return save(path, partial(kinds[len(axes)], summaries, title, *axes))


def draw_frontier(by_model: Mapping[str, Sequence[Point]], path: Path, title: str) -> list[Path]:
    """Accuracy against forward passes, one panel per model, one labelled curve per decoder; returns the files.

    The number at a point is the setting that its curve varies.
    """
    return save(path, partial(_frontier, by_model, title))


def varied(points: Sequence[Point]) -> str | None:
    """The setting in which the points of a curve differ; None if there is none, or more than one."""
    names = {name for point in points for name in point.settings}
    differing = [name for name in sorted(names) if len({repr(point.settings.get(name)) for point in points}) > 1]
    return differing[0] if len(differing) == 1 else None


def _frontier(by_model: Mapping[str, Sequence[Point]], title: str, theme: Theme) -> Figure:
    made, panels = figure(4.9 if len(by_model) == 1 else 4.4, 1, len(by_model), sharey=True)
    numbers: dict[str, list[str]] = {}
    todo = []
    for panel, (model, summaries) in zip(panels[0], by_model.items(), strict=True):
        labels: list[Label] = []
        values: list[Label] = []
        lines = []
        for decoder in dict.fromkeys(s.decoder for s in summaries):
            points = sorted((s for s in summaries if s.decoder == decoder), key=lambda s: s.forwards)
            spots = [(s.forwards, 100 * s.accuracy) for s in points]
            _errorbar(panel, theme, decoder, spots, points)
            lines += [spots, *([(x, 100 * s.low), (x, 100 * s.high)] for s, (x, _) in zip(points, spots, strict=True))]
            colour = theme.as_text(theme.decoder(decoder))
            ends = [*spots[:1], *spots[:0:-1]]
            labels.append(Label(decoder, ends, colour, size=9.5 if len(by_model) == 1 else 8.5, bold=True))
            setting = varied(points)
            if setting is not None:
                if decoder not in numbers.setdefault(setting, []):
                    numbers[setting].append(decoder)
                texts = [_value(point.settings[setting]) for point in points]
                values += [
                    Label(t, [spot], colour, size=7.5, optional=True) for t, spot in zip(texts, spots, strict=True)
                ]
        log_axis(panel.xaxis, [s.forwards for s in summaries])
        panel.set(xlabel=FORWARDS, title=model)
        todo.append((panel, [*labels, *values], lines))
    panels[0, 0].set_ylabel(ACCURACY)
    shown = ", ".join(f"{setting} ({', '.join(decoders)})" for setting, decoders in numbers.items())
    caption(made, theme, title, f"{INTERVALS} Numbers at the points: {shown}." if shown else INTERVALS)
    for panel, labels, lines in todo:
        place_labels(panel, labels, lines)
    return made


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _errorbar(
    panel: Any, theme: Theme, decoder: str, spots: Sequence[tuple[float, float]], points: Sequence[Point], **more: Any
) -> None:
    """The curve through the spots (x, accuracy in per cent), with the intervals of the points."""
    error = [[100 * (s.accuracy - s.low) for s in points], [100 * (s.high - s.accuracy) for s in points]]
    style = decoder_style(theme, decoder) | {"elinewidth": 0.8, "capsize": 1.5}
    panel.errorbar(*zip(*spots, strict=True), error, **style, **more)


def _sweep(summaries: Sequence[Summary], title: str, axis: str, theme: Theme) -> Figure:
    names = [ACCURACY, FORWARDS, *([TIME] if axis in CHANGE_COST else [])]
    made, panels = figure(3.9, 1, len(names))
    swept = [s for s in summaries if axis in s.settings]
    values = list(dict.fromkeys(s.settings[axis] for s in swept))
    decoders = list(dict.fromkeys(s.decoder for s in swept))
    for index, decoder in enumerate(decoders):
        points, style = [s for s in swept if s.decoder == decoder], decoder_style(theme, decoder)
        aside = 0.06 * (index - (len(decoders) - 1) / 2)  # so that intervals do not hide each other
        x = [values.index(s.settings[axis]) + aside for s in points]
        spots = [(at, 100 * s.accuracy) for at, s in zip(x, points, strict=True)]
        _errorbar(panels[0, 0], theme, decoder, spots, points, label=decoder)
        panels[0, 1].plot(x, [s.forwards for s in points], **style)
        if len(names) > 2:
            panels[0, 2].plot(x, [math.nan if s.seconds is None else 1e3 * s.seconds for s in points], **style)
    for fixed in (s for s in summaries if axis not in s.settings):
        panels[0, 0].axhline(
            100 * fixed.accuracy, color=theme.decoder(fixed.decoder), linestyle="--", linewidth=1.2, label=fixed.label
        )
    for panel, name in zip(panels[0], names, strict=True):
        panel.set(xlabel=axis, title=name)
        panel.set_xticks(range(len(values)), [str(value) for value in values])
    for panel in panels[0, 1:]:
        panel.set_ylim(bottom=0)
    panels[0, 1].legend(*panels[0, 0].get_legend_handles_labels(), loc="lower right")
    caption(made, theme, title, INTERVALS)
    return made


def _grid(summaries: Sequence[Summary], title: str, across: str, up: str, theme: Theme) -> Figure:
    swept = [s for s in summaries if across in s.settings and up in s.settings]
    columns = list(dict.fromkeys(s.settings[across] for s in swept))
    rows = list(dict.fromkeys(s.settings[up] for s in swept))
    made, panels = figure(4.0, 1, 2)
    for panel, name, values, form in (
        (panels[0, 0], ACCURACY, [100 * s.accuracy for s in swept], "{:.0f}"),
        (panels[0, 1], FORWARDS, [s.forwards for s in swept], "{:.1f}"),
    ):
        places = [(rows.index(s.settings[up]), columns.index(s.settings[across])) for s in swept]
        found = dict(zip(places, values, strict=True))
        panel.imshow(
            [[found[row, column] for column in range(len(columns))] for row in range(len(rows))],
            cmap="cividis", origin="lower", aspect="auto",
        )  # fmt: skip
        for (row, column), number in found.items():
            panel.text(column, row, form.format(number), ha="center", va="center", color="black",
                       bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 2})  # fmt: skip
        panel.set_xticks(range(len(columns)), [str(c) for c in columns])
        panel.set_yticks(range(len(rows)), [str(r) for r in rows])
        panel.set(xlabel=across, ylabel=up, title=name)
        panel.grid(visible=False)
    widest = max(max(s.high - s.accuracy, s.accuracy - s.low) for s in swept)
    caption(made, theme, title, f"95 % intervals of the accuracy: at most ± {100 * widest:.1f} points.")
    return made


def _rows(summaries: Sequence[Summary], title: str, theme: Theme) -> Figure:
    made, panels = figure(1.5 + 0.36 * len(summaries), 1, 2, sharey=True, width_ratios=(3, 2))
    for place, summary in enumerate(summaries):
        style = decoder_style(theme, summary.decoder)
        error = [[100 * (summary.accuracy - summary.low)], [100 * (summary.high - summary.accuracy)]]
        panels[0, 0].errorbar([100 * summary.accuracy], [place], xerr=error, capsize=3, elinewidth=1.2, **style)
        panels[0, 1].barh(place, summary.forwards, color=style["color"], height=0.6)
        panels[0, 1].annotate(f"{summary.forwards:.1f}", (summary.forwards, place), xytext=(4, 0),
                              textcoords="offset points", va="center")  # fmt: skip
    panels[0, 0].set_yticks(range(len(summaries)), [s.label for s in summaries])
    panels[0, 0].invert_yaxis()
    panels[0, 0].set(xlabel=ACCURACY)
    panels[0, 1].set(xlabel=FORWARDS, xlim=(0, 1.15 * max(s.forwards for s in summaries)))
    panels[0, 1].grid(visible=False, axis="y")
    caption(made, theme, title, INTERVALS)
    return made
