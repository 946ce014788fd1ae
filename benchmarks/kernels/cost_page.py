"""Tables in Markdown, and the plot of growth."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from asrd.lab.plotting import Label, Theme, caption, figure, label_ends, log_axis, save, series_style

AXES = {"L": "canvas length L", "V": "vocabulary V", "B": "batch B", "capacity": "anchor capacity m"}
OPERATIONS = ("anchor_embed", "vocab_stats", "commit")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as a Markdown table; None is an empty cell."""
    if not rows:
        return "(nothing)"
    lines = ["| " + " | ".join(rows[0]) + " |", "|---" * len(rows[0]) + "|"]
    lines += ["| " + " | ".join(_cell(value) for value in row.values()) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{count} x {bits}" for bits, count in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def draw_growth(points: list[dict[str, Any]], path: Path) -> list[Path]:
    """Bytes moved by each operation along each axis of growth, against proportional growth; returns the files."""
    return save(path, partial(_growth, points))


def _growth(points: list[dict[str, Any]], theme: Theme) -> Figure:
    axes = [axis for axis in AXES if any(point["axis"] == axis for point in points)]
    rows = -(-len(axes) // 2)
    made, panels = figure(0.9 + 3.0 * rows, rows, min(len(axes), 2))
    todo = []
    for axis, panel in zip(axes, panels.flat, strict=False):
        mine = [point for point in points if point["axis"] == axis]
        values = sorted({point["value"] for point in mine})
        labels, lines = [], []
        for operation in dict.fromkeys(point["operation"] for point in mine):
            line = [point for point in mine if point["operation"] == operation]
            style = series_style(theme, OPERATIONS.index(operation))
            for name, dashes in (("sectors", "-"), ("bytes", "--")):
                spots = [(point["value"], point[name] / line[0][name]) for point in line]
                panel.plot(*zip(*spots, strict=True), **style | {"linestyle": dashes})
                lines.append(spots)
            labels.append(Label(operation, lines[-2], theme.as_text(style["color"]), bold=True))
        panel.plot(values, [value / values[0] for value in values], color=theme.soft, linestyle=":", linewidth=1.2)
        log_axis(panel.xaxis, values, ticks=values)
        panel.set_xlim(right=values[-1] * (values[-1] / values[0]) ** 0.45)
        log_axis(panel.yaxis, [1.0, max(y for spots in lines for _, y in spots), values[-1] / values[0]])
        panel.set_xlabel(AXES[axis])
        todo.append((panel, labels))
    for panel in panels[:, 0]:
        panel.set_ylabel("bytes, first size = 1")
    note = (
        "Counted in Triton's interpreter; axes are logarithmic. Solid: distinct 32-byte sectors, dashed: all loads and"
        " stores, dotted: proportional growth."
    )
    caption(made, theme, "Bytes moved by the kernels of a step, as sizes grow", note)
    for panel, labels in todo:
        label_ends(panel, labels)
    return made
