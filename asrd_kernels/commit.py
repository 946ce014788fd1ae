"""`commit`: everything that happens to the state after a forward pass, steps 3 to 10 of SEMANTICS.md.

Verify, draft, revoke within the budget, extend the histories, promote anchors, record entropies, end the text, find the
next active block, and write what the host is to learn. Rows never influence each other; a done row does not change.

With a fixed number of slots per row, `slots` are updated to those of the coming step.
"""

from __future__ import annotations

from asrd_kernels.arrays import (
    Array,
    any_in_row,
    assign,
    columns,
    count_in_row,
    namespace,
    perhaps,
    put_along,
    surely_in_each_row,
    take_along,
    where,
    zeros_like,
)
from asrd_kernels.state import NO_ENTROPY, DecodeState, Rules, Slots, VocabStats, fill_slots


def commit_torch(
    state: DecodeState, stats: VocabStats, rules: Rules, slots: Slots | None = None, quota: Array | None = None
) -> None:
    """Apply the statistics [B, G] of the wanted positions to the state, in place; likewise the slots, if given.

    quota [B] int64: how many masks are drafted at least, where there are so many; None: one. State, statistics and
    quota may also be those of `host_view`, then without slots.
    """
    budget, tokens, guided = state.budget[:, None], state.generated, state.guided
    top1, confidence, entropy, _ = stats
    step = state.step[:, None]
    step += ~state.done[:, None]
    active = guided
    if rules.scope == "sequence":
        active = guided & (state.block_of == state.active[:, None])

    # 3. Verify
    failed = state.pending & (top1 != tokens)
    # 4. Draft
    confident = active & (confidence > rules.threshold)
    drafted = with_best(confident, active, confidence, quota)
    # 5. Revoke what the budget can pay for
    masked = (tokens == rules.mask_id) & ~drafted
    revoked = failed
    if perhaps(failed):
        revoked = failed & (failed.cumsum(1) <= budget - step - count_in_row(masked)[:, None])
    assign(tokens, drafted, top1)
    assign(tokens, revoked, rules.mask_id)
    # 6. History
    assign(state.run, guided, state.run * (top1 == state.last) + 1)
    assign(state.last, guided, top1)
    if rules.revoked_history == "reset":
        assign(state.run, revoked, 0)
        assign(state.last, revoked, -1)
    # 7. Anchors
    candidates = confident if rules.anchor_eos else confident & ~_is_any(tokens, rules.eos_ids)
    anchors = candidates & (state.run >= rules.window)
    if perhaps(seeding := step < rules.window):
        lowest = where(candidates, entropy, float("inf")).argmin(1)[:, None]
        anchors = where(seeding, candidates & (state.positions == lowest), anchors)
    # 8. Cache and pending
    if rules.capacity > 0 and perhaps(anchors):
        _append(state, anchors, rules.capacity)
    trusted = state.trusted
    trusted |= anchors
    for count, events in zip(state.counts[:3], (drafted, revoked, anchors), strict=True):
        count += count_in_row(events)
    pending = confident ^ anchors if rules.verify else zeros_like(confident)  # anchors are among the confident
    pending &= step < budget  # 10. at the end of the budget what is pending becomes final
    # 9. Entropies for the next step
    state.entropy[...] = where(guided, entropy, NO_ENTROPY)
    live = finish_step(state, masked | revoked, pending, rules)
    if perhaps(~live):
        assign(state.entropy, ~live, NO_ENTROPY)
    write_report(state, stats)
    if slots is not None:
        fill_slots(slots, state, rules)


def write_report(state: DecodeState, stats: VocabStats) -> None:
    """What the host is to learn of a step, to `state.report`, after its commit."""
    state.report[...] = 4 * state.step + 2 * any_in_row(stats.bad) + state.done


def with_best(chosen: Array, active: Array, confidence: Array, quota: Array | None = None) -> Array:
    """`chosen`, which are the most confident active positions, and, so that there is progress, the one most confident
    of all (the lowest of equals), if any is active; or with a quota [B] that many of them."""
    if quota is not None:
        return chosen | (active & (ranks(confidence, active, largest=True) < quota[:, None]))
    return chosen if surely_in_each_row(chosen) else chosen | most_confident(active, confidence)


