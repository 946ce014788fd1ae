"""Which tokens a sample may be: top-k, top-p and min-p, as one bound per row of logits.

All three keep the most probable tokens, so what they keep are the logits of at least some value; tokens of equal logits
are kept or dropped together. They are applied in transformers' order (k, then p, then min-p) to the distribution at the
sampling temperature. Knows one row of logits at a time, so a sample does not depend on the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sampling_bound(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """[N, 1] the least logit that may be sampled, of logits [N, V] in float32 or float64; -inf: any."""
    bound = torch.full_like(logits[:, :1], -torch.inf)
    peak = logits.amax(1, keepdim=True)
    count = min(top_k, logits.shape[1]) if top_k > 0 else logits.shape[1]
    if top_p < 1:
        ordered = logits.topk(count, dim=1).values  # sorted
        share = ((ordered - peak) / temperature).softmax(1)
        kept = share.cumsum(1) - share < top_p  # the token that reaches top_p is the last
        kept[:, :1] = True
        bound = torch.where(kept, ordered, torch.inf).amin(1, keepdim=True)
    elif top_k > 0:
        bound = logits.topk(count, dim=1).values[:, -1:]
    if min_p > 0:
        bound = torch.maximum(bound, peak + temperature * math.log(min_p))
    return bound
