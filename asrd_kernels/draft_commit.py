"""`draft_commit`: the step after a forward pass of decoders that never mask a token again.

Draft by threshold or by factor; with witnesses (leave-one-out editing, docs/semantics.md) write what a witness says
instead of the token that it checks, and choose whom the next ones check. Then, as in `commit`: end of text, next active
block, report. Rows never influence each other; a done row does not change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asrd_kernels.arrays import Array, assign, at_most, columns, count_in_row, falses, lowest_in_row, put_along, where
from asrd_kernels.commit import apply_step, ranks, with_best, write_report
from asrd_kernels.state import DecodeState, Rules, Slots, VocabStats


@dataclass(frozen=True)
class Witnesses:
    """What leave-one-out editing keeps and obeys. The rows of W witnesses stand behind the canvas."""

    checked: Tensor  # [B, W] int64, the position that each checks in the coming pass, G for one that is not used
    edits: Tensor  # [B, G] int64, how often a position was edited
    sureness: Tensor  # [B, G] float, confidence of what was written last
    threshold_back: float  # a draft below it is checked
    max_edits: int  # of a position
    ratio: float  # where probabilities of the committed tokens are given: edit if below so much of the witness's best

    def in_check(self, length: int) -> Array:
        """[B, G] bool: the positions with a witness."""
        found = falses(self.checked, length + 1)
        put_along(found, self.checked, True)
        return found[:, :-1]


def draft_commit_torch(
    state: DecodeState,
    stats: VocabStats,
    rules: Rules,
    bounds: Array | None = None,
    witnesses: Witnesses | None = None,
    token_prob: Array | None = None,
    slots: Slots | None = None,
) -> None:
    """Apply the statistics [B, G] of the wanted positions to the state, in place; likewise witnesses and slots.

    bounds [G] float64 are those of `factor_bounds`; None: all masks of at least rules.threshold are drafted. The
    statistics of a position with a witness are the witness's, token_prob [B, G] the probability that it gives to the
    token it checks; None: whatever else it says is written. All may be those of `host_view`, then without slots.
    """
    confidence, masks = stats.confidence, state.guided
    if rules.scope == "sequence":
        masks = masks & (state.block_of == state.active[:, None])
    if bounds is None:
        drafted = with_best(masks & (confidence >= rules.threshold), masks, confidence)
    else:
        drafted = within_bounds(masks, confidence, bounds)
    if witnesses is None:
        apply_step(state, rules, stats.top1, drafted)
    else:
        in_check = witnesses.in_check(state.length)
        edited = in_check & (stats.top1 != state.generated) & (witnesses.edits < witnesses.max_edits)
        if token_prob is not None:
            edited &= token_prob < witnesses.ratio * confidence
        doubtful = drafted & (confidence < witnesses.threshold_back)
        provisional = doubtful | edited | (state.pending & ~in_check)
        witnesses.edits[...] = witnesses.edits + edited
        assign(witnesses.sureness, drafted | edited, confidence)
        apply_step(state, rules, stats.top1, drafted, provisional=provisional, edited=edited)
        _choose_checked(state, witnesses)
    write_report(state, stats)
    if slots is not None:
        fill_active_slots(slots, state, rules, witnesses)


def factor_bounds(factor: float, length: int, device: torch.device) -> Tensor:
    """[length] float64: the confidence that the most confident mask, the second, ... must have."""
    number = torch.arange(1, length + 1, dtype=torch.float64, device=device)
    bounds = 1 - factor / (number + 1)
    bounds[0] = -1
    return bounds


def within_bounds(masks: Array, confidence: Array, bounds: Array) -> Array:
    """[B, G] bool: of the masks [B, G] those before the first that falls short of its bound, and all if only the last
    does."""
    rank, total = ranks(confidence, masks, largest=True), count_in_row(masks)[:, None]
    short = masks & (confidence < bounds[at_most(rank, len(bounds) - 1)])  # in float64
    number = lowest_in_row(where(short, rank, total))[:, None]
    return masks & (rank < where(number == total - 1, total, number))


def _choose_checked(state: DecodeState, witnesses: Witnesses) -> None:
    """The least confident of the pending tokens (of equals the lower position), from the first witness on."""
    pending, width = state.pending, witnesses.checked.shape[1]
    order = where(pending, witnesses.sureness, float("inf")).argsort(stable=True)[:, :width]
    number = columns(order, width)
    witnesses.checked[...] = where(number < count_in_row(pending)[:, None], order, state.length)


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
