"""Rows that a forward on a block-diffusion model has behind its blocks, which do not see them: a block once more as the
decoder edits it, or witnesses, masks that each see the blocks but for the token in whose place they stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from asrd.engine.decoder import Decoder
from asrd.models.adapter import ModelAdapter
from asrd.models.extra_rows import AttentionLayout


@dataclass(frozen=True)
class Behind:
    """W rows behind the blocks of R rows of the batch; their keys and values follow those of the blocks."""

    embeds: Tensor  # [R, W, D]
    positions: Tensor  # [R, W] int64, position ids
    columns: Tensor  # [R, W] int64, where their hidden states are kept: a column of the canvas, or one behind it
    used: Tensor  # [R] int64, how many of them mean something, from the left
    excluded: Tensor | None = None  # [R, W] int64: what each does not see of its block; None: all of that, as edited

    @property
    def width(self) -> int:
        """W."""
        return self.positions.shape[1]

    def visible(self, blocks: Tensor, size: int, keys: int) -> Tensor:
        """[R, W, keys] bool: the keys that each sees; blocks [R, N] are the positions of the blocks before them."""
        key = torch.arange(keys, device=blocks.device)
        first = self.positions // size * size
        own = (blocks[:, -1:] + 1 + torch.arange(self.width, device=blocks.device))[..., None]
        if self.excluded is None:  # each other, in place of the block
            return (key < first[..., None]) | ((key >= own[:, :1]) & (key <= own[:, -1:]))
        return ((key < first[..., None] + size) & (key != self.excluded[..., None])) | (key == own)

    def beside_flash(self, adapter: ModelAdapter, queries: int, keys: int, impl: str) -> dict[str, Any]:
        """Arguments of a forward in which so many queries see all of the first keys, without a mask."""
        assert self.excluded is not None
        nobody = torch.zeros_like(self.positions, dtype=torch.bool)
        real = torch.ones(len(nobody), keys - self.width, dtype=torch.bool, device=nobody.device)
        layout = AttentionLayout(real, self.excluded[..., None], nobody, self.positions)
        return adapter.layout_inputs(layout, queries, None, impl, way="attention")


def edited_block(decoder: Decoder, rows: Tensor, positions: Tensor, columns: Tensor) -> Behind:
    """The block at these positions [R, BL] of the rows [R], which is in these columns of the canvas."""
    used = torch.full_like(rows, positions.shape[1])
    return Behind(decoder.embed_at(rows, columns), positions, columns, used)


def witnesses(decoder: Decoder, rows: Tensor, starts: Tensor, width: int, used: Tensor) -> Behind:
    """`used` [R] witnesses of `width` of each of the rows [R], whose generated positions begin at `starts` [R]."""
    checked = decoder.witness_positions()
    assert checked is not None
    slot = torch.arange(width, device=rows.device)
    place = checked[rows, :width].clamp(max=decoder.state.length - 1) + starts[:, None]
    embeds = decoder.table[decoder.rules.mask_id].expand(len(rows), width, -1)
    columns = (decoder.state.tokens.shape[1] + slot).expand(len(rows), -1)
    return Behind(embeds, place, columns, used, excluded=place)
