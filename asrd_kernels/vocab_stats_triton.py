"""`vocab_stats` in two launches: the vocabulary in chunks, then a merge of the chunks in a fixed order.

Few rows of a large vocabulary would leave most of a GPU idle, so each program reads one chunk of one row, at once and
once, and writes six numbers. How a row is cut depends on V alone, so its result does not depend on the batch.

A chunk has its maximum m and, over its other tokens, r = sum of e^z and u = sum of z e^z with z = x - m. Seen from the
row's maximum M, with d = m - M and t = e^d, its tokens sum to (r + 1) t and (u + d (r + 1)) t: the chunk's own peak
joins them as t and d t, except in the chunk that holds the row's peak, which stays left out (there t = 1 and d = 0).
Entropy and confidence follow from the totals as in vocab_stats.py.

-inf minus -inf counts as 0 and differences end at _FAR, so a chunk of nothing but -inf weighs 0 times a finite number.
NaN is read as +inf: either makes the row bad. Unwanted rows (position G) are neither read nor written.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from asrd_kernels.philox_triton import gumbel, random_bits
from asrd_kernels.precise_triton import divide, log1p
from asrd_kernels.state import VocabStats
from asrd_kernels.vocab_stats import Readout

_FAR = tl.constexpr(-1e4)  # exp of it is 0 in every dtype, and 0 times it is 0
_FIELDS = tl.constexpr(5)  # numbers of a chunk besides the id of its pick: m, r, u, the pick's score and its logit


@dataclass(frozen=True)
class StatsLaunch:
    """How V columns are cut: `chunks` programs of `chunk` columns a row, then one program of `merge` lanes a row."""

    chunk: int
    chunks: int
    warps: int
    merge: int


def stats_launch(vocab: int) -> StatsLaunch:
    """Chunks of 4096: 16 columns a thread, all loaded before the first is needed, and 31 programs a row of LLaDA's."""
    chunk, warps = (1024, 4) if vocab <= 1024 else (4096, 8)
    chunks = triton.cdiv(vocab, chunk)
    return StatsLaunch(chunk, chunks, warps, max(16, triton.next_power_of_2(chunks)))


@triton.jit
def below(x, peak):
    """x - peak <= 0, finite."""
    return tl.maximum(tl.where(x == peak, 0.0, x - peak), _FAR).to(x.dtype)


