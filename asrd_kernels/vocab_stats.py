"""`vocab_stats`: what Algorithm 1 reads from p_s (line 9), top-1, its probability and the entropy of wanted positions.

Forbidden ids count as -inf everywhere. Ties go to the lowest id. With a temperature, top-1 is the argmax of
logits / temperature + noise (up to a factor that changes nothing), Gumbel noise keyed by (seed, row, position, token
id); confidence and entropy stay those of the noise-free distribution at temperature 1. A row with NaN, with +inf or
with nothing but -inf is `bad` and reads as token 0 with confidence and entropy 0.

With m the maximum, z = x - m, and over all tokens but the maximum itself r the sum of e^z and u that of z e^z:
entropy = ln(1 + r) - u / (1 + r), which keeps its digits where r is tiny and x is large.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asrd_kernels.philox import gumbel
from asrd_kernels.sampling import sampling_bound
from asrd_kernels.state import VocabStats

_FAR = -1e4  # exp of it is 0 in every dtype, and 0 times it is 0


@dataclass(frozen=True)
class Readout:
    """How logits are read: what is never predicted, what is never trusted, and where the noise comes from."""

    forbidden: Tensor  # [F] int64 token ids
    row_ids: Tensor  # [B] int64, key the noise ...
    seeds: Tensor  # [B] int64 (philox.as_int64), ... together with these
    unconfident: Tensor | None = None  # [U] int64 token ids; a pick among these has confidence 0
    temperature: float = 0.0  # 0: no noise
    top_k: int = 0  # with noise, only the most probable tokens are picked: so many; 0: all
    top_p: float = 1.0  # those that together have this probability
    min_p: float = 0.0  # those of at least this share of the highest probability

    @property
    def filters(self) -> bool:
        """May only some tokens be sampled? The reference does that on every device."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def vocab_stats_torch(logits: Tensor, row: Tensor, position: Tensor, readout: Readout, out: VocabStats) -> None:
    """Write the statistics of logits [N, V] to `out` [B, G + 1] at (row, position), both [N] int64.

    Rows of logits with position G are not wanted: what column G holds means nothing. Computed in float32 (float64
    stays).
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = x.index_fill(1, readout.forbidden, -torch.inf)
    m, best = x.max(dim=1, keepdim=True)
    top1 = best if readout.temperature == 0 else sample(x, row, position, readout)
    z = (x - m).clamp(min=_FAR)
    weights = z.exp().scatter(1, best, 0.0)  # without the maximum, whose 1 would swallow the digits of a peaked row
    r = weights.sum(1, keepdim=True)
    u = (weights * z).sum(1, keepdim=True)
    confidence = z.gather(1, top1).exp() / (1 + r)
    entropy = (r.log1p() - u / (1 + r)).clamp(min=0)
    if readout.unconfident is not None:
        confidence = confidence.masked_fill((top1 == readout.unconfident).any(1, keepdim=True), 0)
    bad = ~m.isfinite()
    found = (top1.masked_fill(bad, 0), confidence.masked_fill(bad, 0), entropy.masked_fill(bad, 0), bad)
    for target, values in zip(out, found, strict=True):
        target[row, position] = values[:, 0].to(target.dtype)


def sample(x: Tensor, row: Tensor, position: Tensor, readout: Readout) -> Tensor:
    """[N, 1] int64: the argmax of x / temperature + Gumbel noise, over the tokens that top-k, top-p and min-p keep."""
    noise = gumbel(readout.seeds[row], readout.row_ids[row], position, x.shape[1], x.dtype)
    hot = max(readout.temperature, 1.0)  # both terms times temperature / hot, so that neither overflows
    score = noise * (readout.temperature / hot) + x * (1 / hot)
    if readout.filters:
        bound = sampling_bound(x, readout.temperature, readout.top_k, readout.top_p, readout.min_p)
        score = score.masked_fill(x < bound, -torch.inf)
    return score.argmax(dim=1, keepdim=True)
