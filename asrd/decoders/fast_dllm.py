"""Fast-dLLM's two rules: how many masks of the active block are sure enough to be committed together.

The caches of Fast-dLLM are `kv_cache="prefix"` and `"dual"`, and go with every decoder that allows them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd.config import FIELDS, AsrdConfig
from asrd.decoders.plain import PlainDecoder
from asrd.engine.decoder import SHARED, ranks
from asrd.engine.request import Request
from asrd.models.adapter import ModelAdapter
from asrd_kernels import VocabStats, with_best

USUAL_FACTOR = 1.0


class ThresholdDecoder(PlainDecoder):
    """Every mask with confidence of at least the threshold, and in any case the most confident."""

    reads = SHARED | {"threshold"}

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """One rule at a time."""
        if config.factor is not None:
            raise ValueError(
                f"factor={config.factor} and decoder='threshold' are two rules for the same choice:"
                " leave factor out, or use decoder='factor'"
            )

    def choose(self, masks: Tensor, stats: VocabStats, **_: Tensor) -> Tensor:
        """All that are confident enough."""
        return with_best(masks & (stats.confidence >= self.rules.threshold), masks, stats.confidence)


class FactorDecoder(PlainDecoder):
    """The n most confident masks, n as large as goes: the r-th of them must have confidence 1 - factor / (r + 1).

    The first is taken in any case, and so is the last of all: where only that one falls short, it goes with the others
    (an off-by-one of the original that is part of its results).
    """

    reads = SHARED | {"factor"}

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """One rule at a time."""
        refuse_threshold(config)

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        factor = USUAL_FACTOR if request.config.factor is None else float(request.config.factor)
        self.bounds = factor_bounds(factor, request.length, request.prompt.device)

    def choose(self, masks: Tensor, stats: VocabStats, **_: Tensor) -> Tensor:
        """Those before the first that falls short."""
        return within_bounds(masks, stats.confidence, self.bounds)


def refuse_threshold(config: AsrdConfig) -> None:
    """Raise if a threshold is given to a decoder that drafts by factor."""
    if config.threshold != FIELDS["threshold"].default:
        raise ValueError(
            f"threshold={config.threshold} and decoder={config.decoder!r} are two rules for the same choice:"
            " leave threshold out, or use decoder='threshold'"
        )


def factor_bounds(factor: float, length: int, device: torch.device) -> Tensor:
    """[length] float64: the confidence that the most confident mask, the second, ... must have."""
    number = torch.arange(1, length + 1, dtype=torch.float64, device=device)
    bounds = 1 - factor / (number + 1)
    bounds[0] = -1
    return bounds


def within_bounds(masks: Tensor, confidence: Tensor, bounds: Tensor) -> Tensor:
    """[B, G] bool: of the masks [B, G] those that `FactorDecoder` takes."""
    rank, total = ranks(confidence, masks, largest=True), masks.sum(1, keepdim=True)
    short = masks & (confidence.double() < bounds[rank.clamp(max=len(bounds) - 1)])
    number = torch.where(short, rank, total).amin(1, keepdim=True)
    return masks & (rank < torch.where(number == total - 1, total, number))