@triton.jit(do_not_specialize=["num_forbidden", "length"])
def chunk_kernel(
    logits, row, position, row_ids, seeds, forbidden, numbers, picks,
    num_forbidden, noise_scale: tl.float64, logit_scale: tl.float64,
    vocab, length, stride_n, stride_v,
    SAMPLE: tl.constexpr, CHUNK: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """numbers [N, _FIELDS, MERGE] and picks [N, MERGE] of one chunk of one row."""
    n, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    here = tl.load(position + n)
    if here == length:
        return
    first = chunk * CHUNK
    o_lane = tl.arange(0, CHUNK)
    o_v = first + o_lane
    dtype = numbers.dtype.element_ty
    p_x = logits + n * stride_n + o_v.to(tl.int64) * stride_v
    b_x = tl.load(p_x, mask=o_v < vocab, other=-float("inf")).to(dtype)
    b_x = tl.where(b_x == b_x, b_x, float("inf"))
    for i in range(num_forbidden):
        b_x = tl.where(o_v == tl.load(forbidden + i), -float("inf"), b_x)

    peak, summit = tl.max(b_x, axis=0, return_indices=True)
    b_z = below(b_x, peak)
    b_weight = tl.where(o_lane == summit, 0.0, tl.exp(b_z))
    p_number = numbers + n * (_FIELDS * MERGE) + chunk
    tl.store(p_number, peak)
    tl.store(p_number + MERGE, tl.sum(b_weight, axis=0))
    tl.store(p_number + 2 * MERGE, tl.sum(b_weight * b_z, axis=0))
    pick = summit
    if SAMPLE:
        b = tl.load(row + n)
        step = tl.full((), 0, tl.int32)
        bits = random_bits(tl.load(seeds + b), tl.load(row_ids + b), here, step, first, CHUNK)
        b_noise = gumbel(bits, dtype) * tl.full((), noise_scale, dtype)
        best, pick = tl.max(b_noise + b_x * tl.full((), logit_scale, dtype), axis=0, return_indices=True)
        tl.store(p_number + 3 * MERGE, best)
        tl.store(p_number + 4 * MERGE, tl.sum(tl.where(o_lane == pick, b_x, 0.0), axis=0))
    tl.store(picks + n * MERGE + chunk, first + pick)


@triton.jit(do_not_specialize=["num_unconfident", "length", "chunks"])
def merge_kernel(
    numbers, picks, row, position, unconfident, top1, confidence, entropy, bad,
    num_unconfident, chunks, length, stride_out,
    SAMPLE: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """The statistics of one row from those of its chunks, to (row, position) of the four outputs."""
    n = tl.program_id(0).to(tl.int64)
    here = tl.load(position + n)
    if here == length:
        return
    o_chunk = tl.arange(0, MERGE)
    m_chunk = o_chunk < chunks
    p_number = numbers + n * (_FIELDS * MERGE) + o_chunk
    b_peak = tl.load(p_number, mask=m_chunk, other=-float("inf"))
    b_rest = tl.load(p_number + MERGE, mask=m_chunk, other=0.0)
    b_slope = tl.load(p_number + 2 * MERGE, mask=m_chunk, other=0.0)

    peak, lead = tl.max(b_peak, axis=0, return_indices=True)
    b_d = below(b_peak, peak)
    b_t = tl.exp(b_d)
    rest = tl.sum(tl.where(o_chunk == lead, b_rest, b_rest + 1) * b_t, axis=0)
    slope = tl.sum((b_slope + b_d * (b_rest + 1)) * b_t, axis=0)
    trust = tl.full((), 1.0, rest.dtype)
    if SAMPLE:
        b_score = tl.load(p_number + 3 * MERGE, mask=m_chunk, other=-float("inf"))
        b_logit = tl.load(p_number + 4 * MERGE, mask=m_chunk, other=0.0)
        _, lead = tl.max(b_score, axis=0, return_indices=True)
        trust = tl.exp(below(tl.sum(tl.where(o_chunk == lead, b_logit, 0.0), axis=0), peak))
    pick = tl.load(picks + n * MERGE + lead).to(tl.int64)
    trust = divide(trust, 1 + rest)
    for i in range(num_unconfident):
        trust = tl.where(pick == tl.load(unconfident + i), 0.0, trust)
    nats = tl.maximum(log1p(rest) - divide(slope, 1 + rest), 0.0)

    unreadable = (peak == float("inf")) | (peak == -float("inf"))
    o_out = tl.load(row + n) * stride_out + here
    tl.store(top1 + o_out, tl.where(unreadable, 0, pick))
    tl.store(confidence + o_out, tl.where(unreadable, 0.0, trust))
    tl.store(entropy + o_out, tl.where(unreadable, 0.0, nats))
    tl.store(bad + o_out, unreadable)


@triton_op("asrd::vocab_stats", mutates_args=("top1", "confidence", "entropy", "bad"))
def _launch(
    logits: Tensor, row: Tensor, position: Tensor, row_ids: Tensor, seeds: Tensor, forbidden: Tensor,
    unconfident: Tensor | None, temperature: float, top1: Tensor, confidence: Tensor, entropy: Tensor, bad: Tensor,
) -> None:  # fmt: skip
    rows, vocab = logits.shape
    sample, length, how = temperature > 0, top1.shape[1] - 1, stats_launch(vocab)
    precision = torch.promote_types(logits.dtype, torch.float32)
    numbers = torch.empty(rows, _FIELDS.value, how.merge, dtype=precision, device=logits.device)
    picks = torch.empty(rows, how.merge, dtype=torch.int32, device=logits.device)
    hot = max(temperature, 1.0)  # neither factor overflows, however hot or cold
    wrap_triton(chunk_kernel)[(rows, how.chunks)](
        logits, row, position, row_ids, seeds, forbidden, numbers, picks,
        forbidden.shape[0], temperature / hot, 1 / hot, vocab, length, logits.stride(0), logits.stride(1),
        SAMPLE=sample, CHUNK=how.chunk, MERGE=how.merge, num_warps=how.warps, enable_fp_fusion=False,
    )  # fmt: skip
    unsure = forbidden if unconfident is None else unconfident
    wrap_triton(merge_kernel)[(rows,)](
        numbers, picks, row, position, unsure, top1, confidence, entropy, bad,
        0 if unconfident is None else unsure.shape[0], how.chunks, length, top1.stride(0),
        SAMPLE=sample, MERGE=how.merge, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def vocab_stats_triton(logits: Tensor, row: Tensor, position: Tensor, readout: Readout, out: VocabStats) -> None:
    """As `vocab_stats_torch`. Reads logits of any strides, and does not change them."""
    if len({values.stride() for values in out}) > 1 or out.top1.stride(1) != 1:
        strides = [values.stride() for values in out]
        raise ValueError(f"out has tensors of strides {strides}: they must be equal, with columns next to each other")
    if logits.shape[0] == 0:
        return
    _launch(
        logits, row.contiguous(), position.contiguous(), readout.row_ids, readout.seeds, readout.forbidden,
        readout.unconfident, readout.temperature, *out,
    )  # fmt: skip
