"""Fast-dLLM's two rules: how many masks of the active block are sure enough to be committed together.

The caches of Fast-dLLM are `kv_cache="prefix"` and `"dual"`, and go with every decoder that allows them.
"""

from __future__ import annotations

from torch import Tensor

from asrd.config import FIELDS, AsrdConfig
from asrd.decoders.kept_slots import KeptSlots
from asrd.engine.decoder import SHARED
from asrd.engine.request import Request
from asrd.models.adapter import ModelAdapter
from asrd_kernels import Slots, VocabStats, active_slots, dispatch, factor_bounds, fill_active_slots, new_active_slots

USUAL_FACTOR = 1.0


class FastDllmDecoder(KeptSlots):
    """Commits what one of the two rules drafts in the active block; nothing is guided, probed or revoked.

    bounds: of the factor rule; None: the threshold rule.
    """

    on_blocks = True
    bounds: Tensor | None = None

    def find_slots(self) -> Tensor:
        """The active block's masks."""
        return active_slots(self.state, self.rules)

    def new_slots(self) -> Slots:
        """The active block's masks."""
        return new_active_slots(self.state, self.rules, self.request.shift)

    def fill_slots(self, slots: Slots) -> None:
        """The active block's masks."""
        fill_active_slots(slots, self.state, self.rules)

    def commit(self, stats: VocabStats) -> None:
        """Draft, report."""
        dispatch.draft_commit(self.state, stats, self.rules, self.bounds, slots=self._slots, impl=self.request.impl)


class ThresholdDecoder(FastDllmDecoder):
    """Every mask with confidence of at least the threshold, and in any case the most confident."""

    reads = SHARED | {"threshold", "boundary"}

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """One rule at a time."""
        if config.factor is not None:
            raise ValueError(
                f"factor={config.factor} and decoder='threshold' are two rules for the same choice:"
                " leave factor out, or use decoder='factor'"
            )


class FactorDecoder(FastDllmDecoder):
    """The n most confident masks, n as large as goes: the r-th of them must have confidence 1 - factor / (r + 1).

    The first is taken in any case, and so is the last of all: where only that one falls short, it goes with the others
    (an off-by-one of the original that is part of its results).
    """

    reads = SHARED | {"factor", "boundary"}

    @classmethod
    def check(cls, config: AsrdConfig, adapter: ModelAdapter) -> None:
        """One rule at a time."""
        refuse_threshold(config)

    def __init__(self, request: Request, table: Tensor) -> None:
        super().__init__(request, table)
        factor = USUAL_FACTOR if request.config.factor is None else float(request.config.factor)
        self.bounds = factor_bounds(factor, request.length, request.prompt.device)


def refuse_threshold(config: AsrdConfig) -> None:
    """Raise if a threshold is given to a decoder that drafts by factor."""
    if config.threshold not in (None, FIELDS["threshold"].default):
        raise ValueError(
            f"threshold={config.threshold} and decoder={config.decoder!r} are two rules for the same choice:"
            " leave threshold out, or use decoder='threshold'"
        )
