"""Tables in Markdown, and the plot of growth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

AXES = {"L": "canvas length L", "V": "vocabulary V", "B": "batch B", "capacity": "anchor capacity m"}


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


def draw_growth(points: list[dict[str, Any]], path: Path) -> None:
    """One panel an axis: distinct bytes (solid) and all bytes (dashed) relative to the axis's first value."""
    axes = [axis for axis in AXES if any(point["axis"] == axis for point in points)]
    figure, panels = plt.subplots(1, len(axes), figsize=(3.6 * len(axes), 3.2), squeeze=False)
    for axis, panel in zip(axes, panels[0], strict=True):
        mine = [point for point in points if point["axis"] == axis]
        for colour, operation in enumerate(dict.fromkeys(point["operation"] for point in mine)):
            line = [point for point in mine if point["operation"] == operation]
            values = [point["value"] for point in line]
            for name, style in (("sectors", "o-"), ("bytes", "x--")):
                shares = [point[name] / line[0][name] for point in line]
                panel.plot(values, shares, style, color=f"C{colour}", label=f"{operation}, {name}")
        panel.set_xlabel(AXES[axis])
        panel.set_ylim(bottom=0)
        panel.locator_params(axis="x", nbins=4)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=6)
    panels[0][0].set_ylabel("bytes, relative to the first")
    figure.suptitle("bytes moved (distinct sectors, all accesses), counted in the interpreter", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
