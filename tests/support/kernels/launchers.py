"""The Triton launcher of each operation, by name. Importing it imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asrd_kernels.anchor_embed_triton import anchor_embed_triton
from asrd_kernels.commit_triton import commit_triton
from asrd_kernels.draft_commit_triton import draft_commit_triton
from asrd_kernels.leave_one_out_triton import leave_one_out_attention_triton
from asrd_kernels.vocab_stats_triton import vocab_stats_triton

LAUNCHERS: dict[str, Callable[..., Any]] = {
    "anchor_embed": anchor_embed_triton,
    "vocab_stats": vocab_stats_triton,
    "commit": commit_triton,
    "draft_commit": draft_commit_triton,
    "leave_one_out_attention": leave_one_out_attention_triton,
}
