"""`vocab_stats`: what Algorithm 1 reads from p_s (line 9), top-1, its probability and the entropy of wanted positions.

Forbidden ids count as -inf everywhere. Ties go to the lowest id. With a temperature, top-1 is the argmax of
logits / temperature + noise (up to a factor that changes nothing), Gumbel noise keyed by (seed, row, position, token
id); confidence and entropy stay those of the noise-free distribution at temperature 1. A row with NaN, with +inf or
with nothing but -inf is `bad` and reads as token 0 with confidence and entropy 0.

With m the maximum, z = x - m, and over all tokens but the maximum itself r the sum of e^z and u that of z e^z:
entropy = ln(1 + r) - u / (1 + r), which keeps its digits where r is tiny and x is large.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd_kernels.philox import gumbel
from asrd_kernels.sampling import sampling_bound
from asrd_kernels.state import DecodeState, VocabStats, id_tensor

_FAR = -1e4  # exp of it is 0 in every dtype, and 0 times it is 0


def vocab_stats_torch(logits: Tensor, row: Tensor, position: Tensor, state: DecodeState) -> VocabStats:
    """Statistics [B, G] of logits [N, V] at (row, position), both [N] int64; 0 elsewhere.

    Rows of logits with position G are not wanted. Computed in float32 (float64 stays).
    """
    rules = state.rules
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = x.index_fill(1, id_tensor(rules.forbidden, x.device), -torch.inf)
    m, best = x.max(dim=1, keepdim=True)
    top1 = best if rules.temperature == 0 else sample(x, row, position, state)
    z = (x - m).clamp(min=_FAR)
    weights = z.exp().scatter(1, best, 0.0)  # without the maximum, whose 1 would swallow the digits of a peaked row
    r = weights.sum(1, keepdim=True)
    u = (weights * z).sum(1, keepdim=True)
    confidence = z.gather(1, top1).exp() / (1 + r)
    entropy = (r.log1p() - u / (1 + r)).clamp(min=0)
    if rules.unconfident:
        unconfident = (top1 == id_tensor(rules.unconfident, x.device)).any(1, keepdim=True)
        confidence = confidence.masked_fill(unconfident, 0)
    bad = ~m.isfinite()
    found = (top1.masked_fill(bad, 0), confidence.masked_fill(bad, 0), entropy.masked_fill(bad, 0), bad)
    return VocabStats(*(on_canvas(values[:, 0], row, position, state) for values in found))


def on_canvas(values: Tensor, row: Tensor, position: Tensor, state: DecodeState) -> Tensor:
    """[B, G] with values [N] at (row, position), 0 elsewhere; position G is nowhere."""
    canvas = values.new_zeros(len(state.tokens), state.length + 1)
    canvas[row, position] = values
    return canvas[:, :-1]


def sample(x: Tensor, row: Tensor, position: Tensor, state: DecodeState) -> Tensor:
    """[N, 1] int64: the argmax of x / temperature + Gumbel noise, over the tokens that top-k, top-p and min-p keep."""
    rules = state.rules
    noise = gumbel(state.seeds[row], state.row_ids[row], position, x.shape[1], x.dtype)
    hot = max(rules.temperature, 1.0)  # both terms times temperature / hot, so that neither overflows
    score = noise * (rules.temperature / hot) + x * (1 / hot)
    if rules.filters:
        bound = sampling_bound(x, rules.temperature, rules.top_k, rules.top_p, rules.min_p)
        score = score.masked_fill(x < bound, -torch.inf)
    return score.argmax(dim=1, keepdim=True)
