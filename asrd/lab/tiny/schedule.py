"""The training schedule: mix of levels, learning rate and loss weights, as functions of `progress` in [0, 1].

Problems of one step come first: most of the time is needed to learn sums, and short samples cost a third.
"""

from __future__ import annotations

import math
import random

PEAK_RATE, LAST_RATE, WARM_UP = 1.5e-3, 0.02, 0.01
RATIO_WEIGHT_FROM = 0.6  # before: every masked token counts 1; after: 1/t, LLaDA's bound
HARD_FROM = 0.45  # from here on nearly all problems are hard
BATCH = {"easy": 48, "medium": 24, "hard": 16}  # about the same number of tokens each
MIX = (  # up to this progress, the share of easy, medium and hard batches
    (0.25, {"easy": 0.8, "medium": 0.2, "hard": 0.0}),
    (HARD_FROM, {"easy": 0.2, "medium": 0.45, "hard": 0.35}),
    (1.01, {"easy": 0.03, "medium": 0.07, "hard": 0.9}),
)


def level_at(progress: float, rng: random.Random) -> str:
    mix = next(mix for until, mix in MIX if progress < until)
    return rng.choices(list(mix), list(mix.values()))[0]


def rate_at(progress: float) -> float:
    """Linear warm-up, then cosine decay to a fiftieth of the peak."""
    if progress < WARM_UP:
        return PEAK_RATE * max(progress / WARM_UP, 0.01)
    fall = 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))
    return PEAK_RATE * (LAST_RATE + (1 - LAST_RATE) * fall)


def weigh_by_ratio(progress: float) -> bool:
    return progress >= RATIO_WEIGHT_FROM
