"""The learning curve on disk: CSV always, PNG if matplotlib is installed."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class Point:
    step: int
    minutes: float
    sequences: int
    loss: float  # mean cross-entropy of masked tokens since the last point
    accuracy: float  # on held-out problems, hard level, threshold 0.9
    forwards: float  # forward passes per problem


def save_curve(points: Sequence[Point], folder: Path, title: str) -> None:
    with (folder / "curve.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Point)])
        writer.writeheader()
        writer.writerows(asdict(point) for point in points)
    if importlib.util.find_spec("matplotlib"):
        _draw(points, folder / "curve.png", title)


def _draw(points: Sequence[Point], path: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120)
    FigureCanvasAgg(figure)
    left = figure.add_subplot()
    right = left.twinx()
    sequences = [point.sequences / 1000 for point in points]
    left.plot(sequences, [point.loss for point in points], color="tab:blue")
    right.plot(sequences, [100 * point.accuracy for point in points], color="tab:orange")
    left.set_xlabel("sequences seen (thousands)")
    left.set_ylabel("loss per masked token", color="tab:blue")
    right.set_ylabel("held-out accuracy (%, hard, threshold 0.9)", color="tab:orange")
    right.set_ylim(0, 100)
    left.set_title(title)
    figure.tight_layout()
    figure.savefig(path)
