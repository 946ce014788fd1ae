"""`vocab_stats`: top-1, its probability and the entropy of each wanted row of logits.

Forbidden ids count as -inf everywhere. Ties go to the lowest id. With a temperature, top-1 is the argmax of
logits / temperature + Gumbel noise keyed by (seed, row, position, token id), while confidence and entropy stay those of
the noise-free distribution at temperature 1. A row with NaN, with +inf or with nothing but -inf is `bad` and reads
as token 0 with confidence and entropy 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asrd_kernels.philox import gumbel
from asrd_kernels.state import VocabStats

_FAR = -1e4  # exp of it is 0 in every dtype, and 0 times it is 0


@dataclass(frozen=True)
class Sampling:
    """Where the noise of a row of logits comes from. temperature 0: no noise."""

    temperature: float = 0.0
    seed: int = 0


def vocab_stats_torch(
    logits: Tensor,
    wanted: Tensor,
    forbidden: Tensor,
    row: Tensor,
    position: Tensor,
    sampling: Sampling = Sampling(),
    unconfident: tuple[int, ...] = (),
) -> VocabStats:
    """Statistics [N] of logits [N, V] in float32 (float64 stays); `logits` may be overwritten.

    wanted [N] bool: the others are not looked at and read as anything. forbidden [F] int64 token ids.
    row, position [N] int64 key the noise. A pick in `unconfident` has confidence 0.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).index_fill_(1, forbidden, -torch.inf)
    peak, top1 = logits.max(dim=1, keepdim=True)
    bad = ~peak.isfinite()
    if sampling.temperature > 0:
        noise = gumbel(sampling.seed, row, position, logits.shape[1], logits.dtype)
        top1 = noise.add_(logits, alpha=1 / sampling.temperature).argmax(dim=1, keepdim=True)
    below = (logits - peak).clamp_(min=_FAR)
    chosen = below.gather(1, top1)
    weight = below.exp()
    total = weight.sum(1, keepdim=True)
    slope = weight.mul_(below).sum(1, keepdim=True)
    confidence = chosen.exp() / total
    for token in unconfident:
        confidence = confidence.masked_fill(top1 == token, 0.0)
    entropy = (total.log() - slope / total).clamp(min=0.0)
    return VocabStats(
        top1=top1.masked_fill(bad, 0).squeeze(1),
        confidence=confidence.masked_fill(bad, 0.0).squeeze(1),
        entropy=entropy.masked_fill(bad, 0.0).squeeze(1),
        bad=bad.squeeze(1) & wanted,
    )
