"""`commit`: everything that happens to the state after a forward pass, steps 3 to 10 of SEMANTICS.md.

Verify, draft, revoke within the budget, extend the histories, promote anchors, record entropies, end the text, and
find the next active block. Rows never influence each other; a done row does not change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd_kernels.state import NO_ENTROPY, DecodeState, Rules, VocabStats


def commit_torch(state: DecodeState, stats: VocabStats, rules: Rules) -> None:
    """Apply the statistics of the wanted positions to the state, in place."""
    length, tokens, guided, positions = state.length, state.generated, state.guided, state.positions
    top1, confidence, entropy, bad = (values[:, :length] for values in stats)
    state.bad.logical_or_(bad.any(1))
    state.step.add_(~state.done)
    step = state.step[:, None]
    masked = tokens == rules.mask_id
    active = guided
    if rules.scope == "sequence":
        active = guided & (state.block_of == state.active[:, None])

    # 3. Verify
    failed = state.pending & (top1 != tokens)
    # 4. Draft
    confident = active & (confidence > rules.threshold)
    best = confidence.masked_fill(~active, -1.0).argmax(1, keepdim=True)
    stuck = ~confident.any(1, keepdim=True)
    drafted = confident | (active & stuck & (positions == best))
    # 5. Revoke what the budget can pay for
    masks_left = (masked & ~drafted).sum(1, keepdim=True)
    revoked = failed & (failed.cumsum(1) <= length - step - masks_left)
    tokens.copy_(torch.where(drafted, top1, tokens).masked_fill_(revoked, rules.mask_id))
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
        lowest = entropy.masked_fill(~candidates, torch.inf).argmin(1, keepdim=True)
        anchors = torch.where(step < rules.window, candidates & (positions == lowest), anchors)
    # 8. Cache and pending
    if rules.capacity > 0:
        _append(state, anchors, rules.capacity)
    state.counts.add_(torch.stack([drafted, revoked, anchors]).sum(2))
    pending = confident & ~anchors if rules.verify else torch.zeros_like(confident)
    # 10. End of budget and end of text
    pending &= step < length
    masked = (masked & ~drafted) | revoked
    still_open = masked | pending
    done = state.done | ~still_open.any(1) | (state.step == length)
    if rules.early_stop and rules.eos_ids:
        ends = _is_any(tokens, rules.eos_ids) & (still_open.cumsum(1) == 0)
        tokens.masked_fill_(ends.cumsum(1) > ends, rules.pad_id)
        done |= ends.any(1)
    live = ~done[:, None]
    # 9. Entropies for the next step
    state.entropy.copy_(entropy.masked_fill(~(guided & live), NO_ENTROPY))
    state.done.copy_(done)
    torch.logical_and(pending, live, out=state.pending)
    _aim(state, masked & live, rules)


def _is_any(tokens: Tensor, ids: tuple[int, ...]) -> Tensor:
    found = tokens == ids[0] if ids else torch.zeros_like(tokens, dtype=torch.bool)
    for token in ids[1:]:
        found |= tokens == token
    return found


def _append(state: DecodeState, anchors: Tensor, capacity: int) -> None:
    """Put the new anchors into the ring in ascending position; the oldest beyond the capacity are overwritten."""
    count = anchors.cumsum(1)
    fresh = anchors & (count > count[:, -1:] - capacity)
    slot = ((count + (state.anchors - 1)[:, None]) % capacity).masked_fill_(~fresh, capacity)
    room = torch.cat([state.ring, state.ring[:, :1]], dim=1)
    state.ring.copy_(room.scatter_(1, slot, state.positions.expand_as(slot))[:, :capacity])


def _aim(state: DecodeState, masked: Tensor, rules: Rules) -> None:
    """The leftmost block with a mask becomes active, its masks (in scope "sequence" all masks) guided."""
    leftmost = state.block_of[masked.byte().argmax(1)]
    torch.where(masked.any(1), leftmost, state.active, out=state.active)
    if rules.scope == "sequence":
        state.guided.copy_(masked)
    else:
        torch.logical_and(masked, state.block_of == state.active[:, None], out=state.guided)
