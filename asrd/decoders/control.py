"""A control for revocation: as many tokens are revoked as fail verification, but which ones is random.

If ASRD's accuracy is no higher than this, its verification finds no errors and only redrafting helps.
"""

from __future__ import annotations

import torch

from asrd.decoders.asrd import AsrdDecoder
from asrd_kernels import VocabStats

_NO_TOKEN = -1


class RandomRevocationDecoder(AsrdDecoder):
    """ASRD with the verdicts of each step permuted at random among the pending tokens of the row."""

    def commit(self, stats: VocabStats) -> None:
        """Shuffle the verdicts, then go on as ASRD."""
        state = self.state
        failed = (state.pending & (stats.top1 != state.generated)).sum(1, keepdim=True)
        bits = self.random_bits_per_step().masked_fill(~state.pending, 2**32)
        order = bits.argsort(dim=1, stable=True)
        rank = torch.empty_like(order).scatter_(1, order, state.positions.expand_as(order))
        verdict = torch.where(rank < failed, _NO_TOKEN, state.generated)
        super().commit(stats._replace(top1=torch.where(state.pending, verdict, stats.top1)))
