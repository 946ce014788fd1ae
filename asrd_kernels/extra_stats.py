"""`extra_stats`: statistics of the wanted rows of logits that only some decoders ask for, by name.

margin      difference between the two largest probabilities
token_prob  probability of a given token at each position (`Decoder.tokens_to_score`)
Both are of the noise-free distribution at temperature 1, forbidden ids left out, as in `vocab_stats`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd_kernels.vocab_stats import Readout

EXTRA_STATS = ("margin", "token_prob")


def extra_stats_torch(
    asked: tuple[str, ...], logits: Tensor, row: Tensor, position: Tensor, readout: Readout, tokens: Tensor
) -> dict[str, Tensor]:
    """Each statistic asked for as [B, N], of logits [M, V] at (row, position), both [M] int64; 0 where not wanted.

    tokens [B, N] int64, those whose probability is token_prob. Rows of logits with position N are not wanted.
    `logits` is left as it is.
    """
    if not asked:
        return {}
    width = tokens.shape[1]
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    precise = precise.index_fill(1, readout.forbidden, -torch.inf)
    scale = precise.logsumexp(1, keepdim=True)
    found = {}
    for name in asked:
        if name == "margin":
            two = (precise.topk(2, dim=1).values - scale).exp()
            value = two[:, 0] - two[:, 1]
        elif name == "token_prob":
            token = tokens[row, position.clamp(max=width - 1)]
            value = (precise.gather(1, token[:, None]) - scale).exp().squeeze(1)
        else:
            raise ValueError(f"extra_stats={name!r}: a decoder may ask for {', '.join(map(repr, EXTRA_STATS))}")
        scores = torch.zeros(tokens.shape[0], width + 1, dtype=precise.dtype, device=logits.device)
        found[name] = scores.index_put_((row, position), value)[:, :width]
    return found
