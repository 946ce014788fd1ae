"""`commit`: everything that happens to the state after a forward pass, steps 3 to 10 of SEMANTICS.md.

Verify, draft, revoke within the budget, extend the histories, promote anchors, record entropies, end the text, and
say what the next step wants to know. Rows never influence each other; a done row does not change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd_kernels.state import NO_ENTROPY, DecodeState, Rules, VocabStats


def commit_torch(state: DecodeState, stats: VocabStats, rules: Rules) -> None:
    """Apply the statistics [B, W] of the positions in `state.slots` to the state, in place."""
    length, tokens, mask_id = state.length, state.generated, rules.mask_id
    positions = torch.arange(length, device=tokens.device)
    top1, confidence, entropy = (_spread(state, values) for values in stats[:3])
    step = state.step + ~state.done
    masked = tokens == mask_id
    active = state.guided
    if rules.scope == "sequence":
        active = active & (positions // rules.block_length == state.active[:, None])

    # 3. Verify
    failed = state.pending & (top1 != tokens)
    # 4. Draft
    confident = active & (confidence > rules.threshold)
    best = torch.where(active, confidence, -1.0).argmax(1, keepdim=True)
    forced = active & (positions == best) & ~confident.any(1, keepdim=True)
    drafted = confident | forced
    # 5. Revoke what the budget can pay for
    masks_left = (masked & ~drafted).sum(1)
    revoked = failed & (failed.cumsum(1) <= (length - step - masks_left)[:, None])
    tokens = torch.where(drafted, top1, tokens).masked_fill(revoked, mask_id)
    # 6. History
    run = torch.where(state.guided, torch.where(top1 == state.last, state.run + 1, 1), state.run)
    last = torch.where(state.guided, top1, state.last)
    if rules.revoked_history == "reset":
        run, last = run.masked_fill(revoked, 0), last.masked_fill(revoked, -1)
    # 7. Anchors
    candidates = confident if rules.anchor_eos else confident & ~_is_any(tokens, rules.eos_ids)
    lowest = torch.where(candidates, entropy, torch.inf).argmin(1, keepdim=True)
    seed = candidates & (positions == lowest)
    anchors = torch.where((step < rules.window)[:, None], seed, candidates & (run >= rules.window))
    # 8. Cache and pending
    if rules.capacity > 0:
        _append(state, anchors, positions, rules.capacity)
    pending = confident & ~anchors if rules.verify else torch.zeros_like(confident)
    # 10. End of text and end of budget (9 follows: a done row records nothing)
    pending = pending & (step < length)[:, None]
    open_ = (tokens == mask_id) | pending
    done = state.done | ~open_.any(1) | (step == length)
    if rules.early_stop and rules.eos_ids:
        ends = _is_any(tokens, rules.eos_ids) & (open_.cumsum(1) == 0)
        past_end = ends.cumsum(1) - ends.long() > 0
        tokens = tokens.masked_fill(past_end, rules.pad_id)
        done = done | ends.any(1)
    pending = pending & ~done[:, None]
    guided_now = state.guided & ~done[:, None]

    state.bad.logical_or_(stats.bad.any(1))
    state.drafted.add_(drafted.sum(1))
    state.revoked.add_(revoked.sum(1))
    state.anchors.add_(anchors.sum(1))
    state.step.copy_(step)
    state.last.copy_(last)
    state.run.copy_(run)
    state.pending.copy_(pending)
    state.done.copy_(done)
    state.generated.copy_(tokens)
    state.entropy.copy_(torch.where(guided_now, entropy, NO_ENTROPY))  # 9. Recorded for the next step
    _aim(state, (tokens == mask_id) & ~done[:, None], positions, rules)


def _spread(state: DecodeState, values: Tensor) -> Tensor:
    """[B, W] statistics of the slots as [B, G]; 0 where nothing was wanted."""
    room = values.new_zeros(values.shape[0], state.length + 1)
    return room.scatter_(1, state.slots, values)[:, : state.length]


def _is_any(tokens: Tensor, ids: tuple[int, ...]) -> Tensor:
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for token in ids:
        found = found | (tokens == token)
    return found


def _append(state: DecodeState, anchors: Tensor, positions: Tensor, capacity: int) -> None:
    """Put the new anchors into the ring in ascending position; the oldest beyond the capacity are overwritten."""
    order = anchors.cumsum(1) - 1
    fresh = anchors & (order >= anchors.sum(1, keepdim=True) - capacity)
    slot = torch.where(fresh, (state.anchors[:, None] + order) % capacity, capacity)
    room = torch.cat([state.ring, state.ring[:, :1]], dim=1)
    state.ring.copy_(room.scatter_(1, slot, positions.expand_as(slot))[:, :capacity])


def _aim(state: DecodeState, masked: Tensor, positions: Tensor, rules: Rules) -> None:
    """Active block, guided masks and wanted slots of the next step; pending ones lie in the block active until now."""
    length, block = state.length, rules.block_length
    previous = state.active.clone()
    leftmost = masked.long().argmax(1) // block
    state.active.copy_(torch.where(masked.any(1), leftmost, previous))
    guided = masked if rules.scope == "sequence" else masked & (positions // block == state.active[:, None])
    state.guided.copy_(guided)
    wanted = guided | state.pending
    if state.slots.shape[1] == length:
        state.slots.copy_(torch.where(wanted, positions, length))
        return
    blocks = torch.stack([state.active, previous], dim=1)
    slots = (blocks[:, :, None] * block + positions[:block]).flatten(1)
    wanted = wanted.gather(1, slots.clamp(max=length - 1)) & (slots < length)
    wanted[:, block:] &= (state.active != previous)[:, None]
    state.slots.copy_(torch.where(wanted, slots, length))
