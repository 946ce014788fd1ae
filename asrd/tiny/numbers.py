"""Numbers start as points on circles, so that sums are rotations from the first step on.

Random number embeddings reach the same place, but spend most of a short training on getting there. The values are
an initialisation only: training moves them like all other weights.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from asrd.tiny.language import ID, MAX_NUMBER
from asrd.tiny.model import TinyModel

PERIODS = (2, 3, 4, 5, 7, 10, 16, 25, 40, 100)
SCALE = 1.5  # of the circles relative to the random embedding they are added to


def place_numbers_on_circles(model: TinyModel, seed: int) -> None:
    """Adds cos and sin of every period, randomly projected, to the input and output rows of the number tokens."""
    rng = Generator().manual_seed(seed)
    numbers = slice(ID["0"], ID["0"] + MAX_NUMBER + 1)
    transformer = model.model.transformer
    with torch.no_grad():
        for rows in (transformer.wte.weight[numbers], transformer.ff_out.weight[numbers]):
            circles = _circles() @ torch.randn(2 * len(PERIODS), rows.shape[1], generator=rng)
            rows += circles * (SCALE * rows.std() / circles.std())


def _circles() -> Tensor:
    angle = torch.arange(MAX_NUMBER + 1)[:, None] * (2 * math.pi / torch.tensor(PERIODS))
    return torch.cat((angle.cos(), angle.sin()), dim=1)
