"""`vocab_stats` in two launches: the vocabulary in chunks, then a merge of the chunks in a fixed order.

Few rows of a large vocabulary would leave most of a GPU idle, so each program reads one chunk of one row in a
single pass and writes six numbers. How a row is cut depends on V alone, so its result does not depend on the batch.

A chunk has its maximum m and, over its other tokens, r = sum of e^z and u = sum of z e^z with z = x - m. Seen from the
row's maximum M, with d = m - M and t = e^d, its tokens sum to (r + 1) t and (u + d (r + 1)) t: the chunk's own peak
joins them as t and d t, except in the chunk that holds the row's peak, which stays left out (there t = 1 and d = 0).
Entropy and confidence follow from the totals as in vocab_stats.py.

A chunk of nothing but -inf is measured from 0, so that its tokens weigh 0; factors of a weight end at _FAR, so that
0 times it is 0. A NaN makes its chunk's r NaN, whatever the maximum made of it, and the row bad. Unwanted rows
(position G) are neither read nor written.

Sampling is an exponential race: with E the exponential draws of which -ln E is the Gumbel noise, the argmax of
x / t - ln E is that of e^(d / t) / E, which takes one logarithm a token less. A chunk's winner enters the merge with
its score in the former scale. Both searches are a maximum, then the lowest lane that has it: cheaper than carrying the
index through every comparison.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from asrd_kernels.philox_triton import exponential, random_bits
from asrd_kernels.precise_triton import divide, log1p
from asrd_kernels.state import DecodeState, VocabStats, id_tensor

_FAR = tl.constexpr(-1e4)  # exp of it is 0 in every dtype, and 0 times it is 0
_FIELDS = tl.constexpr(5)  # numbers of a chunk besides the id of its pick: m, r, u, the pick's score and its logit


@dataclass(frozen=True)
class StatsLaunch:
    """How V columns are cut: `chunks` programs of `chunk` columns a row, then one program of `merge` lanes a row."""

    chunk: int
    chunks: int
    warps: int
    merge: int


def stats_launch(vocab: int, itemsize: int) -> StatsLaunch:
    """Chunks of 4096, 31 programs a row of LLaDA's. A thread has 32 columns, all loaded before the first is needed; 16
    in float64, of which its registers hold no more."""
    chunk, warps = (1024, 4) if vocab <= 1024 else (4096, 8 if itemsize == 8 else 4)
    chunks = triton.cdiv(vocab, chunk)
    return StatsLaunch(chunk, chunks, warps, max(16, triton.next_power_of_2(chunks)))


@triton.jit
def below(x, peak):
    """x - peak <= 0, finite."""
    return tl.maximum(tl.where(x == peak, 0.0, x - peak), _FAR).to(x.dtype)


@triton.jit
def lowest(b_is, o_lane, LANES: tl.constexpr):
    """The first lane at which b_is holds; LANES if there is none."""
    return tl.min(tl.where(b_is, o_lane, LANES), axis=0)


@triton.jit
def holds_any(ids, count, first, LANES: tl.constexpr):
    """Whether one of `count` ids is among first, first + 1, ..., first + LANES - 1: seldom, which saves comparing."""
    found = 0
    for i in range(count):
        lane = tl.load(ids + i) - first
        found |= ((lane >= 0) & (lane < LANES)).to(tl.int32)
    return found > 0


@triton.jit
def tally(b_x, o_lane, LANES: tl.constexpr):
    """Of logits: maximum m, its lane, d = x - m, r, u. With a NaN among them, m is +inf or r NaN."""
    peak = tl.max(b_x, axis=0)
    peak = tl.where(peak == peak, peak, float("inf"))
    summit = lowest(b_x == peak, o_lane, LANES)
    b_d = b_x - tl.where(peak == -float("inf"), 0.0, peak).to(b_x.dtype)
    b_weight = tl.where(o_lane == summit, 0.0, tl.exp(b_d))
    return peak, summit, b_d, tl.sum(b_weight, axis=0), tl.sum(b_weight * tl.maximum(b_d, _FAR), axis=0)


@triton.jit
def race(b_draw, b_d, o_lane, peak, noise_scale, logit_scale, rate, LANES: tl.constexpr):
    """Score and lane of the winner of exponential draws; rate is log2(e) / t. -inf if nobody can win."""
    dtype: tl.constexpr = b_d.dtype
    b_speed = tl.exp2(b_d * tl.full((), rate, dtype)) / b_draw
    best = tl.max(b_speed, axis=0)
    pick = lowest(b_speed == best, o_lane, LANES)
    score = peak * tl.full((), logit_scale, dtype) + tl.log(best) * tl.full((), noise_scale, dtype)
    return tl.where(score == score, score, -float("inf")), pick


def race_scales(temperature: float) -> tuple[float, float, float]:
    """Factors of noise and logits whose sum is compared (neither overflows, however hot or cold), and log2(e) / t."""
    hot = max(temperature, 1.0)
    return temperature / hot, 1 / hot, min(math.log2(math.e) / max(temperature, 1e-30), 1e30)


@triton.jit(do_not_specialize=["num_forbidden", "length"])
def chunk_kernel(
    logits, row, position, row_ids, seeds, forbidden, numbers, picks,
    num_forbidden, noise_scale: tl.float64, logit_scale: tl.float64, rate: tl.float64,
    vocab, length, stride_n, stride_v,
    SAMPLE: tl.constexpr, CHUNK: tl.constexpr, MERGE: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """numbers [N, _FIELDS, MERGE] and picks [N, MERGE] of one chunk of one row. ALIGN divides V and stride_n."""
    n, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    here = tl.load(position + n)
    if here == length:
        return
    first = chunk * CHUNK
    o_lane = tl.arange(0, CHUNK)
    o_v = first + o_lane
    dtype = numbers.dtype.element_ty
    if ALIGN < 16:  # 16 the compiler finds out itself; any other is to be seen, for the widest loads there can be
        vocab, stride_n = vocab // ALIGN * ALIGN, stride_n // ALIGN * ALIGN
    p_row = logits + n * stride_n
    b_x = tl.load(p_row + o_v.to(tl.int64) * stride_v, mask=o_v < vocab, other=-float("inf")).to(dtype)
    if holds_any(forbidden, num_forbidden, first, CHUNK):
        for i in range(num_forbidden):
            b_x = tl.where(o_lane == (tl.load(forbidden + i) - first).to(tl.int32), -float("inf"), b_x)

    peak, pick, b_d, rest, slope = tally(b_x, o_lane, CHUNK)
    p_number = numbers + n * (_FIELDS * MERGE) + chunk
    tl.store(p_number, peak)
    tl.store(p_number + MERGE, rest)
    tl.store(p_number + 2 * MERGE, slope)
    if SAMPLE:
        b = tl.load(row + n)
        step = tl.full((), 0, tl.int32)
        bits = random_bits(tl.load(seeds + b), tl.load(row_ids + b), here, step, first, CHUNK)
        score, pick = race(exponential(bits, dtype), b_d, o_lane, peak, noise_scale, logit_scale, rate, CHUNK)
        o_pick = (first + pick).to(tl.int64)
        tl.store(p_number + 3 * MERGE, score)
        tl.store(p_number + 4 * MERGE, tl.load(p_row + o_pick * stride_v, mask=o_pick < vocab, other=0.0).to(dtype))
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

    unreadable = (peak == float("inf")) | (peak == -float("inf")) | (rest != rest)
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
    sample, length, how = temperature > 0, top1.shape[1] - 1, stats_launch(vocab, logits.element_size())
    precision = torch.promote_types(logits.dtype, torch.float32)
    numbers = torch.empty(rows, _FIELDS.value, how.merge, dtype=precision, device=logits.device)
    picks = torch.empty(rows, how.merge, dtype=torch.int32, device=logits.device)
    wrap_triton(chunk_kernel)[(rows, how.chunks)](
        logits, row, position, row_ids, seeds, forbidden, numbers, picks,
        forbidden.shape[0], *race_scales(temperature), vocab, length, logits.stride(0), logits.stride(1),
        SAMPLE=sample, CHUNK=how.chunk, MERGE=how.merge, ALIGN=math.gcd(vocab, logits.stride(0), 16),
        num_warps=how.warps, enable_fp_fusion=False,
    )  # fmt: skip
    unsure = forbidden if unconfident is None else unconfident
    wrap_triton(merge_kernel)[(rows,)](
        numbers, picks, row, position, unsure, top1, confidence, entropy, bad,
        0 if unconfident is None else unsure.shape[0], how.chunks, length, top1.stride(0),
        SAMPLE=sample, MERGE=how.merge, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def vocab_stats_triton(logits: Tensor, row: Tensor, position: Tensor, state: DecodeState) -> VocabStats:
    """As `vocab_stats_torch`. Reads logits of any strides, and does not change them."""
    rules, shape = state.rules, (len(state.tokens), state.length + 1)  # column G: unwanted rows
    precision = torch.promote_types(logits.dtype, torch.float32)
    kinds = (torch.int64, precision, precision, torch.bool)
    out = [torch.zeros(shape, dtype=kind, device=logits.device) for kind in kinds]
    if logits.shape[0] > 0:
        unconfident = id_tensor(rules.unconfident, logits.device) if rules.unconfident else None
        _launch(
            logits, row.contiguous(), position.contiguous(), state.row_ids, state.seeds,
            id_tensor(rules.forbidden, logits.device), unconfident, rules.temperature, *out,
        )  # fmt: skip
    return VocabStats(*(values[:, :-1] for values in out))
