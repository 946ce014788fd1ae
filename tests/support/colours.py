"""How far apart two colours look, with each kind of colour vision."""

from __future__ import annotations

import math

# Machado, Oliveira and Fernandes 2009, severity 1: linear RGB as seen without one kind of cone.
VISION = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
# Ottosson's OKLab: linear RGB to cone responses, and their cube roots to lightness and two opponent colours.
CONES = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
         [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
OPPONENTS = [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099],
             [0.0259040371, 0.7827717662, -0.808675766]]  # fmt: skip


def distance(one: str, other: str, vision: str = "normal") -> float:
    """Distance of two colours, #rrggbb, in OKLab: 0 for the same colour, 1 from black to white."""
    return math.dist(seen(one, vision), seen(other, vision))


def seen(colour: str, vision: str = "normal") -> list[float]:
    """OKLab of a colour as it is seen."""
    levels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in levels]
    light = [min(max(x, 0.0), 1.0) for x in _times(VISION[vision], linear)]
    return _times(OPPONENTS, [x ** (1 / 3) for x in _times(CONES, light)])


def _times(matrix: list[list[float]], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]
