"""A control for revocation: as many tokens are revoked as fail verification, but which ones is random.

If ASRD's accuracy is no higher than this, its verification finds no errors and only redrafting helps.
"""

from __future__ import annotations

import torch

from asrd.decoders.asrd import AsrdDecoder
from asrd.engine.decoder import random_bits_per_step
from asrd_kernels import DecodeState, VocabStats, ranks

_NO_TOKEN = -1


class RandomRevocationDecoder(AsrdDecoder):
    """ASRD with the verdicts of each step permuted at random among the pending tokens of the row."""

    def commit(self, state: DecodeState, stats: VocabStats) -> None:
        """Shuffle the verdicts, then go on as ASRD."""
        failed = (state.pending & (stats.top1 != state.generated)).sum(1, keepdim=True)
        drawn = ranks(random_bits_per_step(state).double(), state.pending)
        verdict = torch.where(drawn < failed, _NO_TOKEN, state.generated)
        super().commit(state, stats._replace(top1=torch.where(state.pending, verdict, stats.top1)))
