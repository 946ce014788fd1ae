"""Throughput and latency against offered load."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from asrd.lab.plotting import Theme, caption, figure, log_axis, save, series_style

Row = dict[str, Any]


def draw(rows: Sequence[Row], path: Path, note: str) -> list[Path]:
    """engine-load.png: requests answered per second, and how long they took, by server."""
    return save(path, partial(_draw, rows, note))


def _draw(rows: Sequence[Row], note: str, theme: Theme) -> Figure:
    made, panels = figure(4.0, 1, 2)
    throughput, latency = panels[0]
    for number, server in enumerate(dict.fromkeys(row["server"] for row in rows)):
        mine = sorted((row for row in rows if row["server"] == server), key=lambda row: row["offered"])
        offered, style = [row["offered"] for row in mine], series_style(theme, number)
        throughput.plot(offered, [row["served"] for row in mine], label=server, **style)
        latency.plot(offered, [row["p50"] for row in mine], label=f"{server}, median", **style)
        dashed = style | {"linestyle": "--"}
        latency.plot(offered, [row["p95"] for row in mine], label=f"{server}, 95 %", **dashed)
    throughput.set(xlabel="offered requests per second", ylabel="answered requests per second")
    latency.set(xlabel="offered requests per second", ylabel="seconds from arrival to answer")
    log_axis(latency.yaxis, [row[share] for row in rows for share in ("p50", "p95")])
    for panel in (throughput, latency):
        panel.legend()
    caption(made, theme, "Requests that arrive at random", note)
    return made
