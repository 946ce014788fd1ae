"""K/V of block-diffusion models as a transformers cache: one buffer a layer, written in place, never copied as a whole.

A row's positions are its own, counted from its first real token, so that no row is padded. What a forward brings is
written behind what is stored; the next one overwrites it unless the row has moved on. Knows tensors and transformers'
interface. Does not know which blocks are final.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from asrd.engine.caches.layer import copy_lines


@dataclass
class Span:
    """What the coming forward brings: of `total` rows these, W positions of each, the last of them before `end`."""

    total: int = 0
    rows: Tensor | None = None  # [R] int64; None: all
    first: int | Tensor = 0  # the position at which they begin, or [R] int64 where rows differ in it
    end: int = 0


class BlockLayer(CacheLayerMixin):
    """One attention layer's keys and values, [B, H, room, D]."""

    is_sliding = False

    def __init__(self, room: int, span: Span) -> None:
        super().__init__()
        self.room, self.span = room, span

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Room for all rows."""
        self.keys, self.values = (
            new.new_zeros(self.span.total, new.shape[1], self.room, new.shape[3]) for new in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the new K/V [R, H, W, D] and return all up to them, [R, H, end, D]: views if all rows take part."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        return self._update(self.keys, key_states), self._update(self.values, value_states)

    def _update(self, stored: Tensor, new: Tensor) -> Tensor:
        rows, first, width = self.span.rows, self.span.first, new.shape[2]
        if rows is None and isinstance(first, int):
            stored[:, :, first : first + width] = new
        else:
            every = torch.arange(len(stored), device=stored.device) if rows is None else rows.to(stored.device)
            start = first if isinstance(first, int) else first.to(stored.device)[:, None]
            columns = (start + torch.arange(width, device=stored.device)).expand(len(every), -1)
            stored[every[:, None], :, columns] = new.transpose(1, 2)
        visible = stored[:, :, : self.span.end]
        return visible if rows is None else visible[rows.to(stored.device)]

    def put(self, source: BlockLayer, rows: Tensor, slots: Tensor, size: int) -> None:
        """Take over rows of another layer; this one has `size` of them."""
        assert source.keys is not None
        assert source.values is not None
        if not self.is_initialized:
            self.keys, self.values = (old.new_zeros(size, *old.shape[1:]) for old in (source.keys, source.values))
            self.is_initialized = True
        for new, old in ((self.keys, source.keys), (self.values, source.values)):
            assert new is not None
            copy_lines(old, rows, new, slots)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Every query may see all that `update` returns."""
        return self.span.end, 0

    def get_seq_length(self) -> int:
        """No query comes after what is stored: positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """All there is room for."""
        return self.room


class BlockCache(Cache):
    """The layers of one model, with `room` positions a row. `aim` says what the coming forward brings."""

    def __init__(self, room: int) -> None:
        self.span = Span()
        layer = partial(BlockLayer, room, self.span)
        super().__init__(layer_class_to_replicate=layer)  # type: ignore[arg-type]

    def aim(self, total: int, rows: Tensor | None, first: int | Tensor, end: int) -> None:
        """See `Span`."""
        self.span.total, self.span.rows, self.span.first, self.span.end = total, rows, first, end

    def put(self, source: BlockCache, rows: Tensor, slots: Tensor, size: int) -> None:
        """Take over rows of another cache, if it has any yet; this one has `size` of them."""
        for number, layer in enumerate(source.layers):
            if number == len(self.layers):
                self.layers.append(self.layer_class_to_replicate())  # type: ignore[misc]
            self.layers[number].put(layer, rows, slots, size)  # type: ignore[union-attr]
