"""The operations of a decoding step, on tensors only: Algorithm 1 but for its loop (lines 2, 16 and 17: `decode` in
asrd/generate.py; one iteration is `step` in asrd/engine/step.py) and its forward pass (line 9: `CanvasCache.forward` in
asrd/engine/caches/canvas.py).

state         `DecodeState`, `Rules`, `VocabStats`: what the operations share
anchor_embed  token ids, roles and anchors -> input embeddings
vocab_stats   logits -> top-1, confidence, entropy
extra_stats   logits -> what only some decoders ask for
leave_one_out attention of a few rows appended to the canvas, each without a few keys
sampling      which tokens may be sampled: top-k, top-p, min-p
commit        statistics -> the next state, in place
draft_commit  the same for decoders that only draft (threshold, factor) or edit in place (loo)
joint_commit  the same for models that fill masks and edit tokens at once (LLaDA2.1)
philox        counter-based noise
compiler      what a Triton launch asks of the compiler; precise: exact division, ln(1 + x)
dispatch      the operations, and which implementation of each runs; *_triton are the kernels
"""

from asrd_kernels.anchor_embed import anchor_embed_torch
from asrd_kernels.commit import close, commit_torch, finish_step, most_confident, ranks, write
from asrd_kernels.dispatch import Impl, resolve_impl
from asrd_kernels.draft_commit import Witnesses, draft_commit_torch, factor_bounds
from asrd_kernels.extra_stats import extra_stats_torch
from asrd_kernels.joint_commit import Pool, joint_commit_torch
from asrd_kernels.leave_one_out import leave_one_out_attention_torch, leave_one_out_mask
from asrd_kernels.state import (
    COUNTERS,
    NO_ENTROPY,
    DecodeState,
    Rows,
    Rules,
    VocabStats,
    id_tensor,
    new_state,
    text_ends,
)
from asrd_kernels.vocab_stats import vocab_stats_torch

__all__ = [
    "COUNTERS",
    "NO_ENTROPY",
    "DecodeState",
    "Impl",
    "Pool",
    "Rows",
    "Rules",
    "VocabStats",
    "Witnesses",
    "anchor_embed_torch",
    "close",
    "commit_torch",
    "draft_commit_torch",
    "extra_stats_torch",
    "factor_bounds",
    "finish_step",
    "id_tensor",
    "joint_commit_torch",
    "leave_one_out_attention_torch",
    "leave_one_out_mask",
    "most_confident",
    "new_state",
    "ranks",
    "resolve_impl",
    "text_ends",
    "vocab_stats_torch",
    "write",
]
