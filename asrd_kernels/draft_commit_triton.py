"""`draft_commit` as one Triton launch, one program a row: the decisions of `draft_commit_torch`, in place.

(1) Which masks are drafted takes the active block's order of confidence: a mask's rank is counted, pair by pair, and
what is to be drafted becomes a cut: everything more confident than one mask, and that mask. (2) The row is read tile by
tile, so any length fits: decide and write. (3) End the text, or narrow the guided masks to the next active block. (4)
Choose the positions to be checked, one after the other, each the least confident after the one before.
Done rows, which are fixed points, are left alone, and so is what lies beyond a row's own length. Numbers are compared
and counted, never computed with (but for `ratio`, one product).

Prefixes: p_ pointer (of the row), o_ offsets in the row, m_ which of them exist, b_ values of the tile.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.
import triton
import triton.language as tl
from torch import Tensor

from asrd_kernels.commit_triton import count_four, is_any, launch_config, least_of_four
from asrd_kernels.compiler_triton import at_most
from asrd_kernels.draft_commit import Witnesses
from asrd_kernels.state import DecodeState, VocabStats

_OTHERS = tl.constexpr(4)  # masks that are loaded before one is compared with the first of them


@triton.jit
def _masks(p_guided, p_confidence, o_, m_):
    """Which of the positions are masks, and their confidence."""
    b_masks = tl.load(p_guided + o_, mask=m_, other=0).to(tl.int1)
    return b_masks, tl.load(p_confidence + o_, mask=m_, other=-1.0)


@triton.jit
def _ranked(p_guided, p_confidence, o_, begin, end):
    """Masks of a tile of the active block, their confidence, and their rank in it: 0 is the most confident, of equals
    the lower position."""
    b_masks, b_confidence = _masks(p_guided, p_confidence, o_, o_ < end)
    b_rank = tl.zeros(o_.shape, tl.int32)
    for first in range(begin, end, _OTHERS):
        for i in tl.static_range(_OTHERS):
            other = first + i
            is_mask, confidence = _masks(p_guided, p_confidence, other, other < end)
            b_before = (confidence > b_confidence) | ((confidence == b_confidence) & (other < o_))
            b_rank += (b_before & is_mask).to(tl.int32)
    return b_masks, b_confidence, b_rank


@triton.jit
def _cut_by_factor(p_guided, p_confidence, p_bounds, begin, end, TILE: tl.constexpr):
    """The last mask to be drafted by the factor rule, as a confidence and a position: what comes before the first mask
    that falls short of its bound. None does, or only the last: all masks."""
    number, most, last = end, -1, end
    cut = tl.full([], -1.0, p_confidence.dtype.element_ty)
    for start in range(begin, end, TILE):
        o_ = start + tl.arange(0, TILE)
        b_masks, b_confidence, b_rank = _ranked(p_guided, p_confidence, o_, begin, end)
        b_bound = tl.load(p_bounds + b_rank, mask=b_masks, other=0.0)
        b_short = b_masks & (b_confidence.to(tl.float64) < b_bound)
        here, last_rank = tl.split(tl.min(tl.join(tl.where(b_short, b_rank, end), tl.where(b_masks, -b_rank, 1)), 0))
        number = tl.minimum(number, here)
        most = tl.maximum(most, -last_rank)
        top, at = tl.max(tl.where(b_short, b_confidence, -1.0), 0, return_indices=True)
        last = tl.where(top > cut, start + at - 1, last)
        cut = tl.maximum(top, cut)
    some = number < most
    return tl.where(some, cut, -1.0), tl.where(some, last, end)


@triton.jit
def _cut_by_threshold(p_guided, p_confidence, threshold, begin, end, TILE: tl.constexpr):
    """The same by the threshold rule: everything from the threshold on, or else the most confident mask."""
    best, last = tl.full([], -1.0, p_confidence.dtype.element_ty), -1
    for start in range(begin, end, TILE):
        o_ = start + tl.arange(0, TILE)
        b_masks, b_confidence = _masks(p_guided, p_confidence, o_, o_ < end)
        top, at = tl.max(tl.where(b_masks, b_confidence, -1.0), 0, return_indices=True)
        last = tl.where(top > best, start + at, last)
        best = tl.maximum(top, best)
    return tl.minimum(best, threshold), tl.where(best >= threshold, end, last)


@triton.jit
def _checked(p_checked, o_, witnesses):
    """Which of the positions have a witness."""
    b_found = o_ < 0
    for i in range(witnesses):
        b_found |= o_ == tl.load(p_checked + i).to(tl.int32)
    return b_found


@triton.jit(do_not_specialize=["block_length", "mask_id", "pad_id", "max_edits", "witnesses"])
def draft_commit_kernel(
    p_tokens, p_lengths, p_pending, p_guided, p_active, p_step, p_drafted, p_edited, p_done,
    p_top1, p_confidence, p_bounds, p_checked, p_edits, p_kept, p_token_prob,
    s_tokens, s_top1, s_confidence, s_token_prob, room, block_length, mask_id, pad_id,
    threshold: tl.float64, threshold_back: tl.float64, ratio: tl.float64, max_edits, witnesses,
    SCOPED: tl.constexpr, FACTOR: tl.constexpr, EDIT: tl.constexpr, SCORED: tl.constexpr,
    EARLY_STOP: tl.constexpr, EOS_IDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row. s_ are the strides between rows; tensors of the state without one are contiguous [rows, room]."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(p_done + row):
        return
    p_tokens += row * s_tokens
    p_top1 += row * s_top1
    p_confidence += row * s_confidence
    p_pending += row * room
    p_guided += row * room
    if EDIT:
        p_checked += row * witnesses
        p_edits += row * room
        p_kept += row * room
        p_token_prob += row * s_token_prob
    dtype = p_confidence.dtype.element_ty
    length = tl.load(p_lengths + row).to(tl.int32)
    active = tl.load(p_active + row).to(tl.int32)
    begin = active * block_length
    end = tl.minimum(begin + block_length, length)

    # What is drafted: the masks of the active block down to the cut
    if FACTOR:
        cut, last = _cut_by_factor(p_guided, p_confidence, p_bounds, begin, end, TILE)
    else:
        bound = tl.full([], threshold, dtype)
        cut, last = _cut_by_threshold(p_guided, p_confidence, bound, begin, end, TILE)
    masks, drafts = 0, 0
    for start in range(0, length, TILE):
        o_ = start + tl.arange(0, TILE)
        m_ = o_ < length
        b_guided, b_confidence = _masks(p_guided, p_confidence, o_, m_)
        b_guided &= (o_ >= begin) & (o_ < end)
        b_drafted = b_guided & ((b_confidence > cut) | ((b_confidence == cut) & (o_ <= last)))
        b_masked = tl.load(p_tokens + o_, mask=m_, other=-1).to(tl.int32) == mask_id
        more, more_masks, _, _ = count_four(b_drafted, b_masked, b_masked, b_masked)
        drafts += more
        masks += more_masks
    open_ended = masks > drafts

    # Decide and write; `guided` holds all masks for the moment
    first_mask, first_pending, first_end, edits = length, length, length, 0
    for start in range(0, length, TILE):
        o_ = start + tl.arange(0, TILE)
        m_ = o_ < length
        b_tokens = tl.load(p_tokens + o_, mask=m_, other=-1).to(tl.int32)
        b_top1 = tl.load(p_top1 + o_, mask=m_, other=-1).to(tl.int32)
        b_guided, b_confidence = _masks(p_guided, p_confidence, o_, m_)
        b_guided &= (o_ >= begin) & (o_ < end)
        b_drafted = b_guided & ((b_confidence > cut) | ((b_confidence == cut) & (o_ <= last)))
        b_masked = (b_tokens == mask_id) & ~b_drafted
        b_pending = o_ < 0
        b_edited = o_ < 0
        b_written = b_drafted
        if EDIT:
            b_before = tl.load(p_pending + o_, mask=m_, other=0).to(tl.int1)
            b_number = tl.load(p_edits + o_, mask=m_, other=0).to(tl.int32)
            b_check = _checked(p_checked, o_, witnesses)
            b_edited = m_ & b_check & (b_top1 != b_tokens) & (b_number < max_edits)
            if SCORED:
                b_prob = tl.load(p_token_prob + o_, mask=m_, other=0.0)
                b_edited &= b_prob < b_confidence * tl.full([], ratio, dtype)
            b_doubtful = b_drafted & (b_confidence < tl.full([], threshold_back, dtype))
            b_pending = (b_doubtful | b_edited | (b_before & ~b_check)) & ~b_masked & open_ended
            b_written = b_drafted | b_edited
        tl.debug_barrier()  # every warp has read the tile (and the row's numbers)
        b_tokens = tl.where(b_written, b_top1, b_tokens)
        tl.store(p_tokens + o_, b_tokens, mask=m_ & b_written)
        tl.store(p_guided + o_, b_masked, mask=m_)
        if EDIT:
            tl.store(p_pending + o_, b_pending, mask=m_)
            tl.store(p_edits + o_, b_number + 1, mask=m_ & b_edited)
            tl.store(p_kept + o_, b_confidence, mask=m_ & b_written)
        b_ends = o_ < 0
        if EARLY_STOP:
            b_ends = is_any(b_tokens, EOS_IDS)
        at_mask, at_pending, at_end, _ = least_of_four(
            tl.where(b_masked, o_, length), tl.where(b_pending, o_, length), tl.where(b_ends, o_, length), o_
        )
        first_mask = tl.minimum(first_mask, at_mask)
        first_pending = tl.minimum(first_pending, at_pending)
        first_end = tl.minimum(first_end, at_end)
        if EDIT:
            edits += tl.sum(b_edited.to(tl.int32), 0)
    first_open = tl.minimum(first_mask, first_pending)
    ended = first_end < first_open
    live = (first_open < length) & ~ended
    next_active = tl.where(live & (first_mask < length), first_mask // block_length, active)
    step = tl.load(p_step + row).to(tl.int32) + 1
    drafts += tl.load(p_drafted + row).to(tl.int32)
    edits += tl.load(p_edited + row).to(tl.int32)
    tl.debug_barrier()  # every warp has written its part, and read the counts and what was checked

    # The text ends here, or the masks of the next active block are guided
    for start in range(0, length, TILE):
        o_ = start + tl.arange(0, TILE)
        m_ = o_ < length
        tl.store(p_tokens + o_, tl.full([TILE], 0, tl.int32) + pad_id, mask=m_ & ended & (o_ > first_end))
        b_out = ~live
        if SCOPED:
            b_out = b_out | (o_ >= (next_active + 1) * block_length)  # no mask is left of the active block
        tl.store(p_guided + o_, tl.zeros([TILE], tl.int1), mask=m_ & b_out)
        if EDIT:
            tl.store(p_pending + o_, tl.zeros([TILE], tl.int1), mask=m_ & ~live)
    if EDIT:
        tl.debug_barrier()  # every warp has written `pending` and `confidence`
        sure, here = tl.full([], -1.0, dtype), -1
        for i in range(witnesses):  # the least confident after the one before
            least, place = tl.full([], float("inf"), dtype), room
            for start in range(0, length, TILE):
                o_ = start + tl.arange(0, TILE)
                b_rest = tl.load(p_pending + o_, mask=o_ < length, other=0).to(tl.int1)
                b_sure = tl.load(p_kept + o_, mask=b_rest, other=0.0)
                b_rest &= (b_sure > sure) | ((b_sure == sure) & (o_ > here))
                low, at = tl.min(tl.where(b_rest, b_sure, float("inf")), 0, return_indices=True)
                place = tl.where(low < least, start + at, place)
                least = tl.minimum(low, least)
            sure, here = least, place
            tl.store(p_checked + i, place)
    tl.store(p_step + row, step)
    tl.store(p_active + row, next_active)
    tl.store(p_done + row, ~live)
    tl.store(p_drafted + row, drafts)
    if EDIT:
        tl.store(p_edited + row, edits)


def draft_commit_triton(
    state: DecodeState, stats: VocabStats, bounds: Tensor | None = None, witnesses: Witnesses | None = None
) -> None:
    """As `draft_commit_torch`; what the witnesses keep is contiguous."""
    rules, (rows, length), none = state.rules, state.pending.shape, state.step
    top1, confidence = stats.top1, stats.confidence
    kept = (none, none, none) if witnesses is None else (witnesses.checked, witnesses.edits, witnesses.confidence)
    scores = confidence if stats.token_prob is None else stats.token_prob
    draft_commit_kernel[(rows,)](
        state.generated, state.lengths, state.pending, state.guided, state.active, state.step, state.drafted,
        state.edited, state.done, top1, confidence, none if bounds is None else bounds, *kept, scores,
        state.tokens.stride(0), top1.stride(0), confidence.stride(0), scores.stride(0),
        length, rules.block_length, rules.mask_id, rules.pad_id,
        rules.threshold, rules.threshold_back, rules.ratio, rules.max_edits,
        0 if witnesses is None else witnesses.checked.shape[1],
        SCOPED=rules.scope == "block",
        FACTOR=bounds is not None,
        EDIT=witnesses is not None,
        SCORED=stats.token_prob is not None,
        EARLY_STOP=rules.early_stop and bool(rules.eos_ids),
        EOS_IDS=rules.eos_ids,
        enable_fp_fusion=False,
        **launch_config(length),
        **at_most(128),
    )  # fmt: skip
