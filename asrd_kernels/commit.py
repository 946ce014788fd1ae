"""`commit`: everything that happens to the state after a forward pass, steps 3 to 10 of SEMANTICS.md.

Verify, draft, revoke within the budget, extend the histories, promote anchors, record entropies, end the text, find the
next active block, and write what the host is to learn. Rows never influence each other; a done row does not change.

With a fixed number of slots per row, `slots` are updated to those of the coming step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd_kernels.state import NO_ENTROPY, DecodeState, Rules, Slots, VocabStats, fill_slots


def commit_torch(
    state: DecodeState, stats: VocabStats, rules: Rules, slots: Slots | None = None, quota: Tensor | None = None
) -> None:
    """Apply the statistics [B, G] of the wanted positions to the state, in place; likewise the slots, if given.

    quota [B] int64: how many masks are drafted at least, where there are so many; None: one.
    """
    budget, tokens, guided, positions = state.budget[:, None], state.generated, state.guided, state.positions
    top1, confidence, entropy, _ = stats
    state.step.add_(~state.done)
    step = state.step[:, None]
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
    revoked = failed & (failed.cumsum(1) <= budget - step - masked.sum(1, keepdim=True))
    tokens.copy_(torch.where(revoked, rules.mask_id, torch.where(drafted, top1, tokens)))
    # 6. History
    run = state.run * (top1 == state.last) + 1
    torch.where(guided, run, state.run, out=state.run)
    torch.where(guided, top1, state.last, out=state.last)
    if rules.revoked_history == "reset":
        state.run.masked_fill_(revoked, 0)
        state.last.masked_fill_(revoked, -1)
    # 7. Anchors
    candidates = confident if rules.anchor_eos else confident & ~_is_any(tokens, rules.eos_ids)
    anchors = candidates & (state.run >= rules.window)
    if rules.window > 1:
        lowest = torch.where(candidates, entropy, torch.inf).argmin(1, keepdim=True)
        anchors = torch.where(step < rules.window, candidates & (positions == lowest), anchors)
    # 8. Cache and pending
    if rules.capacity > 0:
        _append(state, anchors, rules.capacity)
    state.trusted.logical_or_(anchors)
    state.counts[:3].add_(torch.stack([drafted, revoked, anchors]).sum(2))
    pending = confident ^ anchors if rules.verify else torch.zeros_like(confident)  # anchors are among the confident
    pending &= step < budget  # 10. at the end of the budget what is pending becomes final
    # 9. Entropies for the next step
    recorded = guided.clone()
    live = finish_step(state, masked | revoked, pending, rules)
    state.entropy.copy_(torch.where(recorded & live, entropy, NO_ENTROPY))
    write_report(state, stats)
    if slots is not None:
        fill_slots(slots, state, rules)


def write_report(state: DecodeState, stats: VocabStats) -> None:
    """What the host is to learn of a step, to `state.report`, after its commit."""
    torch.add(state.done, state.step, alpha=4, out=state.report)
    state.report.add_(stats.bad.any(1), alpha=2)


def with_best(chosen: Tensor, active: Tensor, confidence: Tensor, quota: Tensor | None = None) -> Tensor:
    """`chosen` and, so that there is progress, the most confident active position (the lowest of equals), if any; or
    with a quota [B] that many of them."""
    if quota is not None:
        return chosen | (active & (ranks(confidence, active, largest=True) < quota[:, None]))
    best = torch.where(active, confidence, -1.0).argmax(1, keepdim=True)
    return chosen.scatter(1, best, active.gather(1, best))  # if nothing is active, best is not, and not chosen


def ranks(score: Tensor, among: Tensor, largest: bool = False) -> Tensor:
    """[B, N] int64: 0 for the smallest (or largest) score among [B, N], 1 for the next; of equals the lower position
    first. What is not among comes after all that is."""
    outside = -torch.inf if largest else torch.inf
    order = torch.where(among, score, outside).argsort(dim=1, descending=largest, stable=True)
    inside = among.gather(1, order)
    place = torch.where(inside, inside.cumsum(1) - 1, score.shape[1])
    return torch.empty_like(order).scatter_(1, order, place)


def apply_step(
    state: DecodeState,
    rules: Rules,
    top1: Tensor,
    drafted: Tensor,
    revoked: Tensor | None = None,
    provisional: Tensor | None = None,
    edited: Tensor | None = None,
) -> None:
    """End a step: commit `top1` where `drafted`, mask again where `revoked`, end the rows that are complete.

    A position that is both is committed and revoked. provisional: tokens that may still be revoked or edited. They are
    streamed as drafts and no text ends with them; a row without masks is done nevertheless. edited: tokens that `top1`
    replaces in place. Everything is [B, G]; done rows do not change.
    """
    tokens, live = state.generated, ~state.done
    drafted = drafted & live[:, None]
    revoked = torch.zeros_like(drafted) if revoked is None else revoked & live[:, None]
    masked = ((tokens == rules.mask_id) & ~drafted) | revoked
    written = drafted
    if edited is not None:
        edited = edited & live[:, None]
        written = drafted | edited
        state.edited.add_(edited.sum(1))
    tokens.copy_(torch.where(revoked, rules.mask_id, torch.where(written, top1, tokens)))
    state.step.add_(live)
    state.counts[:2].add_(torch.stack([drafted, revoked]).sum(2))
    pending = torch.zeros_like(masked)
    if provisional is not None:
        pending = provisional & ~masked & masked.any(1, keepdim=True)
    finish_step(state, masked, pending, rules)


def finish_step(state: DecodeState, masked: Tensor, pending: Tensor, rules: Rules) -> Tensor:
    """The last part of every decoder's commit: end of text, done rows, next active block and guided masks.

    masked and pending [B, G] bool say what is open on the canvas now. Returns [B, 1] bool: the rows that go on.
    """
    tokens = state.generated
    still_open = masked | pending
    live = still_open.any(1, keepdim=True)
    if rules.early_stop and rules.eos_ids:
        ends = _is_any(tokens, rules.eos_ids) & (still_open.cumsum(1) == 0)
        if rules.given:  # a text ends with a token of its own that has no given one behind it
            ends &= ~state.fixed.flip(1).cummax(1).values.flip(1)
        past_end = ends.cumsum(1)
        tokens.copy_(torch.where(past_end > ends, rules.pad_id, tokens))
        live &= past_end[:, -1:] == 0
        masked = masked & live
    torch.logical_and(pending, live, out=state.pending)
    torch.logical_not(live.squeeze(1), out=state.done)
    _aim(state, masked, rules)
    return live


def _is_any(tokens: Tensor, ids: tuple[int, ...]) -> Tensor:
    found = tokens == ids[0] if ids else torch.zeros_like(tokens, dtype=torch.bool)
    for token in ids[1:]:
        found |= tokens == token
    return found


def _append(state: DecodeState, anchors: Tensor, capacity: int) -> None:
    """Put the new anchors into the ring in ascending position; the oldest beyond the capacity are overwritten."""
    number = anchors.cumsum(1) + (state.anchors - 1)[:, None]
    fresh = anchors & (number > number[:, -1:] - capacity)
    slot = torch.where(fresh, number % capacity, capacity)
    state.ring.scatter_(1, slot, state.positions.expand_as(slot))


def _aim(state: DecodeState, masked: Tensor, rules: Rules) -> None:
    """The leftmost block with a mask (with `one_block`, or a pending token) becomes active, its masks (in scope
    "sequence" all masks) guided."""
    still_open = masked | state.pending if rules.one_block else masked
    open_any, leftmost = still_open.view(torch.uint8).max(1)
    block = (leftmost + state.offsets) // rules.block_length
    torch.where(open_any > 0, block, state.active, out=state.active)
    if rules.scope == "sequence":
        state.guided.copy_(masked)
    else:
        torch.logical_and(masked, state.block_of == state.active[:, None], out=state.guided)
