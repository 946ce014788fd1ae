"""What all plots share: two themes, the look of each decoder, log axes with plain numbers, labels that avoid the data.

A plot is a function from a `Theme` to a figure; `save` writes it as NAME.png for light and NAME-dark.png for dark
backgrounds. Figures are at most `WIDTH` inches wide, so that their text is readable at the width of a page.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from asrd.files import replacing
from asrd.viewer import palette

WIDTH = 9.0  # inches
DPI = 200
NOTE_WIDTH = 115  # characters
STEPS = {30: (1, 1.5, 2, 3, 4, 6, 8), 1e3: (1, 2, 5), math.inf: (1,)}  # largest range: ticks of a log axis per decade
MARKERS = {  # and sizes: where two decoders coincide, the smaller marker lies on the larger one
    "LLaDA's loop": ("h", 9),
    "standard": ("s", 8),
    "threshold": ("o", 9),
    "factor": ("^", 8),
    "wino": ("v", 7),
    "saber": ("P", 7),
    "random-revocation": ("X", 6),
    "native": ("<", 7),
    "asrd": ("D", 5),
    "loo": ("*", 9),
}
OTHER_MARKER = ("p", 6)
TOO_CROWDED = 2.5  # cost of a place above which an optional label is left out


@dataclass(frozen=True)
class Theme:
    """A background and the colours on it."""

    name: str  # "light" or "dark"
    paper: str
    ink: str
    soft: str  # axes, ticks, secondary text
    grid: str

    def pick(self, colour: palette.Colour) -> str:
        """The tone of a colour for this theme."""
        return str(getattr(colour, self.name))

    def decoder(self, name: str) -> str:
        """The colour of a decoder."""
        return self.pick(palette.decoder_colour(name))

    def part(self, name: str) -> str:
        """The colour of a part of a step."""
        return self.pick(palette.PARTS[name])

    def as_text(self, colour: str) -> str:
        """A colour for text: closer to the ink, to be readable."""
        red, green, blue = (0.6 * c + 0.4 * i for c, i in zip(to_rgb(colour), to_rgb(self.ink), strict=True))
        return to_hex((red, green, blue))

    @property
    def settings(self) -> dict[str, Any]:
        """matplotlib's settings."""
        text = dict.fromkeys(("text.color", "axes.titlecolor", "axes.labelcolor"), self.ink)
        ticks = {"xtick.color": self.soft, "ytick.color": self.soft, "axes.edgecolor": self.soft}
        labels = {"xtick.labelcolor": self.ink, "ytick.labelcolor": self.ink, "legend.labelcolor": self.ink}
        papers = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), self.paper)
        sizes = {"font.size": 9.5, "axes.titlesize": 10.5, "axes.labelsize": 9.5, "legend.fontsize": 9}
        sizes |= {"xtick.labelsize": 9, "ytick.labelsize": 9, "figure.titlesize": 12}
        grid = {"axes.grid": True, "grid.color": self.grid, "grid.linewidth": 0.7, "axes.axisbelow": True}
        spines = {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
        return text | ticks | labels | papers | sizes | grid | spines


THEMES = (
    Theme("light", paper="#ffffff", ink="#1b2230", soft="#5c677a", grid="#e3e6ec"),
    Theme("dark", paper="#0d1117", ink="#e6edf3", soft="#9aa5b5", grid="#262d37"),
)


def save(path: Path, draw: Callable[[Theme], Figure]) -> list[Path]:
    """Write the plot as `path` for light and NAME-dark for dark backgrounds; returns the files."""
    files = [path, path.with_stem(f"{path.stem}-dark")]
    for theme, file in zip(THEMES, files, strict=True):
        with mpl.rc_context(theme.settings), replacing(file) as beside:  # type: ignore[arg-type]
            draw(theme).savefig(beside, dpi=DPI)
    return files


def figure(height: float, rows: int = 1, columns: int = 1, width: float = WIDTH, **options: Any) -> tuple[Figure, Any]:
    """An empty figure and its panels [rows, columns]."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)  # which can measure text
    return made, made.subplots(rows, columns, squeeze=False, **options)


def caption(made: Figure, theme: Theme, title: str, note: str = "") -> None:
    """The title above the panels; its further lines and the note below them. Afterwards the layout is final."""
    heading, *rest = title.split("\n")
    made.suptitle(heading, x=0.01, ha="left", fontweight="bold")
    below = " ".join([*(f"{line}." for line in rest), note]).strip()
    if below:
        made.supxlabel(textwrap.fill(below, NOTE_WIDTH), x=0.01, ha="left", fontsize=8.5, color=theme.soft)
    made.draw_without_rendering()
    made.set_layout_engine("none")


def decoder_style(theme: Theme, name: str) -> dict[str, Any]:
    """Colour, marker and line width of a decoder, as arguments of `plot` and `errorbar`."""
    marker, size = MARKERS.get(name, OTHER_MARKER)
    look = {"color": theme.decoder(name), "marker": marker, "markersize": size, "linewidth": 0.22 * size}
    return look | {"markeredgecolor": theme.paper, "markeredgewidth": 0.6}


def series_style(theme: Theme, index: int) -> dict[str, Any]:
    """Colour and marker of a series that is not a decoder."""
    colour = theme.pick(palette.SERIES[index % len(palette.SERIES)])
    look = {"color": colour, "marker": "osDv"[index % 4], "markersize": 5.5, "linewidth": 1.5}
    return look | {"markeredgecolor": theme.paper, "markeredgewidth": 0.6}


def log_axis(axis: Any, values: Sequence[float], ticks: Sequence[float] = ()) -> None:
    """A logarithmic axis over positive values with plain numbers: the ends of the range and, where their labels do not
    touch, the given ticks (default: round numbers)."""
    low, high = min(values), max(values)
    steps = next(steps for most, steps in STEPS.items() if high / low <= most)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    between = ticks or [step * 10.0**decade for decade in decades for step in steps]
    gap = max(1.15, (high / low) ** 0.12)  # least ratio of two ticks
    shown = [low, high] if high > low else [low]
    for value in between:
        if low < value < high and all(max(value, tick) / min(value, tick) >= gap for tick in shown):
            shown.append(value)
    getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
    margin = (high / low) ** 0.06 if high > low else 1.5
    getattr(axis.axes, f"set_{axis.axis_name}lim")(low / margin, high * margin)
    axis.set_major_locator(FixedLocator(sorted(shown)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axis.set_minor_locator(NullLocator())


def plain(value: float) -> str:
    """A number without exponent: 0.04, 1.5, 22, 126,464."""
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2g}"


@dataclass(frozen=True)
class Label:
    """A text to be placed at one of some points (x, y) of a panel."""

    text: str
    points: Sequence[tuple[float, float]]
    colour: str
    size: float = 9.0
    bold: bool = False
    optional: bool = False  # left out where it would cover other labels or much of a line


def place_labels(panel: Any, labels: Sequence[Label], lines: Sequence[Sequence[tuple[float, float]]]) -> None:
    """Write each label beside one of its points, where it covers least of the lines and of the other labels.

    lines: the polylines of the panel in data coordinates. The layout and limits of the panel must be final.
    """
    transform = panel.transData.transform
    scale = panel.figure.dpi / 72
    drawn = [spot for line in lines for spot in _sampled(transform(line), 4 * scale)]
    box = panel.get_window_extent()
    taken: list[tuple[float, float, float, float]] = []
    for label in labels:
        width, height = _size(panel, label)
        best: tuple[float, tuple[float, float, float, float]] | None = None
        for number, (x, y) in enumerate(transform(label.points)):
            for dx, dy in _directions(
                width, height, 6 * scale, reaches=(1.0, 1.8) if label.optional else (1.0, 2.2, 3.6)
            ):
                frame = (x + dx - width / 2, y + dy - height / 2, x + dx + width / 2, y + dy + height / 2)
                outside = frame[0] < box.x0 or frame[2] > box.x1 or frame[1] < box.y0 or frame[3] > box.y1
                cost = 400.0 * outside + 40.0 * sum(_overlap(frame, other) for other in taken)
                cost += sum(frame[0] < px < frame[2] and frame[1] < py < frame[3] for px, py in drawn)
                cost += 0.5 * number + 0.01 * math.hypot(dx, dy) / scale
                if best is None or cost < best[0]:
                    best = (cost, frame)
        assert best is not None
        if label.optional and best[0] > TOO_CROWDED:
            continue
        frame = best[1]
        taken.append((frame[0] - 2 * scale, frame[1], frame[2] + 2 * scale, frame[3]))
        x, y = panel.transData.inverted().transform(((frame[0] + frame[2]) / 2, (frame[1] + frame[3]) / 2))
        panel.text(
            x, y, label.text, color=label.colour, fontsize=label.size, ha="center", va="center",
            fontweight="bold" if label.bold else "normal", zorder=5, in_layout=False,
        )  # fmt: skip


def label_ends(panel: Any, labels: Sequence[Label]) -> None:
    """Write each label to the right of its last point, in their order from top to bottom, moved apart where they touch.

    The panel needs room on its right; its layout and limits must be final.
    """
    placed = sorted(labels, key=lambda label: panel.transData.transform(label.points[-1])[1])
    scale = panel.figure.dpi / 72
    bottom = -math.inf
    for label in placed:
        _, height = _size(panel, label)
        _, y = panel.transData.transform(label.points[-1])
        lift = max(0.0, bottom - (y - height / 2))
        bottom = y + lift + height / 2
        panel.annotate(
            label.text, label.points[-1], (8, lift / scale), textcoords="offset points", va="center",
            color=label.colour, fontsize=label.size, fontweight="bold" if label.bold else "normal", in_layout=False,
        )  # fmt: skip


def _size(panel: Any, label: Label) -> tuple[float, float]:
    """Width and height of a label in pixels."""
    trial = panel.text(0, 0, label.text, fontsize=label.size, fontweight="bold" if label.bold else "normal")
    extent = trial.get_window_extent(panel.figure.canvas.get_renderer())
    trial.remove()
    return extent.width, extent.height


def _directions(width: float, height: float, gap: float, reaches: Sequence[float]) -> list[tuple[float, float]]:
    """Offsets from a point to the centre of a label around it, the nearest first."""
    found = []
    for reach in reaches:
        across, up = width / 2 + reach * gap, height / 2 + reach * gap
        found += [(0, up), (0, -up), (across, 0), (-across, 0)]
        found += [(across, up * 0.7), (-across, up * 0.7), (across, -up * 0.7), (-across, -up * 0.7)]
    return found


def _sampled(points: Any, radius: float) -> list[tuple[float, float]]:
    """Points along a polyline in pixels, about 4 apart, and around the markers at its vertices."""
    around = [(0.0, 0.0), (radius, 0.0), (-radius, 0.0), (0.0, radius), (0.0, -radius)]
    spots = [(float(x) + dx, float(y) + dy) for x, y in points for dx, dy in around]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        count = int(math.hypot(x1 - x0, y1 - y0) // 4)
        spots += [(float(x0 + (x1 - x0) * k / count), float(y0 + (y1 - y0) * k / count)) for k in range(1, count)]
    return spots


def _overlap(one: Sequence[float], other: Sequence[float]) -> float:
    """Share of the smaller of two boxes (left, bottom, right, top) that both cover."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    up = min(one[3], other[3]) - max(one[1], other[1])
    if across <= 0 or up <= 0:
        return 0.0
    smaller = min((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return across * up / smaller
