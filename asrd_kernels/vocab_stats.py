"""`vocab_stats`: top-1, its probability and the entropy of each wanted row of logits.

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

from asrd_kernels.arrays import any_in_row, at_least, host_view, namespace, not_finite, perhaps, put, zero_where
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
        """May only some tokens be sampled? The PyTorch twin does that on every device."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def vocab_stats_torch(logits: Tensor, row: Tensor, position: Tensor, readout: Readout, out: VocabStats) -> None:
    """Write the statistics of logits [N, V] to `out` [B, G + 1] at (row, position), both [N] int64.

    Rows of logits with position G are not wanted: what column G holds means nothing. Computed in float32 (float64
    stays); `logits` may be overwritten. `out` may also be that of `host_view`.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits.index_fill_(1, readout.forbidden, -torch.inf)
    peak, summit = logits.max(dim=1, keepdim=True)
    top1 = summit
    if readout.temperature > 0:
        noise = gumbel(readout.seeds[row], readout.row_ids[row], position, logits.shape[1], logits.dtype)
        hot = max(readout.temperature, 1.0)  # neither factor overflows, however hot or cold
        noise.mul_(readout.temperature / hot).add_(logits, alpha=1 / hot)
        if readout.filters:
            bound = sampling_bound(logits, readout.temperature, readout.top_k, readout.top_p, readout.min_p)
            noise.masked_fill_(logits < bound, -torch.inf)
        top1 = noise.argmax(dim=1, keepdim=True)
    below = logits.sub_(peak).clamp_(min=_FAR)
    picked = None if top1 is summit else below.gather(1, top1).exp_()  # that of the peak is 1
    weight = below.exp().scatter_(1, summit, 0.0)  # the peak's 1 would swallow the digits of a peaked row
    rest = weight.sum(1, keepdim=True)
    slope = weight.mul_(below).sum(1, keepdim=True)
    few = (row, position, top1, peak, rest, rest.log1p(), slope, picked, readout.unconfident)
    row, position, top1, peak, rest, log, slope, picked, unconfident = (
        few if isinstance(out.bad, Tensor) else host_view(few)
    )
    total = 1 + rest
    confidence = namespace(total).reciprocal(total) if picked is None else picked / total
    if unconfident is not None:
        confidence = zero_where(any_in_row(top1 == unconfident)[:, None], confidence)
    found = (top1, confidence, at_least(log - slope / total, 0.0))
    bad = not_finite(peak)
    if perhaps(bad):
        found = tuple(zero_where(bad, values) for values in found)
    for target, values in zip(out, (*found, bad), strict=True):
        put(target, row, position, values[:, 0])
