"""`draft_commit`: the step after a forward pass of decoders that never mask a token again.

Draft by threshold or by factor; with witnesses (leave-one-out editing, docs/decoders.md) write what a witness says
instead of the token that it checks, and choose whom the next ones check. Then, as in `commit`: end of text, next active
block. Rows never influence each other; a done row does not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from asrd_kernels.commit import most_confident, ranks, write
from asrd_kernels.state import DecodeState, Rows, VocabStats


@dataclass
class Witnesses(Rows):
    """What leave-one-out editing keeps."""

    checked: Tensor  # [B, W] int64, the position that each witness checks in the coming pass, G for one not in use
    edits: Tensor  # [B, G] int64, how often a position was edited
    confidence: Tensor  # [B, G] float, confidence of what was written last

    @property
    def in_check(self) -> Tensor:
        """[B, G] bool: the positions with a witness."""
        flags = torch.zeros(len(self.edits), self.edits.shape[1] + 1, dtype=torch.bool, device=self.edits.device)
        return flags.scatter_(1, self.checked, True)[:, :-1]


def draft_commit_torch(
    state: DecodeState, stats: VocabStats, bounds: Tensor | None = None, witnesses: Witnesses | None = None
) -> None:
    """Apply the statistics [B, G] of the active block's masks to the state, in place; likewise witnesses.

    bounds [G] float64 are those of `factor_bounds`; None: all masks of at least rules.threshold are drafted. The
    statistics of a position with a witness are the witness's, and stats.token_prob the probability that it gives to
    the token it checks; None: whatever else it says is written.
    """
    rules, top1, confidence, masks = state.rules, stats.top1, stats.confidence, state.active_masks
    if bounds is None:
        drafted = (masks & (confidence >= rules.threshold)) | most_confident(masks, confidence)
    else:
        drafted = within_bounds(masks, confidence, bounds)
    if witnesses is None:
        write(state, top1, drafted)
        return
    # a witness that predicts another token replaces the one that it checks
    in_check = witnesses.in_check
    edited = in_check & (top1 != state.generated) & (witnesses.edits < rules.max_edits)
    if stats.token_prob is not None:
        edited &= stats.token_prob < rules.ratio * confidence
    witnesses.edits.add_(edited)
    witnesses.confidence.copy_(torch.where(drafted | edited, confidence, witnesses.confidence))
    # pending are doubtful drafts, edits, and what had no witness yet
    doubtful = drafted & (confidence < rules.threshold_back)
    waiting = state.pending & ~in_check
    write(state, top1, drafted, edited=edited, provisional=doubtful | edited | waiting)
    # the next witnesses check the least confident of the pending tokens (of equals the lower position)
    order = torch.where(state.pending, witnesses.confidence, torch.inf).argsort(dim=1, stable=True)
    order = order[:, : witnesses.checked.shape[1]]
    witnesses.checked.copy_(torch.where(state.pending.gather(1, order), order, state.length))


@lru_cache(maxsize=64)
def factor_bounds(factor: float, length: int, device: torch.device) -> Tensor:
    """[length] float64: the confidence that the most confident mask, the second, ... must have. Made once."""
    number = torch.arange(1, length + 1, dtype=torch.float64, device=device)
    bounds = 1 - factor / (number + 1)
    bounds[0] = -1
    return bounds


def within_bounds(masks: Tensor, confidence: Tensor, bounds: Tensor) -> Tensor:
    """[B, G] bool: of the masks [B, G] those before the first that falls short of its bound, and all if only the last
    does."""
    rank, total = ranks(confidence, masks, largest=True), masks.sum(1, keepdim=True)
    short = masks & (confidence < bounds[rank.clamp(max=len(bounds) - 1)])  # in float64
    number = torch.where(short, rank, total).amin(1, keepdim=True)
    return masks & (rank < torch.where(number == total - 1, total, number))
