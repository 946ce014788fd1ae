"""K/V of block-diffusion models as a transformers cache: one buffer a layer, written in place, never copied as a whole.

A row's positions are its own, counted from its first real token, so that no row is padded. What a forward brings is
written behind what is stored; the next one overwrites it unless the row has moved on. Knows tensors and transformers'
interface. Does not know which blocks are final.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from asrd.engine.caches.stored import StoredCache, StoredLayer


@dataclass
class Span:
    """What the coming forward brings: of `total` rows these, W positions of each, the last of them before `end`."""

    total: int = 0
    rows: Tensor | None = None  # [R] int64; None: all
    first: int | Tensor = 0  # the position at which they begin, or [R] int64 where rows differ in it
    end: int = 0


class BlockLayer(StoredLayer):
    """One attention layer's keys and values, [B, H, room, D]."""

    def __init__(self, room: int, span: Span) -> None:
        super().__init__()
        self.room, self.span = room, span

    @property
    def size(self) -> tuple[int, int]:
        """Rows, and positions of a row."""
        return self.span.total, self.room

    def write(self, stored: Tensor, new: Tensor) -> Tensor:
        """All up to the new ones, [R, H, end, D]: views if all rows take part."""
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

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Every query may see all that `update` returns."""
        return self.span.end, 0

    def get_max_length(self) -> int:
        """All there is room for."""
        return self.room


class BlockCache(StoredCache):
    """The layers of one model, with `room` positions a row. `aim` says what the coming forward brings."""

    def __init__(self, room: int) -> None:
        self.span = Span()
        layer = partial(BlockLayer, room, self.span)
        super().__init__(layer_class_to_replicate=layer)  # type: ignore[arg-type]

    def aim(self, total: int, rows: Tensor | None, first: int | Tensor, end: int) -> None:
        """See `Span`."""
        self.span.total, self.span.rows, self.span.first, self.span.end = total, rows, first, end
