"""What else computes top-1, confidence and entropy of rows of logits, to be counted beside `vocab_stats`.

The chain is Triton as one writes it at first: softmax, argmax and entropy, a kernel each, one program a row that walks
over the columns; probabilities are in memory in the dtype of the logits, as those of F.softmax are. `plain_torch` is
the same in PyTorch, for torch.compile. The byte formulas are those of published kernels, which compute less: none of
them gives top-1 and entropy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_LIGER_BLOCK = 65536


@triton.jit
def softmax_kernel(logits, probs, vocab, stride, BLOCK: tl.constexpr):
    """Probabilities of one row: a pass for maximum and sum, a second one to write."""
    row = tl.program_id(0).to(tl.int64)
    peak = -float("inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_x = tl.load(logits + row * stride + o_v, mask=o_v < vocab, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(b_x, axis=0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(b_x - higher), axis=0)
        peak = higher
    for start in range(0, vocab, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_x = tl.load(logits + row * stride + o_v, mask=o_v < vocab, other=-float("inf")).to(tl.float32)
        b_p = tl.exp(b_x - peak) / total
        tl.store(probs + row * stride + o_v, b_p.to(probs.dtype.element_ty), mask=o_v < vocab)


@triton.jit
def argmax_kernel(probs, top1, confidence, vocab, stride, BLOCK: tl.constexpr):
    """The most probable token of one row, and its probability."""
    row = tl.program_id(0).to(tl.int64)
    best = -1.0
    token = 0
    for start in range(0, vocab, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_p = tl.load(probs + row * stride + o_v, mask=o_v < vocab, other=-1.0).to(tl.float32)
        found, where = tl.max(b_p, axis=0, return_indices=True)
        token = tl.where(found > best, start + where, token)
        best = tl.maximum(found, best)
    tl.store(top1 + row, token)
    tl.store(confidence + row, best)


@triton.jit
def entropy_kernel(probs, entropy, vocab, stride, BLOCK: tl.constexpr):
    """The entropy of one row, in nats."""
    row = tl.program_id(0).to(tl.int64)
    total = 0.0
    for start in range(0, vocab, BLOCK):
        o_v = start + tl.arange(0, BLOCK)
        b_p = tl.load(probs + row * stride + o_v, mask=o_v < vocab, other=0.0).to(tl.float32)
        total -= tl.sum(tl.where(b_p > 0, b_p * tl.log(tl.maximum(b_p, 1e-30)), 0.0), axis=0)
    tl.store(entropy + row, total)


def triton_chain(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Top-1 [N] int64, confidence and entropy [N] float32 of logits [N, V], in three launches."""
    rows, vocab = logits.shape
    probs = torch.empty_like(logits)
    top1 = torch.empty(rows, dtype=torch.int64, device=logits.device)
    confidence, entropy = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    block = min(_BLOCK, triton.next_power_of_2(vocab))
    how = {"BLOCK": block, "num_warps": 8 if block >= 2048 else 4}
    softmax_kernel[(rows,)](logits, probs, vocab, logits.stride(0), **how)
    argmax_kernel[(rows,)](probs, top1, confidence, vocab, probs.stride(0), **how)
    entropy_kernel[(rows,)](probs, entropy, vocab, probs.stride(0), **how)
    return top1, confidence, entropy


def plain_torch(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same as one writes it in PyTorch, probabilities in float32."""
    probs = torch.softmax(logits.float(), dim=1)
    confidence, top1 = probs.max(dim=1)
    return top1, confidence, -(probs * probs.clamp(min=1e-30).log()).sum(dim=1)


def _liger_softmax(rows: int, vocab: int, itemsize: int) -> int:
    """linkedin/Liger-Kernel, src/liger_kernel/ops/softmax.py: a row of at most 65,536 columns is loaded once and
    written once; wider ones are loaded twice (maximum and sum, then the result) and written once."""
    passes = 2 if vocab <= _LIGER_BLOCK else 3
    return passes * rows * vocab * itemsize


def _quack_softmax(rows: int, vocab: int, itemsize: int) -> int:
    """Dao-AILab/quack, benchmarks/benchmark_softmax.py: GB/s of 2 M N elements, read once and written once."""
    return 2 * rows * vocab * itemsize


def _quack_cross_entropy(rows: int, vocab: int, itemsize: int) -> int:
    """Dao-AILab/quack, benchmarks/benchmark_cross_entropy.py: x read (M N), target read (M), loss written (M), all
    counted with the item size of x."""
    return (rows * vocab + rows + rows) * itemsize


FORMULAS: dict[str, Callable[[int, int, int], int]] = {
    "Liger softmax (formula)": _liger_softmax,
    "quack softmax (formula)": _quack_softmax,
    "quack cross entropy (formula)": _quack_cross_entropy,
}
