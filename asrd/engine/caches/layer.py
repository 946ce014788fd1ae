"""K/V of a whole canvas as a transformers cache: each forward brings some rows and, of each, some positions.

transformers' own static layer writes one range for all rows; here every row has positions of its own.
Knows tensors and transformers' interface. Does not know which positions are due.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


def copy_lines(source: Tensor, rows: Tensor, target: Tensor, slots: Tensor) -> None:
    """Write `rows` of one tensor to `slots` of another, along the first dimension; either may be expanded in others."""
    once = tuple(slice(0, 1) if stride == 0 and dim else slice(None) for dim, stride in enumerate(target.stride()))
    target[once].index_copy_(0, slots.to(target.device), source[once][rows.to(source.device)].to(target.device))


@dataclass
class Window:
    """What the coming forward brings."""

    total: int = 0  # rows of the canvas that there are
    rows: Tensor | None = None  # [R] int64, which of them; None: all
    columns: Tensor | None = None  # [R, W] int64, which positions of them, -1 for a slot without one; None: the canvas
    extra: int = 0  # how many rows behind the canvas its queries may see


class CanvasLayer(CacheLayerMixin):
    """One attention layer's keys and values, [B, H, length + room + 1, D]: the canvas, what may follow it for the time
    of a forward, and a last column for unused slots."""

    is_sliding = False

    def __init__(self, length: int, room: int, window: Window) -> None:
        super().__init__()
        self.length, self.room, self.window = length, room, window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Room for all rows."""
        self.keys, self.values = (
            new.new_zeros(self.window.total, new.shape[1], self.length + self.room + 1, new.shape[3])
            for new in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the new K/V [R, H, W, D] and return those of the whole canvas and of what follows it in this forward,
        [R, H, length + extra, D]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        return self._update(self.keys, key_states), self._update(self.values, value_states)

    def _update(self, stored: Tensor, new: Tensor) -> Tensor:
        rows, columns = self.window.rows, self.window.columns
        every = torch.arange(len(stored), device=stored.device) if rows is None else rows.to(stored.device)
        if columns is None:
            stored[every, :, : self.length] = new
            return new
        stored[every[:, None], :, columns.to(stored.device)] = new.transpose(1, 2)
        return (stored if rows is None else stored[every])[:, :, : self.length + self.window.extra]

    def put(self, source: CanvasLayer, rows: Tensor, slots: Tensor, size: int) -> None:
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
        """Every query sees the whole canvas."""
        return self.length + self.window.extra, 0

    def get_seq_length(self) -> int:
        """No query comes after what is stored."""
        return 0

    def get_max_length(self) -> int:
        """The canvas and what may follow it."""
        return self.length + self.room


class CanvasCache(Cache):
    """The layers of one model. `aim` says what the coming forward brings; a row's first one must bring all of it."""

    def __init__(self, length: int, room: int = 0) -> None:
        self.window = Window()
        layer = partial(CanvasLayer, length, room, self.window)
        super().__init__(layer_class_to_replicate=layer)  # type: ignore[arg-type]

    def aim(self, total: int, rows: Tensor | None = None, columns: Tensor | None = None, extra: int = 0) -> None:
        """rows [R] of `total` and columns [R, W] of the coming forward (None: all rows, the canvas), and how many
        columns behind the canvas it sees."""
        self.window.total, self.window.rows, self.window.columns = total, rows, columns
        self.window.extra = extra

    @property
    def bytes(self) -> int:
        """Memory of the K/V."""
        stored = [
            part for layer in self.layers for part in (getattr(layer, "keys", None), getattr(layer, "values", None))
        ]
        return sum(part.nbytes for part in stored if part is not None)

    def put(self, source: CanvasCache, rows: Tensor, slots: Tensor, size: int) -> None:
        """Take over rows of another cache, if it has any yet; this one has `size` of them."""
        for number, layer in enumerate(source.layers):
            if number == len(self.layers):
                self.layers.append(self.layer_class_to_replicate())  # type: ignore[misc]
            self.layers[number].put(layer, rows, slots, size)  # type: ignore[union-attr]
