"""`fused_head` in two launches: tiles of rows and tokens, then the merge of `vocab_stats`.

A program multiplies a tile of rows, which it picks out of the model's output itself, by the weights of a tile of
tokens, accumulating in float32, and reduces its tile of logits to the six numbers that a chunk of vocab_stats_triton.py
has; the same merge follows. Interpreted, bfloat16 is widened before the product, which Triton's interpreter gets wrong;
the products are exact in float32 either way.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from asrd_kernels.compiler_triton import on_rocm
from asrd_kernels.fused_head import check_head
from asrd_kernels.head_cost import COLUMN_TILE, row_tile
from asrd_kernels.philox_triton import exponential
from asrd_kernels.state import VocabStats
from asrd_kernels.vocab_stats import Readout
from asrd_kernels.vocab_stats_triton import _FIELDS, holds_any, merge_kernel, race, race_scales, tally


@dataclass(frozen=True)
class HeadLaunch:
    """Programs of `rows` by COLUMN_TILE logits, made `depth` dimensions at a time, `stages` - 1 of them under way; then
    a merge of `chunks` in `merge` lanes."""

    rows: int
    depth: int
    stages: int
    warps: int
    chunks: int
    merge: int
    merge_warps: int


def head_launch(rows: int, vocab: int, itemsize: int) -> HeadLaunch:
    """128 bytes of a row at a time, a cache line; more float32 rows than 32 do not fit in sm_80's registers.

    Three of the choices are there because a float32 kernel spills otherwise: 64 bytes for 16 rows (sampled, sm_100),
    two stages for 32 (not sampled, sm_80), and 256 threads also where a warp has 64 (sampled, gfx942)."""
    tile, chunks = row_tile(rows, itemsize), triton.cdiv(vocab, COLUMN_TILE)
    merge = max(16, triton.next_power_of_2(chunks))
    warps = 8 if tile * itemsize >= 128 and not (itemsize == 4 and on_rocm()) else 4
    depth = 16 if (tile, itemsize) == (16, 4) else 128 // itemsize
    stages = 2 if (tile, itemsize) == (32, 4) else 3
    return HeadLaunch(tile, depth, stages, warps, chunks, merge, merge_warps=4 if merge > 256 else 1)


@triton.jit
def _row_draws(b_seed, b_row, b_position, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] exponential draws of tokens first, first + 1, ...; the bits of philox_triton.random_bits."""
    o_quad = (first // 4 + tl.arange(0, COLUMNS // 4)).to(tl.uint32)
    b_zero = tl.zeros([ROWS, COLUMNS // 4], tl.uint32)
    b_quad = b_zero + o_quad[None, :]
    b_position = b_zero + b_position.to(tl.uint32)[:, None]
    b_row = b_zero + b_row.to(tl.uint32)[:, None]
    a, b, c, d = tl.philox(b_seed[:, None], b_quad, b_position, b_row, b_zero)
    return exponential(tl.interleave(tl.interleave(a, c), tl.interleave(b, d)), tl.float32)


@triton.jit(do_not_specialize=["num_forbidden", "length", "rows"])
def head_kernel(
    hidden, weight, source, row, position, row_ids, seeds, forbidden, numbers, picks,
    num_forbidden, noise_scale: tl.float64, logit_scale: tl.float64, rate: tl.float64,
    rows, vocab, dim, length, stride_n, stride_v,
    SAMPLE: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """numbers [N, _FIELDS, MERGE] and picks [N, MERGE] of a tile of rows and a chunk of COLUMNS tokens."""
    tile, chunk = tl.program_id(0), tl.program_id(1)
    o_n = tile * ROWS + tl.arange(0, ROWS)
    m_n = o_n < rows
    b_here = tl.load(position + o_n, mask=m_n, other=length)
    m_n = m_n & (b_here != length)
    if tl.max(m_n.to(tl.int32), axis=0) == 0:
        return
    first = chunk * COLUMNS
    o_lane = tl.arange(0, COLUMNS)
    o_v = first + o_lane
    m_v = o_v < vocab
    p_hidden = hidden + tl.load(source + o_n, mask=m_n, other=0)[:, None] * stride_n
    p_weight = weight + o_v.to(tl.int64)[None, :] * stride_v
    b_x = tl.zeros([ROWS, COLUMNS], tl.float32)
    for depth in range(0, dim, DEPTH):
        o_d = depth + tl.arange(0, DEPTH)
        m_d = o_d < dim
        b_hidden = tl.load(p_hidden + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
        b_weight = tl.load(p_weight + o_d[:, None], mask=m_v[None, :] & m_d[:, None], other=0.0)
        if WIDEN:
            b_hidden, b_weight = b_hidden.to(tl.float32), b_weight.to(tl.float32)
        b_x = tl.dot(b_hidden, b_weight, b_x, input_precision="ieee")
    b_x = tl.where(m_v[None, :], b_x, -float("inf"))
    if holds_any(forbidden, num_forbidden, first, COLUMNS):
        for i in range(num_forbidden):
            b_is = o_lane == (tl.load(forbidden + i) - first).to(tl.int32)
            b_x = tl.where(b_is[None, :], -float("inf"), b_x)

    b_peak, b_pick, b_d, b_rest, b_slope = tally(b_x, o_lane[None, :], 1, COLUMNS)
    p_number = numbers + o_n.to(tl.int64) * (_FIELDS * MERGE) + chunk
    tl.store(p_number, b_peak, mask=m_n)
    tl.store(p_number + MERGE, b_rest, mask=m_n)
    tl.store(p_number + 2 * MERGE, b_slope, mask=m_n)
    if SAMPLE:
        b_row = tl.load(row + o_n, mask=m_n, other=0)
        b_draw = _row_draws(tl.load(seeds + b_row), tl.load(row_ids + b_row), b_here, first, ROWS, COLUMNS)
        b_score, b_pick = race(b_draw, b_d, o_lane[None, :], b_peak, noise_scale, logit_scale, rate, 1, COLUMNS)
        b_picked = tl.sum(tl.where(o_lane[None, :] == b_pick[:, None], b_x, 0.0), axis=1)
        tl.store(p_number + 3 * MERGE, b_score, mask=m_n)
        tl.store(p_number + 4 * MERGE, b_picked, mask=m_n)
    tl.store(picks + o_n.to(tl.int64) * MERGE + chunk, first + b_pick, mask=m_n)


@triton_op("asrd::fused_head", mutates_args=("top1", "confidence", "entropy", "bad"))
def _launch(
    hidden: Tensor, weight: Tensor, source: Tensor, row: Tensor, position: Tensor, row_ids: Tensor, seeds: Tensor,
    forbidden: Tensor, unconfident: Tensor | None, temperature: float,
    top1: Tensor, confidence: Tensor, entropy: Tensor, bad: Tensor,
) -> None:  # fmt: skip
    rows, (vocab, dim), sample, length = source.shape[0], weight.shape, temperature > 0, top1.shape[1] - 1
    how = head_launch(rows, vocab, weight.element_size())
    numbers = torch.empty(rows, _FIELDS.value, how.merge, dtype=torch.float32, device=hidden.device)
    picks = torch.empty(rows, how.merge, dtype=torch.int32, device=hidden.device)
    wrap_triton(head_kernel)[(triton.cdiv(rows, how.rows), how.chunks)](
        hidden, weight, source, row, position, row_ids, seeds, forbidden, numbers, picks,
        forbidden.shape[0], *race_scales(temperature),
        rows, vocab, dim, length, hidden.stride(0), weight.stride(0),
        SAMPLE=sample, WIDEN=triton.knobs.runtime.interpret and weight.dtype == torch.bfloat16,
        ROWS=how.rows, COLUMNS=COLUMN_TILE, DEPTH=how.depth, MERGE=how.merge,
        num_warps=how.warps, num_stages=how.stages, enable_fp_fusion=False,
    )  # fmt: skip
    unsure = forbidden if unconfident is None else unconfident
    wrap_triton(merge_kernel)[(rows,)](
        numbers, picks, row, position, unsure, top1, confidence, entropy, bad,
        0 if unconfident is None else unsure.shape[0], how.chunks, length, top1.stride(0),
        SAMPLE=sample, MERGE=how.merge, num_warps=how.merge_warps, enable_fp_fusion=False,
    )  # fmt: skip


def fused_head_triton(
    hidden: Tensor, weight: Tensor, source: Tensor, row: Tensor, position: Tensor, readout: Readout, out: VocabStats
) -> None:
    """As `fused_head_torch`; the numbers of a hidden state, and of a weight's row, lie next to each other."""
    check_head(hidden, weight)
    if hidden.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("the numbers of a hidden state, and of a weight's row, must lie next to each other")
    if source.shape[0] > 0:
        _launch(
            hidden, weight, source.contiguous(), row.contiguous(), position.contiguous(), readout.row_ids,
            readout.seeds, readout.forbidden, readout.unconfident, readout.temperature, *out,
        )  # fmt: skip