def most_confident(active: Array, confidence: Array) -> Array:
    """[B, N] bool: the most confident active position of each row, the lowest of equals; none if none is active."""
    best = where(active, confidence, -1.0).argmax(1)[:, None]
    return active & (columns(active, active.shape[1]) == best)


def ranks(score: Array, among: Array, largest: bool = False) -> Array:
    """[B, N] int64: 0 for the smallest (or largest) score among [B, N], 1 for the next; of equals the lower position
    first. What is not among comes after all that is."""
    order = where(among, -score if largest else score, float("inf")).argsort(stable=True)
    inside = take_along(among, order)
    rank = zeros_like(order)
    put_along(rank, order, where(inside, inside.cumsum(1) - 1, score.shape[1]))
    return rank


def apply_step(
    state: DecodeState,
    rules: Rules,
    top1: Array,
    drafted: Array,
    revoked: Array | None = None,
    provisional: Array | None = None,
    edited: Array | None = None,
) -> None:
    """End a step: commit `top1` where `drafted`, mask again where `revoked`, end the rows that are complete.

    A position that is both is committed and revoked. provisional: tokens that may still be revoked or edited. They are
    streamed as drafts and no text ends with them; a row without masks is done nevertheless. edited: tokens that `top1`
    replaces in place. Everything is [B, G]; done rows do not change.
    """
    tokens, step, (commits, revocations, _, edits) = state.generated, state.step, state.counts
    live = ~state.done[:, None]
    step += live[:, 0]
    written = drafted = drafted & live
    commits += count_in_row(drafted)
    if edited is not None:
        edited = edited & live
        written = drafted | edited
        edits += count_in_row(edited)
    assign(tokens, written, top1)
    if revoked is not None:
        revoked = revoked & live
        revocations += count_in_row(revoked)
        assign(tokens, revoked, rules.mask_id)
    masked = tokens == rules.mask_id
    pending = zeros_like(masked)
    if provisional is not None:
        pending = provisional & state.inside & ~masked & any_in_row(masked)[:, None]
    finish_step(state, masked, pending, rules)


def finish_step(state: DecodeState, masked: Array, pending: Array, rules: Rules) -> Array:
    """The last part of every decoder's commit: end of text, done rows, next active block and guided masks.

    masked and pending [B, G] bool say what is open on the canvas now. Returns [B, 1] bool: the rows that go on.
    """
    tokens = state.generated
    still_open = masked | pending
    live = any_in_row(still_open)[:, None]
    if rules.early_stop and rules.eos_ids and perhaps(ends := _is_any(tokens, rules.eos_ids)):
        ends = ends & (still_open.cumsum(1) == 0)
        if rules.given:  # a text ends with a token of its own that has no given one behind it
            so_far = state.fixed.cumsum(1)
            ends &= ~state.fixed & (so_far == so_far[:, -1:])
        past_end = ends.cumsum(1)
        assign(tokens, past_end > ends, rules.pad_id)
        live &= past_end[:, -1:] == 0
        masked = masked & live
    state.pending[...] = pending & live
    state.done[...] = ~live[:, 0]
    _aim(state, masked, rules)
    return live


def _is_any(tokens: Array, ids: tuple[int, ...]) -> Array:
    found = tokens == (ids[0] if ids else -1)
    for token in ids[1:]:
        found |= tokens == token
    return found


def _append(state: DecodeState, anchors: Array, capacity: int) -> None:
    """Put the new anchors into the ring in ascending position; the oldest beyond the capacity are overwritten."""
    number = anchors.cumsum(1) + (state.anchors - 1)[:, None]
    fresh = anchors & (number > number[:, -1:] - capacity)
    put_along(state.ring, where(fresh, number % capacity, capacity), state.positions)


def _aim(state: DecodeState, masked: Array, rules: Rules) -> None:
    """The leftmost block with a mask (with `one_block`, or a pending token) becomes active, its masks (in scope
    "sequence" all masks) guided."""
    still_open = masked | state.pending if rules.one_block else masked
    leftmost = still_open.view(namespace(masked).uint8).argmax(1)
    block = (leftmost + state.offsets) // rules.block_length
    assign(state.active, any_in_row(still_open), block)
    if rules.scope == "sequence":
        state.guided[...] = masked
    else:
        state.guided[...] = masked & (state.block_of == state.active[:, None])
