"""Which implementation of an operation runs: the PyTorch twin, anywhere, or the Triton kernel, on a GPU.

Each operation takes its twin's arguments and `impl`; all implementations decide the same. "numpy" is the twin on arrays
that share the tensors' memory, for a host that may look at them at any time. Knows devices and what is installed, not
what the operations compute. Triton is imported when a kernel is first wanted, so that a machine without it can import
this package.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from asrd_kernels.anchor_embed import anchor_embed_torch
from asrd_kernels.arrays import host_view
from asrd_kernels.commit import apply_step as apply_step_torch
from asrd_kernels.commit import commit_torch
from asrd_kernels.commit import write_report as write_report_torch
from asrd_kernels.draft_commit import Witnesses, draft_commit_torch
from asrd_kernels.leave_one_out import leave_one_out_attention_torch
from asrd_kernels.state import DecodeState, Rules, Slots, VocabStats
from asrd_kernels.vocab_stats import Readout, vocab_stats_torch

Impl = Literal["torch", "numpy", "triton"]


def resolve_impl(impl: str, device: torch.device) -> Impl:
    """The implementation that `impl` stands for on tensors of `device`; "auto" is Triton on CUDA and ROCm if there."""
    if impl == "torch" or (impl == "numpy" and device.type == "cpu"):
        return impl  # type: ignore[return-value]
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


def anchor_embed(
    state: DecodeState, table: Tensor, rules: Rules, row_ids: Tensor, seeds: Tensor, impl: str = "auto"
) -> Tensor:
    """See `anchor_embed_torch`."""
    if impl == "numpy":
        return anchor_embed_torch(state, table, rules, row_ids, seeds, state.arrays)
    if resolve_impl(impl, table.device) == "torch":
        return anchor_embed_torch(state, table, rules, row_ids, seeds)
    from asrd_kernels.anchor_embed_triton import anchor_embed_triton

    return anchor_embed_triton(state, table, rules, row_ids, seeds)


def vocab_stats(
    logits: Tensor, row: Tensor, position: Tensor, readout: Readout, out: VocabStats, impl: str = "auto"
) -> None:
    """See `vocab_stats_torch`; with top-k, top-p or min-p that is what runs."""
    if impl == "numpy":
        vocab_stats_torch(logits, row, position, readout, out.arrays)
        return
    if resolve_impl(impl, logits.device) == "torch" or readout.filters:
        vocab_stats_torch(logits, row, position, readout, out)
        return
    from asrd_kernels.vocab_stats_triton import vocab_stats_triton

    vocab_stats_triton(logits, row, position, readout, out)


def by_twin(impl: str, query: Tensor) -> bool:
    """Does the PyTorch twin of `leave_one_out_attention` run for such queries?"""
    return resolve_impl(impl, query.device) == "torch" or query.dtype == torch.float64


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
    """See `leave_one_out_attention_torch`; in float64 that is what runs."""
    if by_twin(impl, query):
        return leave_one_out_attention_torch(query, key, value, excluded, visible, scale, seen)
    from asrd_kernels.leave_one_out_triton import leave_one_out_attention_triton

    return leave_one_out_attention_triton(query, key, value, excluded, visible, scale)


def commit(state: DecodeState, stats: VocabStats, rules: Rules, slots: Slots | None = None, impl: str = "auto") -> None:
    """See `commit_torch`."""
    if impl == "numpy":
        commit_torch(state.arrays, stats.arrays, rules)
        return
    if resolve_impl(impl, state.tokens.device) == "torch":
        commit_torch(state, stats, rules, slots)
        return
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
    """See `draft_commit_torch`."""
    if impl == "numpy":
        by_host = (host_view(value) for value in (bounds, witnesses, token_prob))
        draft_commit_torch(state.arrays, stats.arrays, rules, *by_host)
        return
    if resolve_impl(impl, state.tokens.device) == "torch":
        draft_commit_torch(state, stats, rules, bounds, witnesses, token_prob, slots)
        return
    from asrd_kernels.draft_commit_triton import draft_commit_triton

    draft_commit_triton(state, stats, rules, bounds, witnesses, token_prob, slots)


def apply_step(
    state: DecodeState,
    rules: Rules,
    top1: Tensor,
    drafted: Tensor,
    revoked: Tensor | None = None,
    provisional: Tensor | None = None,
    edited: Tensor | None = None,
    impl: str = "torch",
) -> None:
    """See `asrd_kernels.apply_step`; there is no kernel of it."""
    given = (top1, drafted, revoked, provisional, edited)
    if impl == "numpy":
        apply_step_torch(state.arrays, rules, *map(host_view, given))
    else:
        apply_step_torch(state, rules, *given)


def write_report(state: DecodeState, stats: VocabStats, impl: str = "torch") -> None:
    """See `asrd_kernels.write_report`; there is no kernel of it alone."""
    if impl == "numpy":
        write_report_torch(state.arrays, stats.arrays)
    else:
        write_report_torch(state, stats)
