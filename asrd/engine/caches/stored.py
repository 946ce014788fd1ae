"""What the KV caches here have in common: K/V of a fixed number of rows, in room made once, as a transformers cache.

Which positions a forward brings, and which it sees, is the affair of `layer` and `block_layer`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


def copy_lines(source: Tensor, rows: Tensor, target: Tensor, slots: Tensor) -> None:
    """Write `rows` of one tensor to `slots` of another, along the first dimension; either may be expanded in others."""
    once = tuple(slice(0, 1) if stride == 0 and dim else slice(None) for dim, stride in enumerate(target.stride()))
    target[once].index_copy_(0, slots.to(target.device), source[once][rows.to(source.device)].to(target.device))


class StoredLayer(CacheLayerMixin):
    """One attention layer's keys and values, [B, H, N, D], written in place. No query comes after what is stored:
    positions are always given."""

    is_sliding = False

    @property
    @abstractmethod
    def size(self) -> tuple[int, int]:
        """B and N."""

    @abstractmethod
    def write(self, stored: Tensor, new: Tensor) -> Tensor:
        """Put the new keys or values [R, H, W, D] among those stored, and return what the forward sees of them."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Room for all rows."""
        rows, length = self.size
        self.keys, self.values = (
            new.new_zeros(rows, new.shape[1], length, new.shape[3]) for new in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store the new K/V [R, H, W, D] and return all that the forward sees."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        return self.write(self.keys, key_states), self.write(self.values, value_states)

    def put(self, source: StoredLayer, rows: Tensor, slots: Tensor, size: int) -> None:
        """Take over rows of another layer; this one has `size` of them."""
        assert source.keys is not None
        assert source.values is not None
        if not self.is_initialized:
            self.keys, self.values = (old.new_zeros(size, *old.shape[1:]) for old in (source.keys, source.values))
            self.is_initialized = True
        for new, old in ((self.keys, source.keys), (self.values, source.values)):
            assert new is not None
            copy_lines(old, rows, new, slots)

    def get_seq_length(self) -> int:
        """0: see above."""
        return 0


class StoredCache(Cache):
    """The layers of one model, made as forwards ask for them."""

    layers: list[StoredLayer]  # type: ignore[assignment]

    @property
    def bytes(self) -> int:
        """Memory of the K/V."""
        stored = [
            part for layer in self.layers for part in (getattr(layer, "keys", None), getattr(layer, "values", None))
        ]
        return sum(part.nbytes for part in stored if part is not None)

    def put(self, source: StoredCache, rows: Tensor, slots: Tensor, size: int) -> None:
        """Take over rows of another cache, if it has any yet; this one has `size` of them."""
        for number, layer in enumerate(source.layers):
            if number == len(self.layers):
                self.layers.append(self.layer_class_to_replicate())  # type: ignore[misc,arg-type]
            self.layers[number].put(layer, rows, slots, size)
