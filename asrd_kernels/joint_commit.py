"""`joint_commit`: the step after a forward pass of models that fill masks and edit tokens at once (LLaDA2.1).

Tokens of the open block stay in a pool in which each may be edited until the block is over. With verification (ASRD on
these models) what was filled or edited boldly awaits a check first; what passes it is fixed, what fails returns to the
pool and keeps its token. Rows never influence each other; a done row does not change. PyTorch only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asrd_kernels.commit import _append, _is_any, finish_step, with_best, write_report
from asrd_kernels.state import NO_ENTROPY, DecodeState, Rules, VocabStats


@dataclass(frozen=True)
class Joint:
    """What joint decoding keeps and obeys. `state.pending` holds the pool and what awaits a check: all that may change
    still."""

    pool: Tensor  # [B, G] bool, tokens of the open block that may be edited
    checked: Tensor  # [B, G] bool, tokens that the coming pass verifies
    post: Tensor  # [B] int64, passes over the open block that began without masks
    editing_threshold: float  # of the token that would replace another
    max_post_steps: int  # after so many of those passes a block is over in any case
    quota: Tensor  # [B] int64, masks filled at least


def new_joint(state: DecodeState, editing_threshold: float, max_post_steps: int, num_to_transfer: int) -> Joint:
    """Before the first step."""
    nothing = torch.zeros_like(state.pending)
    quota = torch.full_like(state.step, num_to_transfer)
    return Joint(nothing, nothing.clone(), torch.zeros_like(state.step), editing_threshold, max_post_steps, quota)


def joint_commit_torch(state: DecodeState, stats: VocabStats, rules: Rules, joint: Joint, anchored: bool) -> None:
    """Apply the statistics [B, G] of masks, pool and checked tokens to state and joint, in place.

    anchored: histories are kept and anchors formed; and with rules.verify what is not one of them is checked.
    """
    tokens, guided, pool, checked = state.generated, state.guided, joint.pool, joint.checked
    top1, confidence, entropy, _ = stats
    began_masked = guided.any(1)
    state.step.add_(~state.done)
    joint.post.add_(~state.done & ~began_masked)
    failed = checked & (top1 != tokens)
    confident = guided & (confidence > rules.threshold)
    drafted = with_best(confident, guided, confidence, joint.quota)
    edited = pool & (confidence > joint.editing_threshold) & (top1 != tokens)
    masked = (tokens == rules.mask_id) & ~drafted
    tokens.copy_(torch.where(drafted | edited, top1, tokens))
    state.counts[:2].add_(torch.stack([drafted, torch.zeros_like(drafted)]).sum(2))
    state.edited.add_(edited.sum(1))
    anchors = torch.zeros_like(pool)
    if anchored:
        anchors = _promote(state, stats, rules, confident | edited, guided | pool)
    if anchored and rules.verify:
        pending = (confident | edited) & ~anchors
        pool = (pool & ~edited) | failed | (drafted & ~confident)
    else:
        pending, pool = torch.zeros_like(pool), pool | drafted
    here = state.block_of == state.active[:, None]
    quiet = ~began_masked & ~(edited | failed).any(1)
    settled = ~pending.any(1) & (~pool.any(1) | quiet)
    over = ~(masked & here).any(1) & (settled | (joint.post >= joint.max_post_steps))
    pending, pool = pending & ~over[:, None], pool & ~over[:, None]
    joint.post.masked_fill_(over, 0)
    recorded = guided.clone()
    live = finish_step(state, masked, pending | pool, rules)
    state.entropy.copy_(torch.where(recorded & live, entropy, NO_ENTROPY))
    torch.logical_and(pool, live, out=joint.pool)
    torch.logical_and(pending, live, out=joint.checked)
    write_report(state, stats)


def _promote(state: DecodeState, stats: VocabStats, rules: Rules, bold: Tensor, seen: Tensor) -> Tensor:
    """Extend the histories where the prediction was `seen`; the anchors among `bold`, appended to the ring."""
    top1, _, entropy, _ = stats
    run = state.run * (top1 == state.last) + 1
    torch.where(seen, run, state.run, out=state.run)
    torch.where(seen, top1, state.last, out=state.last)
    candidates = bold if rules.anchor_eos else bold & ~_is_any(state.generated, rules.eos_ids)
    anchors = candidates & (state.run >= rules.window)
    if rules.window > 1:
        lowest = torch.where(candidates, entropy, torch.inf).argmin(1, keepdim=True)
        seed = candidates & (state.positions == lowest)
        anchors = torch.where(state.step[:, None] < rules.window, seed, anchors)
    if rules.capacity > 0:
        _append(state, anchors, rules.capacity)
    state.trusted.logical_or_(anchors)
    state.anchors.add_(anchors.sum(1))
    return anchors
