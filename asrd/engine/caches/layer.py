"""K/V of a whole canvas as a transformers cache: each forward brings some rows and, of each, some positions.

transformers' own static layer writes one range for all rows; here every row has positions of its own.
Knows tensors and transformers' interface. Does not know which positions are due.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from asrd.engine.caches.stored import StoredCache, StoredLayer


@dataclass
class Window:
    """What the coming forward brings."""

    total: int = 0  # rows of the canvas that there are
    rows: Tensor | None = None  # [R] int64, which of them; None: all
    columns: Tensor | None = None  # [R, W] int64, which positions of them, the last column for none; None: the canvas
    extra: int = 0  # how many rows behind the canvas its queries may see


class CanvasLayer(StoredLayer):
    """One attention layer's keys and values, [B, H, length + room + 1, D]: the canvas, what may follow it for the time
    of a forward, and a last column for unused slots."""

    def __init__(self, length: int, room: int, window: Window) -> None:
        super().__init__()
        self.length, self.room, self.window = length, room, window

    @property
    def size(self) -> tuple[int, int]:
        """Rows, and columns."""
        return self.window.total, self.length + self.room + 1

    def write(self, stored: Tensor, new: Tensor) -> Tensor:
        """Those of the whole canvas and of what follows it in this forward, [R, H, length + extra, D]."""
        rows, columns = self.window.rows, self.window.columns
        if columns is not None and rows is None and len(stored) == 1:  # the same, and quicker
            stored[0].index_copy_(1, columns[0].to(stored.device), new[0])
            return stored[:, :, : self.length + self.window.extra]
        every = torch.arange(len(stored), device=stored.device) if rows is None else rows.to(stored.device)
        if columns is None:
            stored[every, :, : self.length] = new
            return new
        stored[every[:, None], :, columns.to(stored.device)] = new.transpose(1, 2)
        return (stored if rows is None else stored[every])[:, :, : self.length + self.window.extra]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Every query sees the whole canvas."""
        return self.length + self.window.extra, 0

    def get_max_length(self) -> int:
        """The canvas and what may follow it."""
        return self.length + self.room


class CanvasCache(StoredCache):
    """The layers of one model. `aim` says what the coming forward brings; a row's first one must bring all of it."""

    def __init__(self, length: int, room: int = 0) -> None:
        self.window, self.unused = Window(), length + room
        layer = partial(CanvasLayer, length, room, self.window)
        super().__init__(layer_class_to_replicate=layer)  # type: ignore[arg-type]

    def aim(self, total: int, rows: Tensor | None = None, columns: Tensor | None = None, extra: int = 0) -> None:
        """rows [R] of `total` and columns [R, W] of the coming forward (None: all rows, the canvas), `unused` for a
        slot without one, and how many columns behind the canvas it sees."""
        self.window.total, self.window.rows, self.window.columns = total, rows, columns
        self.window.extra = extra
