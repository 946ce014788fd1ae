"""Row gather, LM head and `vocab_stats` as one operation: hidden states and weight in, statistics out.

The logits are not rounded to the model's dtype on the way, as a GEMM's output is: in half precision the statistics are
closer to the truth than those of head and `vocab_stats`, and may differ from them. When it is worth it: head_cost.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd_kernels.state import VocabStats
from asrd_kernels.vocab_stats import Readout, vocab_stats_torch

HEAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_head(hidden: Tensor, weight: Tensor) -> None:
    """Raise ValueError unless both are of one dtype that the operation takes."""
    if hidden.dtype != weight.dtype or weight.dtype not in HEAD_DTYPES:
        raise ValueError(
            f"hidden states of {hidden.dtype} and a weight of {weight.dtype}: need one of {HEAD_DTYPES} in both"
        )


def fused_head_torch(
    hidden: Tensor, weight: Tensor, source: Tensor, row: Tensor, position: Tensor, readout: Readout, out: VocabStats
) -> None:
    """The statistics of the logits hidden [source] @ weight [V, D]^T, formed in float32, as `vocab_stats` writes them.

    hidden [M, D] is the model's output, source [N] int64 which of its rows has a position's logits; of a slot that is
    not used it may be any. row and position [N] are those of `vocab_stats`.

    The twin has them in memory all the same: it shows what the kernel decides, and saves nothing.
    """
    check_head(hidden, weight)
    vocab_stats_torch(hidden.index_select(0, source).float() @ weight.float().T, row, position, readout, out)
