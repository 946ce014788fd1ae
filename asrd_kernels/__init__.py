"""The operations of a decoding step, on tensors only: Algorithm 1 but for its loop (lines 2, 16 and 17, `decode` in
asrd/engine/batch.py) and its forward pass (line 9, `step` in asrd/engine/loop.py).

state         DecodeState, Rules, VocabStats, Slots: what the operations share
anchor_embed  token ids, roles and anchors -> input embeddings
vocab_stats   logits -> top-1, confidence, entropy
extra_stats   logits -> what only some decoders ask for
leave_one_out attention of a few rows behind the canvas, each without a few keys
sampling      which tokens may be sampled: top-k, top-p, min-p
commit        statistics -> the next state, in place
draft_commit  the same for decoders that only draft (threshold, factor) or edit in place (loo)
joint_commit  the same for models that fill masks and edit tokens at once (LLaDA2.1)
philox        counter-based noise
compiler      what a Triton launch asks of the compiler; precise: exact division, ln(1 + x)
dispatch      the operations, and which implementation of each runs; *_triton are the kernels
"""

from asrd_kernels.anchor_embed import anchor_embed_torch
from asrd_kernels.commit import (
    apply_step,
    commit_torch,
    finish_step,
    most_confident,
    ranks,
    write_report,
)
from asrd_kernels.dispatch import Impl, resolve_impl
from asrd_kernels.draft_commit import (
    Witnesses,
    active_slots,
    draft_commit_torch,
    factor_bounds,
    fill_active_slots,
    new_active_slots,
)
from asrd_kernels.extra_stats import extra_stats_torch
from asrd_kernels.joint_commit import Joint, joint_commit_torch, new_joint
from asrd_kernels.leave_one_out import leave_one_out_attention_torch, leave_one_out_mask
from asrd_kernels.state import (
    NO_ENTROPY,
    DecodeState,
    Rules,
    Slots,
    VocabStats,
    fill_slots,
    new_slots,
    new_state,
    new_stats,
    text_ends,
    wanted,
    wanted_slots,
)
from asrd_kernels.vocab_stats import Readout, vocab_stats_torch

__all__ = [
    "NO_ENTROPY",
    "DecodeState",
    "Impl",
    "Joint",
    "Readout",
    "Rules",
    "Slots",
    "VocabStats",
    "Witnesses",
    "active_slots",
    "anchor_embed_torch",
    "apply_step",
    "commit_torch",
    "draft_commit_torch",
    "extra_stats_torch",
    "factor_bounds",
    "fill_active_slots",
    "fill_slots",
    "finish_step",
    "joint_commit_torch",
    "leave_one_out_attention_torch",
    "leave_one_out_mask",
    "most_confident",
    "new_active_slots",
    "new_joint",
    "new_slots",
    "new_state",
    "new_stats",
    "ranks",
    "resolve_impl",
    "text_ends",
    "vocab_stats_torch",
    "wanted",
    "wanted_slots",
    "write_report",
]
