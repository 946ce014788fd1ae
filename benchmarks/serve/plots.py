"""Throughput and latency of the server against offered load, and its memory over time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from asrd.lab.plotting import Theme, caption, figure, save, series_style


def draw(result: dict[str, Any], path: Path) -> list[Path]:
    """serve-load.png."""
    return save(path, partial(_draw, result))


def _draw(result: dict[str, Any], theme: Theme) -> Figure:
    made, panels = figure(3.7, 1, 3)
    throughput, latency, memory = panels[0]
    rows, first, second = result["offered"], series_style(theme, 0), series_style(theme, 1)
    share = [100 * row["share"] for row in rows]
    throughput.axhline(result["engine"]["per_second"], linestyle=":", color=theme.soft, label="bare engine")
    throughput.plot(share, [row["per_second"] for row in rows], label="answered", **first)
    refused = [row["refused"] / row["requests"] * row["offered"] for row in rows]
    throughput.plot(share, refused, label="refused (429)", **second)
    latency.plot(share, [row["p95"] for row in rows], label="95th percentile", **second)
    latency.plot(share, [row["p50"] for row in rows], label="median", **first)
    moments = [(seconds / 60, size) for seconds, size in result["memory"]]
    memory.plot(*zip(*moments, strict=True), color=first["color"], linewidth=first["linewidth"])
    memory.set(title="memory of the server (MB)", xlabel="minutes", ylim=(0, None))
    top = 1.4 * result["engine"]["per_second"]  # room for the legend
    throughput.set(title="requests per second", xlabel="offered load (% of capacity)", ylim=(0, top))
    latency.set(title="seconds to the answer", xlabel="offered load (% of capacity)", ylim=(0, None))
    for panel in (throughput, latency):
        panel.legend(loc="upper left")
    caption(made, theme, "The server under load", result["note"])
    return made
