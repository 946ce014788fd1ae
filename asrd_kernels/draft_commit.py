"""`draft_commit`: the step after a forward pass of decoders that never mask a token again.

Draft by threshold or by factor; with witnesses (leave-one-out editing, docs/decoders.md) write what a witness says
instead of the token that it checks, and choose whom the next ones check. Then, as in `commit`: end of text, next active
block. Rows never influence each other; a done row does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asrd_kernels.commit import apply_step, most_confident, ranks
from asrd_kernels.state import DecodeState, Rules, Slots, VocabStats


@dataclass(frozen=True)
class Witnesses:
    """What leave-one-out editing keeps and obeys. The rows of W witnesses stand behind the canvas."""

    checked: Tensor  # [B, W] int64, the position that each checks in the coming pass, G for one that is not used
    edits: Tensor  # [B, G] int64, how often a position was edited
    confidence: Tensor  # [B, G] float, confidence of what was written last
    threshold_back: float  # a draft below it is checked
    max_edits: int  # of a position
    ratio: float  # where probabilities of the committed tokens are given: edit if below so much of the witness's best

    def in_check(self, length: int) -> Tensor:
        """[B, G] bool: the positions with a witness."""
        flags = torch.zeros(len(self.checked), length + 1, dtype=torch.bool, device=self.checked.device)
        return flags.scatter_(1, self.checked, True)[:, :-1]


def draft_commit_torch(
    state: DecodeState,
    stats: VocabStats,
    rules: Rules,
    bounds: Tensor | None = None,
    witnesses: Witnesses | None = None,
    token_prob: Tensor | None = None,
) -> None:
    """Apply the statistics [B, G] of the wanted positions to the state, in place; likewise witnesses.

    bounds [G] float64 are those of `factor_bounds`; None: all masks of at least rules.threshold are drafted. The
    statistics of a position with a witness are the witness's, token_prob [B, G] the probability that it gives to the
    token it checks; None: whatever else it says is written.
    """
    top1, confidence = stats.top1, stats.confidence
    masks = state.guided & (state.block_of == state.active[:, None])
    if bounds is None:
        drafted = (masks & (confidence >= rules.threshold)) | most_confident(masks, confidence)
    else:
        drafted = within_bounds(masks, confidence, bounds)
    if witnesses is None:
        apply_step(state, rules, top1, drafted)
        return
    # a witness that predicts another token replaces the one that it checks
    in_check = witnesses.in_check(state.length)
    edited = in_check & (top1 != state.generated) & (witnesses.edits < witnesses.max_edits)
    if token_prob is not None:
        edited &= token_prob < witnesses.ratio * confidence
    witnesses.edits.add_(edited)
    witnesses.confidence.copy_(torch.where(drafted | edited, confidence, witnesses.confidence))
    # pending are doubtful drafts, edits, and what had no witness yet
    doubtful = drafted & (confidence < witnesses.threshold_back)
    waiting = state.pending & ~in_check
    apply_step(state, rules, top1, drafted, provisional=doubtful | edited | waiting, edited=edited)
    # the next witnesses check the least confident of the pending tokens (of equals the lower position)
    order = torch.where(state.pending, witnesses.confidence, torch.inf).argsort(dim=1, stable=True)
    order = order[:, : witnesses.checked.shape[1]]
    witnesses.checked.copy_(torch.where(state.pending.gather(1, order), order, state.length))


def factor_bounds(factor: float, length: int, device: torch.device) -> Tensor:
    """[length] float64: the confidence that the most confident mask, the second, ... must have."""
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


def active_slots(state: DecodeState, rules: Rules, checked: Tensor | None = None) -> Tensor:
    """[B, S] int64: the masks of the active block, then what witnesses check [B, W]; G where a slot is unused."""
    length, size = state.length, rules.block_length
    block = (state.active * size - state.offsets)[:, None] + state.positions[:size]
    masked = state.guided.gather(1, block.clamp(0, length - 1)) & (block >= 0) & (block < length)
    slots = torch.where(masked, block, length)
    return slots if checked is None else torch.cat([slots, checked], dim=1)


def new_active_slots(state: DecodeState, rules: Rules, shift: int = 0, witnesses: Witnesses | None = None) -> Slots:
    """The slots of the coming step; `shift` is 1 where the logits of a position are one row earlier."""
    (batch, canvas), extra = state.tokens.shape, 0 if witnesses is None else witnesses.checked.shape[1]
    first = torch.arange(batch, device=state.tokens.device) * (canvas + extra) + state.prompt_length - shift
    position = active_slots(state, rules, None if witnesses is None else witnesses.checked)
    behind = torch.arange(position.shape[1], device=first.device) - (position.shape[1] - extra)
    source = first[:, None] + (behind + state.length + shift)  # of a witness it never changes
    slots = Slots(position, source, first)
    fill_active_slots(slots, state, rules, witnesses)
    return slots


def fill_active_slots(slots: Slots, state: DecodeState, rules: Rules, witnesses: Witnesses | None = None) -> None:
    """Bring the slots up to date, in place."""
    slots.position.copy_(active_slots(state, rules, None if witnesses is None else witnesses.checked))
    block = slice(rules.block_length)
    place = slots.position[:, block].clamp(max=state.length - 1)
    slots.source[:, block] = slots.first[:, None] + place
