"""AUP, accuracy under parallelism, as d3LLM defines it (https://github.com/hao-ai-lab/d3LLM)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

PENALTY, TOLERANCE = 3.0, 5.0  # of AUP: alpha, and how many points of accuracy a curve may lose


class Measured(Protocol):
    """A setting of a decoder, measured."""

    @property
    def tokens_per_forward(self) -> float: ...
    @property
    def accuracy(self) -> float: ...


def aup(settings: Sequence[Measured], best: float) -> float:
    """Accuracy under parallelism (d3LLM) of one decoder's settings: with parallelism r (tokens per forward pass)
    ascending and accuracy y in percent,

        AUP = r_1 y_1 + sum over i > 1 of (r_i - r_(i-1)) (y_i W(y_i) + y_(i-1) W(y_(i-1))) / 2,
        W(y) = min(1, exp(-3 (1 - y / best))),

    over the points with y_i >= y_1 - 5. best: the highest accuracy of any decoder on the task, in percent.
    """
    points = sorted((s.tokens_per_forward, 100 * s.accuracy) for s in settings)
    points = [(r, y) for r, y in points if y >= points[0][1] - TOLERANCE]
    weighted = [y * min(1.0, math.exp(-PENALTY * (1 - y / best))) for _, y in points]
    area = points[0][0] * points[0][1]
    for i in range(1, len(points)):
        area += (points[i][0] - points[i - 1][0]) * (weighted[i] + weighted[i - 1]) / 2
    return area
