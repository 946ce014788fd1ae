"""Which implementation of an operation runs: the reference in PyTorch, or the Triton kernel.

`resolve_impl` says what "auto" means on a device, `which` what runs for one operation: the reference also where a
kernel does not cover a case. Triton is imported when a kernel first runs, so that a machine without it can import this
package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from asrd_kernels.anchor_embed import anchor_embed_torch
from asrd_kernels.commit import commit_torch
from asrd_kernels.draft_commit import Witnesses, draft_commit_torch
from asrd_kernels.leave_one_out import leave_one_out_attention_torch
from asrd_kernels.state import DecodeState, Rules, VocabStats
from asrd_kernels.vocab_stats import vocab_stats_torch

Impl = Literal["torch", "triton"]
KERNELS = ("anchor_embed", "vocab_stats", "commit", "draft_commit", "leave_one_out_attention")


def resolve_impl(impl: str, device: torch.device) -> Impl:
    """The implementation that `impl` stands for on tensors of `device`; "auto" is Triton on CUDA and ROCm if there."""
    if impl == "torch":
        return "torch"
    on_gpu = device.type == "cuda"  # PyTorch calls ROCm devices cuda, too
    if impl == "auto":
        return "triton" if on_gpu and triton_is_installed() else "torch"
    if impl != "triton":
        raise ValueError(f"impl={impl!r} is not one of 'auto', 'torch', 'triton'")
    if not triton_is_installed():
        raise ValueError("impl='triton': Triton is not installed; install it (pip install triton) or use impl='auto'")
    if not (on_gpu or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")):
        raise ValueError(
            f"impl='triton' on device {str(device)!r}: Triton kernels need a CUDA or ROCm GPU; use impl='auto', or set"
            " TRITON_INTERPRET=1 before Python starts, to run them slowly on the CPU"
        )
    return "triton"


@cache
def triton_is_installed() -> bool:
    """Can Triton be imported? Looks only; imports nothing."""
    return find_spec("triton") is not None


def which(
    operation: str,
    impl: str,
    device: torch.device,
    rules: Rules | None = None,
    dtype: torch.dtype | None = None,
    quota: bool = False,
) -> Impl:
    """The implementation that runs for an operation: rules and dtype are those that it is called with, and with a quota
    or without."""
    if operation not in KERNELS or resolve_impl(impl, device) == "torch":
        return "torch"
    if operation == "leave_one_out_attention":
        return "torch" if dtype == torch.float64 else "triton"
    if rules is None:
        return "triton"
    if operation == "vocab_stats":
        return "torch" if rules.filters else "triton"  # top-k, top-p and min-p
    if rules.given or rules.one_block or quota:
        return "torch"  # the kernels know no given tokens and no quota, and their blocks begin at position 0
    if operation == "anchor_embed" and rules.probe == "gaussian":
        return "torch"  # a control of the paper's; its sine and cosine would spill to local memory
    return "triton"


_ran: ContextVar[dict[str, Impl] | None] = ContextVar("ran", default=None)


@contextmanager
def noting() -> Iterator[dict[str, Impl]]:
    """Gives a dictionary of the operations that run within it, each with its implementation."""
    token = _ran.set({})
    try:
        yield _ran.get()  # type: ignore[misc]
    finally:
        _ran.reset(token)


def _choose(operation: str, *case: Any, **more: Any) -> Impl:
    """`which`, recording the answer."""
    chosen = which(operation, *case, **more)
    if not torch.compiler.is_compiling() and (ran := _ran.get()) is not None:
        ran[operation] = chosen
    return chosen


def anchor_embed(state: DecodeState, table: Tensor, pending: Tensor | None = None, impl: str = "auto") -> Tensor:
    """See `anchor_embed_torch`."""
    if _choose("anchor_embed", impl, table.device, state.rules) == "torch":
        return anchor_embed_torch(state, table, pending)
    from asrd_kernels.anchor_embed_triton import anchor_embed_triton

    return anchor_embed_triton(state, table, pending)


def vocab_stats(logits: Tensor, row: Tensor, position: Tensor, state: DecodeState, impl: str = "auto") -> VocabStats:
    """See `vocab_stats_torch`."""
    if _choose("vocab_stats", impl, logits.device, state.rules) == "torch":
        return vocab_stats_torch(logits, row, position, state)
    from asrd_kernels.vocab_stats_triton import vocab_stats_triton

    return vocab_stats_triton(logits, row, position, state)


def leave_one_out_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    excluded: Tensor,
    visible: Tensor,
    scale: float,
    impl: str = "auto",
    seen: Tensor | None = None,
) -> Tensor:
    """See `leave_one_out_attention_torch`."""
    if _choose("leave_one_out_attention", impl, query.device, dtype=query.dtype) == "torch":
        return leave_one_out_attention_torch(query, key, value, excluded, visible, scale, seen)
    from asrd_kernels.leave_one_out_triton import leave_one_out_attention_triton

    return leave_one_out_attention_triton(query, key, value, excluded, visible, scale)


def commit(state: DecodeState, stats: VocabStats, quota: Tensor | None = None, impl: str = "auto") -> None:
    """See `commit_torch`."""
    if _choose("commit", impl, state.tokens.device, state.rules, quota=quota is not None) == "torch":
        commit_torch(state, stats, quota)
        return
    from asrd_kernels.commit_triton import commit_triton

    commit_triton(state, stats)


def draft_commit(
    state: DecodeState,
    stats: VocabStats,
    bounds: Tensor | None = None,
    witnesses: Witnesses | None = None,
    impl: str = "auto",
) -> None:
    """See `draft_commit_torch`."""
    if _choose("draft_commit", impl, state.tokens.device, state.rules) == "torch":
        draft_commit_torch(state, stats, bounds, witnesses)
        return
    from asrd_kernels.draft_commit_triton import draft_commit_triton

    draft_commit_triton(state, stats, bounds, witnesses)
