"""Masks inside the prompt: where the part of the canvas begins that is generated, and what is given in it.

The generated part of a row begins at its first mask. Everything before it is prompt; what stands behind it and is no
mask is given: it is read by the model, stays as it is, and is never drafted, verified or edited. So fill-in-the-middle,
several gaps, a fixed ending and a form to be filled in are one thing. Knows tensors of ids, no text.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from asrd.config import AsrdConfig


def is_dense(values: Any) -> bool:
    """A tensor whose values can be read as they are: neither sparse nor nested, nor on the meta device."""
    return isinstance(values, Tensor) and not (values.is_meta or values.is_nested or values.layout != torch.strided)


def first_masks(input_ids: Any, attention_mask: Any, mask_id: int) -> list[int] | None:
    """The column of each row's first mask, the prompt's length where there is none; None: no row has one.

    Anything that is no pair of dense tensors of one shape has none here: what is wrong with it is said elsewhere.
    """
    if not is_dense(input_ids) or input_ids.dim() != 2 or input_ids.numel() == 0:
        return None
    masks = input_ids == mask_id
    if is_dense(attention_mask) and attention_mask.shape == input_ids.shape:
        masks = masks & attention_mask.to(masks.device).bool()
    if not bool(masks.any()):
        return None
    return [int(row.long().argmax()) if bool(row.any()) else masks.shape[1] for row in masks]


def config_of_part(config: AsrdConfig, width: int, first: int) -> AsrdConfig:
    """The settings for rows of `width` ids whose generated part begins at column `first`, behind them as many masks as
    max_new_tokens says: none where nobody has said anything."""
    new = int(config.max_new_tokens or 0)
    if width - first + new == 0:
        raise ValueError(
            "max_new_tokens=0 and a row of the prompt without a mask: there is nothing to generate;"
            " give max_new_tokens of at least 1"
        )
    found = copy.copy(config)
    found.max_new_tokens = width - first + new
    return found


def given_part(prompt: Tensor, first: int, length: int, mask_id: int) -> Tensor:
    """[B, length] int64: what the generated part of prompts [B, P] holds at first."""
    behind = prompt[:, first:]
    masks = torch.full((len(prompt), length - behind.shape[1]), mask_id, dtype=prompt.dtype, device=prompt.device)
    return torch.cat([behind, masks], dim=1)
