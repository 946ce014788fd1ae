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
from asrd_kernels.commit import commit_torch, write_report
from asrd_kernels.draft_commit import Witnesses, draft_commit_torch, fill_active_slots
from asrd_kernels.leave_one_out import leave_one_out_attention_torch
from asrd_kernels.state import DecodeState, Rules, Slots, VocabStats, fill_slots
from asrd_kernels.vocab_stats import Readout, vocab_stats_torch

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
    readout: Readout | None = None,
    dtype: torch.dtype | None = None,
) -> Impl:
    """The implementation that runs for an operation; rules, readout and dtype are those that it is called with."""
    if operation not in KERNELS or resolve_impl(impl, device) == "torch":
        return "torch"
    if rules is not None and (rules.given or rules.one_block):
        return "torch"  # the kernels know no given tokens, and their blocks begin at position 0
    if operation == "anchor_embed" and rules is not None and rules.probe == "gaussian":
        return "torch"  # a control of the paper's; its sine and cosine would spill to local memory
    if readout is not None and readout.filters:
        return "torch"  # top-k, top-p and min-p
    if operation == "leave_one_out_attention" and dtype == torch.float64:
        return "torch"
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


def anchor_embed(
    state: DecodeState, table: Tensor, rules: Rules, row_ids: Tensor, seeds: Tensor, impl: str = "auto"
) -> Tensor:
    """See `anchor_embed_torch`."""
    if _choose("anchor_embed", impl, table.device, rules) == "torch":
        return anchor_embed_torch(state, table, rules, row_ids, seeds)
    from asrd_kernels.anchor_embed_triton import anchor_embed_triton

    return anchor_embed_triton(state, table, rules, row_ids, seeds)


def vocab_stats(
    logits: Tensor, row: Tensor, position: Tensor, readout: Readout, out: VocabStats, impl: str = "auto"
) -> None:
    """See `vocab_stats_torch`."""
    if _choose("vocab_stats", impl, logits.device, readout=readout) == "torch":
        vocab_stats_torch(logits, row, position, readout, out)
        return
    from asrd_kernels.vocab_stats_triton import vocab_stats_triton

    vocab_stats_triton(logits, row, position, readout, out)


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


def commit(
    state: DecodeState,
    stats: VocabStats,
    rules: Rules,
    slots: Slots | None = None,
    impl: str = "auto",
    quota: Tensor | None = None,
) -> None:
    """See `commit_torch`; then what the host is to learn, and the slots of the coming step if given."""
    if _choose("commit", impl, state.tokens.device, rules) == "torch":
        commit_torch(state, stats, rules, quota)
        write_report(state, stats)
        if slots is not None:
            fill_slots(slots, state, rules)
        return
    if quota is not None:
        raise ValueError("quota: the commit kernel has none; use impl='torch'")
    from asrd_kernels.commit_triton import commit_triton

    commit_triton(state, stats, rules, slots)


def draft_commit(
    state: DecodeState,
    stats: VocabStats,
    rules: Rules,
    bounds: Tensor | None = None,
    witnesses: Witnesses | None = None,
    token_prob: Tensor | None = None,
    slots: Slots | None = None,
    impl: str = "auto",
) -> None:
    """See `draft_commit_torch`; then what the host is to learn, and the slots of the coming step if given."""
    if _choose("draft_commit", impl, state.tokens.device, rules) == "torch":
        draft_commit_torch(state, stats, rules, bounds, witnesses, token_prob)
        write_report(state, stats)
        if slots is not None:
            fill_active_slots(slots, state, rules, witnesses)
        return
    from asrd_kernels.draft_commit_triton import draft_commit_triton

    draft_commit_triton(state, stats, rules, bounds, witnesses, token_prob, slots)
