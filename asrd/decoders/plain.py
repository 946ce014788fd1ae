"""`PlainDecoder`: clean embeddings in, and each step a choice of masks to commit; nothing is ever revoked."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from asrd.config import AsrdConfig
from asrd.engine.decoder import Decoder
from asrd_kernels import VocabStats, wanted_slots


class PlainDecoder(Decoder):
    """Commits what `choose` picks among the masks of the active block; nothing is guided, probed or revoked."""

    @abstractmethod
    def choose(self, masks: Tensor, stats: VocabStats, **asked: Tensor) -> Tensor:
        """[B, G] bool, which of `masks` [B, G] (the active block's) to commit."""

    @classmethod
    def pads(cls, config: AsrdConfig) -> tuple[bool, bool]:
        """All that is looked at are masks, and those are the row's own."""
        return True, True

    def slots(self) -> Tensor:
        """The active block's."""
        return wanted_slots(self.state, self.rules)

    def commit(self, stats: VocabStats, **asked: Tensor) -> None:
        """Commit the chosen masks, and end the rows that are complete."""
        self.apply(stats.top1, self.choose(self.active_masks, stats, **asked))
