"""`commit` as one Triton launch, one program a row: the decisions of `commit_torch`, in place.

A row is read tile by tile, so any length fits, in three passes: (1) count and find what takes the whole row to know;
(2) decide and write; (3) end the text, or narrow the guided masks to the next active block, now that it is known.
Done rows, which are fixed points, are left alone, and so is what lies beyond a row's own length. Numbers are compared
and counted, never computed with.

Prefixes: p_ pointer (of the row), o_ offsets in the row, m_ which of them exist, b_ values of the tile. Guided
positions hold the mask token; `Rules` and `DecodeState` say what the rest means.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of a kernel's arguments.
import triton
import triton.language as tl

from asrd_kernels.compiler_triton import at_most
from asrd_kernels.state import NO_ENTROPY, DecodeState, VocabStats

_NO_ENTROPY = tl.constexpr(NO_ENTROPY)
_SMALLEST_TILE, _LARGEST_TILE = 128, 512


@triton.jit
def is_any(b_tokens, IDS: tl.constexpr):
    b_found = b_tokens != b_tokens
    for i in tl.static_range(len(IDS)):
        b_found |= b_tokens == IDS[i]
    return b_found


@triton.jit
def _side_by_side(b_0, b_1, b_2, b_3):
    """[N, 2, 2] of four [N]: reduced together they take the warps one exchange, and its barriers, instead of four."""
    return tl.join(tl.join(b_0, b_1), tl.join(b_2, b_3))


@triton.jit
def _apart(b_four):
    """The four numbers of [2, 2], in the order of `_side_by_side`."""
    b_left, b_right = tl.split(b_four)
    zero, one = tl.split(b_left)
    two, three = tl.split(b_right)
    return zero, one, two, three


@triton.jit
def count_four(b_0, b_1, b_2, b_3):
    """How often each of four flags is set."""
    b_four = _side_by_side(b_0.to(tl.int32), b_1.to(tl.int32), b_2.to(tl.int32), b_3.to(tl.int32))
    return _apart(tl.sum(b_four, 0))


@triton.jit
def least_of_four(b_0, b_1, b_2, b_3):
    """The least number of each of four."""
    return _apart(tl.min(_side_by_side(b_0, b_1, b_2, b_3), 0))


@triton.jit
def _read(
    p_tokens, p_guided, p_top1, p_confidence, p_last, p_run, o_, m_, block_start, block_length, threshold,
    SCOPED: tl.constexpr, ANCHOR_EOS: tl.constexpr, EOS_IDS: tl.constexpr,
):  # fmt: skip
    """A tile before the step: tokens, top-1, confidence, run; guided masks, those of the active block, the confident of
    these, and those of them that may become anchors."""
    b_tokens = tl.load(p_tokens + o_, mask=m_, other=-1).to(tl.int32)
    b_top1 = tl.load(p_top1 + o_, mask=m_, other=-1).to(tl.int32)
    b_last = tl.load(p_last + o_, mask=m_, other=-1).to(tl.int32)
    b_run = tl.where(b_top1 == b_last, tl.load(p_run + o_, mask=m_, other=0).to(tl.int32), 0) + 1
    b_confidence = tl.load(p_confidence + o_, mask=m_, other=0.0)
    b_guided = tl.load(p_guided + o_, mask=m_, other=0).to(tl.int1)
    b_active = b_guided
    if not SCOPED:
        b_active = b_guided & (o_ >= block_start) & (o_ < block_start + block_length)
    b_confident = b_active & (b_confidence > threshold)
    b_candidates = b_confident
    if not ANCHOR_EOS:
        b_candidates = b_confident & ~is_any(b_top1, EOS_IDS)
    return b_tokens, b_top1, b_confidence, b_run, b_guided, b_active, b_confident, b_candidates


@triton.jit(do_not_specialize=["block_length", "mask_id", "pad_id", "window", "capacity"])
def commit_kernel(
    p_tokens, p_lengths, p_pending, p_guided, p_trusted, p_last, p_run, p_entropy, p_ring, p_active, p_step,
    p_drafted, p_revoked, p_anchors, p_done, p_top1, p_confidence, p_new_entropy,
    s_tokens, s_ring, s_top1, s_confidence, s_new_entropy, room, block_length,
    mask_id, pad_id, threshold: tl.float64, window, capacity,
    SCOPED: tl.constexpr, RESET: tl.constexpr, ANCHOR_EOS: tl.constexpr, VERIFY: tl.constexpr,
    EARLY_STOP: tl.constexpr, EOS_IDS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row. s_ are the strides between rows; tensors of the state without one are contiguous [rows, room]."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(p_done + row):
        return
    p_tokens += row * s_tokens
    p_ring += row * s_ring
    p_top1 += row * s_top1
    p_confidence += row * s_confidence
    p_new_entropy += row * s_new_entropy
    p_pending += row * room
    p_guided += row * room
    p_trusted += row * room
    p_last += row * room
    p_run += row * room
    p_entropy += row * room
    length = tl.load(p_lengths + row).to(tl.int32)
    step = tl.load(p_step + row).to(tl.int32) + 1
    active = tl.load(p_active + row).to(tl.int32)
    anchors_before = tl.load(p_anchors + row).to(tl.int32)
    threshold = tl.full([], threshold, p_confidence.dtype.element_ty)
    last_step, seeding = step >= length, step < window

    # What takes the whole row: masks, drafts, consistent drafts, most confident mask, least uncertain candidate
    masks, drafts, consistent, best, seed = 0, 0, 0, tl.full([], -1, tl.int32), tl.full([], -1, tl.int32)
    best_confidence = tl.full([], -1.0, p_confidence.dtype.element_ty)
    seed_entropy = tl.full([], float("inf"), p_new_entropy.dtype.element_ty)
    for start in range(0, length, TILE):
        o_ = start + tl.arange(0, TILE)
        m_ = o_ < length
        b_tokens, b_top1, b_confidence, b_run, b_guided, b_active, b_confident, b_candidates = _read(
            p_tokens, p_guided, p_top1, p_confidence, p_last, p_run, o_, m_, active * block_length, block_length,
            threshold, SCOPED, ANCHOR_EOS, EOS_IDS,
        )  # fmt: skip
        b_consistent = b_candidates & (b_run >= window)
        more_masks, more_drafts, more, _ = count_four(b_tokens == mask_id, b_confident, b_consistent, b_consistent)
        masks += more_masks
        drafts += more_drafts
        consistent += more
        if drafts == 0:
            top, at = tl.max(tl.where(b_active, b_confidence, -1.0), 0, return_indices=True)
            best = tl.where(top > best_confidence, start + at, best)
            best_confidence = tl.maximum(top, best_confidence)
        if seeding:
            b_new_entropy = tl.load(p_new_entropy + o_, mask=m_, other=0.0)
            low, at = tl.min(tl.where(b_candidates, b_new_entropy, float("inf")), 0, return_indices=True)
            seed = tl.where(low < seed_entropy, start + at, seed)
            seed_entropy = tl.minimum(low, seed_entropy)
    best = tl.where(drafts == 0, best, -1)
    drafts = tl.where(best >= 0, 1, drafts)
    anchors = tl.where(seeding, (seed >= 0).to(tl.int32), consistent)
    budget = tl.maximum(length - step - (masks - drafts), 0)

    # Decide and write; `guided` holds all masks for the moment
    first_mask, first_pending, first_end, failed, promoted = length, length, length, 0, anchors_before
    for start in range(0, length, TILE):
        o_ = start + tl.arange(0, TILE)
        m_ = o_ < length
        b_tokens, b_top1, b_confidence, b_run, b_guided, b_active, b_confident, b_candidates = _read(
            p_tokens, p_guided, p_top1, p_confidence, p_last, p_run, o_, m_, active * block_length, block_length,
            threshold, SCOPED, ANCHOR_EOS, EOS_IDS,
        )  # fmt: skip
        b_new_entropy = tl.load(p_new_entropy + o_, mask=m_, other=0.0)
        b_failed = tl.load(p_pending + o_, mask=m_, other=0).to(tl.int1) & (b_top1 != b_tokens)
        b_anchors = b_candidates & tl.where(seeding, o_ == seed, b_run >= window)
        b_nth = tl.cumsum(b_failed.to(tl.int32) + (b_anchors.to(tl.int32) << 16), 0)  # both counted in one number
        tl.debug_barrier()  # every warp has read the tile (and the row's numbers)
        b_drafted = b_confident | (o_ == best)
        b_revoked = b_failed & (failed + (b_nth & 0xFFFF) <= budget)
        b_masked = ((b_tokens == mask_id) & ~b_drafted) | b_revoked
        b_tokens = tl.where(b_revoked, mask_id, tl.where(b_drafted, b_top1, b_tokens))
        b_pending = b_confident & ~b_anchors & ~last_step & VERIFY
        tl.store(p_tokens + o_, b_tokens, mask=m_)
        tl.store(p_guided + o_, b_masked, mask=m_)
        tl.store(p_pending + o_, b_pending, mask=m_)
        tl.store(p_trusted + o_, b_anchors, mask=m_ & b_anchors)
        tl.store(p_entropy + o_, tl.where(b_guided, b_new_entropy, _NO_ENTROPY), mask=m_)
        tl.store(p_run + o_, b_run, mask=m_ & b_guided)
        tl.store(p_last + o_, b_top1, mask=m_ & b_guided)
        if RESET:  # what is revoked was not guided
            tl.store(p_run + o_, tl.zeros_like(b_run), mask=m_ & b_revoked)
            tl.store(p_last + o_, tl.zeros_like(b_top1) - 1, mask=m_ & b_revoked)
        if (capacity > 0) & (anchors > 0):
            b_number = promoted + (b_nth >> 16) - 1
            b_kept = b_anchors & (b_number >= anchors_before + anchors - capacity)
            tl.store(p_ring + b_number % capacity, o_, mask=b_kept)
        b_ends = o_ < 0
        if EARLY_STOP:
            b_ends = is_any(b_tokens, EOS_IDS)
        at_mask, at_pending, at_end, most = least_of_four(
            tl.where(b_masked, o_, length), tl.where(b_pending, o_, length), tl.where(b_ends, o_, length), -b_nth
        )
        first_mask = tl.minimum(first_mask, at_mask)
        first_pending = tl.minimum(first_pending, at_pending)
        first_end = tl.minimum(first_end, at_end)
        failed += -most & 0xFFFF
        promoted += -most >> 16
    first_open = tl.minimum(first_mask, first_pending)
    ended = first_end < first_open
    live = (first_open < length) & ~ended
    next_active = tl.where(live & (first_mask < length), first_mask // block_length, active)
    drafts += tl.load(p_drafted + row).to(tl.int32)
    revocations = tl.load(p_revoked + row).to(tl.int32) + tl.minimum(failed, budget)
    tl.debug_barrier()  # every warp has written its part, and read the counts

    # The text ends here, or the masks of the next active block are guided
    for start in range(0, length, TILE):
        o_ = start + tl.arange(0, TILE)
        m_ = o_ < length
        tl.store(p_tokens + o_, tl.full([TILE], 0, tl.int32) + pad_id, mask=m_ & ended & (o_ > first_end))
        tl.store(p_pending + o_, tl.zeros([TILE], tl.int1), mask=m_ & ~live)
        tl.store(p_guided + o_, tl.zeros([TILE], tl.int1), mask=m_ & ~live)
        tl.store(p_entropy + o_, tl.full([TILE], _NO_ENTROPY, p_entropy.dtype.element_ty), mask=m_ & ~live)
        if SCOPED:
            b_later = o_ >= (next_active + 1) * block_length  # no mask is left of the active block
            tl.store(p_guided + o_, tl.zeros([TILE], tl.int1), mask=m_ & b_later)
    tl.store(p_step + row, step)
    tl.store(p_active + row, next_active)
    tl.store(p_done + row, ~live)
    tl.store(p_drafted + row, drafts)
    tl.store(p_revoked + row, revocations)
    tl.store(p_anchors + row, anchors_before + anchors)


def launch_config(length: int) -> dict[str, int]:
    """Tile and warps for a row of `length` positions: two positions a thread (16 bytes of tokens)."""
    tile = min(_LARGEST_TILE, max(_SMALLEST_TILE, triton.next_power_of_2(length)))
    return {"TILE": tile, "num_warps": tile // 64}


def commit_triton(state: DecodeState, stats: VocabStats) -> None:
    """As `commit_torch` without a quota."""
    rules, (rows, length) = state.rules, state.pending.shape
    top1, confidence, entropy = stats.top1, stats.confidence, stats.entropy
    commit_kernel[(rows,)](
        state.generated, state.lengths, state.pending, state.guided, state.trusted, state.last, state.run,
        state.entropy, state.ring, state.active, state.step, state.drafted, state.revoked, state.anchors, state.done,
        top1, confidence, entropy,
        state.tokens.stride(0), state.ring.stride(0), top1.stride(0), confidence.stride(0), entropy.stride(0),
        length, rules.block_length, rules.mask_id, rules.pad_id, rules.threshold, rules.window,
        state.ring.shape[1] - 1,
        SCOPED=rules.scope == "block",
        RESET=rules.revoked_history == "reset",
        ANCHOR_EOS=rules.anchor_eos or not rules.eos_ids,
        VERIFY=rules.verify,
        EARLY_STOP=rules.early_stop and bool(rules.eos_ids),
        EOS_IDS=rules.eos_ids,
        enable_fp_fusion=False,
        **launch_config(length),
        **at_most(128),
    )  # fmt: skip
