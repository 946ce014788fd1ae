"""`KV`: keys and values of every layer, in room made once, as a transformers cache.

Each forward brings some lines and, of each, some columns; transformers' own static layer writes one range for all.
Knows no schedule.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class KV(Cache):
    """Keys and values [lines, heads, room, D] of every layer. `aim` says what the coming forward brings and sees."""

    layers: list[KVLayer]  # type: ignore[assignment]

    def __init__(self, lines: int, room: int) -> None:
        self.size = (lines, room)
        super().__init__(layer_class_to_replicate=partial(KVLayer, self))  # type: ignore[arg-type]

    def aim(self, lines: Tensor | None, columns: Tensor, seen: int) -> None:
        """It brings `columns` [R, W] of these lines [R] (None: all), and sees the first `seen` columns of them."""
        self.lines, self.columns, self.seen = lines, columns, seen

    def put(self, slots: Tensor, source: KV, lines: Tensor) -> None:
        """Take over lines of another one, as far as it has any yet."""
        for number, theirs in enumerate(source.layers):
            if not theirs.is_initialized:
                continue
            while number >= len(self.layers):
                self.layers.append(KVLayer(self))
            mine = self.layers[number]
            if not mine.is_initialized:
                mine.lazy_initialization(theirs.keys, theirs.values)
            here, there = slots.to(theirs.keys.device), lines.to(theirs.keys.device)
            mine.keys[here], mine.values[here] = theirs.keys[there], theirs.values[there]

    def clear(self, lines: Tensor) -> None:
        """Forget these lines, for a NaN among them would outlast its row: even times a weight of 0 it is NaN."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[lines.to(layer.keys.device)] = 0
                layer.values[lines.to(layer.keys.device)] = 0

    @property
    def bytes(self) -> int:
        """Memory that they take."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)


class KVLayer(CacheLayerMixin):
    """Those of one layer, as transformers' attention asks for them."""

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, kv: KV) -> None:
        super().__init__()
        self.kv = kv

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Room for all lines."""
        lines, room = self.kv.size
        self.keys, self.values = (
            new.new_zeros(lines, new.shape[1], room, new.shape[3]) for new in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store what the forward brings; give what it sees."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._store(self.keys, key_states), self._store(self.values, value_states)

    def _store(self, stored: Tensor, new: Tensor) -> Tensor:
        lines, columns, seen = self.kv.lines, self.kv.columns.to(stored.device), self.kv.seen
        if lines is not None:
            lines = lines.to(stored.device)
            stored[lines[:, None], :, columns] = new.transpose(1, 2)
            return stored[lines, :, :seen]
        if len(stored) == 1:  # the same, and quicker
            stored[0].index_copy_(1, columns[0], new[0])
        else:
            every = torch.arange(len(stored), device=stored.device)[:, None]
            stored[every, :, columns] = new.transpose(1, 2)
        return stored[:, :, :seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Every query may see what `update` returns."""
        return self.kv.seen, 0

    def get_seq_length(self) -> int:
        """0: positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """All there is room for."""
        return self.kv.size[1]
