"""Fast-dLLM's two rules: how many masks of the active block are sure enough to be committed together.

The caches of Fast-dLLM are `kv_cache="prefix"` and `"dual"`, and go with every decoder that allows them.
"""

from __future__ import annotations

from torch import Tensor

from asrd.config import FIELDS, AsrdConfig
from asrd.engine.decoder import SHARED, Decoder
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState, VocabStats, dispatch, factor_bounds

USUAL_FACTOR = 1.0


class ThresholdDecoder(Decoder):
    """Every mask with confidence of at least the threshold, and in any case the most confident."""

    on_blocks = True
    reads = SHARED | {"threshold", "boundary"}

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """One rule at a time."""
        if config.factor is not None:
            raise ValueError(
                f"factor={config.factor} and decoder='threshold' are two rules for the same choice:"
                " leave factor out, or use decoder='factor'"
            )

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        """Draft."""
        dispatch.draft_commit(state, stats, impl=self.impl)


class FactorDecoder(Decoder):
    """The n most confident masks, n as large as goes: the r-th of them must have confidence 1 - factor / (r + 1).

    The first is taken in any case, and so is the last of all: where only that one falls short, it goes with the others
    (an off-by-one of the original that is part of its results).
    """

    on_blocks = True
    reads = SHARED | {"factor", "boundary"}

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """One rule at a time."""
        refuse_threshold(config)

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        """Draft."""
        dispatch.draft_commit(state, stats, bounds_of(self, state, USUAL_FACTOR), impl=self.impl)


def bounds_of(decoder: Decoder, state: DecodeState, usual: float) -> Tensor:
    """[G] the confidence that the most confident mask, the second, ... must have; usual: the factor if not given."""
    factor = usual if decoder.config.factor is None else float(decoder.config.factor)
    return factor_bounds(factor, state.length, decoder.table.device)


def refuse_threshold(config: AsrdConfig) -> None:
    """Raise if a threshold is given to a decoder that drafts by factor."""
    if config.threshold not in (None, FIELDS["threshold"].default):
        raise ValueError(
            f"threshold={config.threshold} and decoder={config.decoder!r} are two rules for the same choice:"
            " leave threshold out, or use decoder='threshold'"
        )
