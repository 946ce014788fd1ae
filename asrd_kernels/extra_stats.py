"""`extra_stats`: statistics of the positions read that only some decoders ask for, by name.

margin      difference between the two largest probabilities
token_prob  probability of the token that stands at the position
Both are of the noise-free distribution at temperature 1, forbidden ids left out, as in `vocab_stats`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asrd_kernels.state import DecodeState, id_tensor
from asrd_kernels.vocab_stats import on_canvas

EXTRA_STATS = ("margin", "token_prob")


def extra_stats_torch(
    asked: tuple[str, ...], logits: Tensor, row: Tensor, position: Tensor, state: DecodeState
) -> dict[str, Tensor]:
    """Each statistic asked for as [B, G], of logits [N, V] at (row, position), both [N] int64; 0 elsewhere.

    Rows of logits with position G are not wanted. `logits` is left as it is.
    """
    if not asked:
        return {}
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    precise = precise.index_fill(1, id_tensor(state.rules.forbidden, precise.device), -torch.inf)
    scale = precise.logsumexp(1, keepdim=True)
    found = {}
    for name in asked:
        if name == "margin":
            two = (precise.topk(2, dim=1).values - scale).exp()
            value = two[:, 0] - two[:, 1]
        elif name == "token_prob":
            token = state.generated[row, position.clamp(max=state.length - 1)]
            value = (precise.gather(1, token[:, None]) - scale).exp().squeeze(1)
        else:
            raise ValueError(f"extra_stats={name!r}: a decoder may ask for {', '.join(map(repr, EXTRA_STATS))}")
        found[name] = on_canvas(value, row, position, state)
    return found
