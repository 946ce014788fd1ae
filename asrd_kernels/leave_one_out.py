"""`leave_one_out_attention`: a few query rows against all keys, each row without a few keys of its own, and itself.

The rows are appended to a canvas that does not see them, so the canvas's own attention stays a plain call without a
mask. WINO's shadow rows see each other, the witnesses of leave-one-out editing do not: `visible` says which.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def leave_one_out_attention_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    excluded: Tensor,
    visible: Tensor,
    scale: float,
    seen: Tensor | None = None,
) -> Tensor:
    """Attention [B, H, W, D] of query [B, H, W, D] to key and value [B, K, N, D]; H is a multiple of K.

    The last W keys are those of the query rows themselves. Row w sees key n if `visible` [B, N] bool says that the key
    may be seen and `excluded` [B, W, E] int64 does not name it (a number that no key has names none); and it always
    sees its own key. Half precision is accumulated in float32. seen: what `leave_one_out_mask` gives, if at hand.
    """
    mask = leave_one_out_mask(excluded, visible) if seen is None else seen
    return F.scaled_dot_product_attention(query, key, value, mask[:, None], scale=scale, enable_gqa=True)


def leave_one_out_mask(excluded: Tensor, visible: Tensor) -> Tensor:
    """[B, W, N] bool: the keys that each query row sees."""
    column = torch.arange(visible.shape[1], device=visible.device)
    own = column[visible.shape[1] - excluded.shape[1] :]
    return (visible[:, None] & (excluded[..., None] != column).all(2)) | (own[:, None] == column)
