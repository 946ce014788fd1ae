"""Throughput, latency and memory of the server against offered load."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from asrd.lab.plotting import Theme, caption, figure, save, series_style

Row = dict[str, Any]


def draw(rows: Sequence[Row], engine: float, path: Path, note: str) -> list[Path]:
    """serve-load.png."""
    return save(path, partial(_draw, rows, engine, note))


def _draw(rows: Sequence[Row], engine: float, note: str, theme: Theme) -> Figure:
    made, panels = figure(4.0, 1, 2)
    throughput, latency = panels[0]
    share, style = [100 * row["share"] for row in rows], series_style(theme, 0)
    throughput.plot(share, [row["per_second"] for row in rows], label="answered", **style)
    throughput.plot(share, [row["refused"] / row["requests"] * row["offered"] for row in rows], label="refused (429)",
                    **series_style(theme, 1))  # fmt: skip
    throughput.axhline(engine, linestyle=":", color=series_style(theme, 0)["color"], label="bare engine")
    latency.plot(share, [row["p50"] for row in rows], label="median", **style)
    latency.plot(share, [row["p95"] for row in rows], label="95 %", **style | {"linestyle": "--"})
    throughput.set(xlabel="offered load, % of the bare engine", ylabel="requests per second")
    latency.set(xlabel="offered load, % of the bare engine", ylabel="seconds to the answer")
    for panel in (throughput, latency):
        panel.legend()
    caption(made, theme, "The server under load", note)
    return made
