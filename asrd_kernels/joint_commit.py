"""`joint_commit`: the step after a forward pass of models that fill masks and edit tokens at once (LLaDA2.1).

Tokens of the open block stay in a pool in which each may be edited until the block is over. With verification (ASRD on
these models) what was filled or edited boldly awaits a check first; what passes it is fixed, what fails returns to the
pool and keeps its token. Rows never influence each other; a done row does not change. PyTorch only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asrd_kernels.commit import extend_histories, finish_step, most_confident, promote
from asrd_kernels.state import NO_ENTROPY, DecodeState, Rows, VocabStats


@dataclass
class Pool(Rows):
    """What joint decoding keeps. `state.pending` holds the pool and what awaits a check: all that may still change."""

    pool: Tensor  # [B, G] bool, tokens of the open block that may be edited
    checked: Tensor  # [B, G] bool, tokens that the coming pass verifies
    post: Tensor  # [B] int64, passes over the open block that began without masks


def joint_commit_torch(state: DecodeState, stats: VocabStats, joint: Pool, anchored: bool) -> None:
    """Apply the statistics [B, G] of masks, pool and checked tokens to state and joint, in place.

    anchored: histories are kept and anchors formed; and with rules.verify what is not one of them is checked.
    """
    rules, x, masks, pool = state.rules, state.generated, state.guided.clone(), joint.pool
    top1, confidence, entropy = stats.top1, stats.confidence, stats.entropy
    began_without_masks = ~masks.any(1)
    state.step.add_(~state.done)
    joint.post.add_(began_without_masks & ~state.done)
    # verify, fill, edit
    failed = joint.checked & (top1 != x)
    confident = masks & (confidence > rules.threshold)
    quota = torch.full_like(state.step, rules.num_to_transfer)
    drafted = confident | most_confident(masks, confidence, quota)
    edited = pool & (confidence > rules.editing_threshold) & (top1 != x)
    x.copy_(torch.where(drafted | edited, top1, x))
    state.drafted.add_(drafted.sum(1))
    state.edited.add_(edited.sum(1))
    # anchors; what was bold and is none of them is checked, and what passes its check is fixed
    bold = confident | edited
    if anchored:
        extend_histories(state, top1, masks | pool)
        anchors = promote(state, bold, entropy)
    if anchored and rules.verify:
        checked, pool = bold & ~anchors, (pool & ~edited) | failed | (drafted & ~confident)
    else:
        checked, pool = torch.zeros_like(pool), pool | drafted
    # a block without masks is over when nothing is left to check and to edit, or after max_post_steps passes
    quiet = began_without_masks & ~(edited | failed).any(1)
    settled = ~checked.any(1) & (~pool.any(1) | quiet)
    filled = ~(state.masks & state.in_active_block).any(1)
    over = filled & (settled | (joint.post >= rules.max_post_steps))
    checked, pool = checked & ~over[:, None], pool & ~over[:, None]
    joint.post.masked_fill_(over, 0)
    finish_step(state, checked | pool)
    live = ~state.done[:, None]
    state.entropy.copy_(torch.where(masks & live, entropy, NO_ENTROPY))
    joint.pool.copy_(pool & live)
    joint.checked.copy_(checked & live)
