"""`FixedForwards`: the forwards of a step with a KV cache, in a few fixed shapes, so that each can be a recorded graph.

The device works out which positions are due and, row by row, how many; the host reads these numbers, and with them says
which forwards there are: one with a slice of every row, and some with the whole canvas of 1, 2, 4, ... rows, which
together are those that are refreshed. Which rows these are, and which positions a slice has, stays on the device.

A slice of a row that is refreshed, done or narrower than the others has slots without a position. What it computes
there is stored nowhere, or is replaced by the refresh, which comes after it. Rows behind the canvas, where a decoder
has some, are in every forward of their row, all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asrd.engine.caches.body import CachedBody
from asrd.models.extra_rows import AttentionLayout
from asrd_kernels import DecodeState


class Part(NamedTuple):
    """One forward: slices of `size` slots of all rows, or the whole canvas of the next `size` rows that are due it."""

    kind: Literal["slices", "whole"]
    size: int


class FixedForwards:
    """The forwards of B rows, each with `copies` lines, as `CachedBody` does them, with its K/V and hidden states.

    layout gives the attention layout of the coming step, extra the number of rows that it puts behind the canvas.
    """

    def __init__(
        self,
        body: CachedBody,
        rows: int,
        copies: int,
        device: torch.device,
        layout: Callable[[], AttentionLayout | None] = lambda: None,
        extra: int = 0,
    ) -> None:
        self.body, self.rows, self.copies, self.layout, self.extra = body, rows, copies, layout, extra
        self.length, self.block = body.parts.length, body.schedule.block_length
        self.due = torch.zeros(rows, self.length + extra, dtype=torch.bool, device=device)
        self.counts = torch.zeros(rows, dtype=torch.int64, device=device)  # of what is due, for the host
        self.order = torch.zeros_like(self.counts)  # the rows that are due whole, then the others
        self.next = torch.zeros(1, dtype=torch.int64, device=device)  # how many of these have been done
        self.embeds: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        """[N, M, D], valid where it was due."""
        return self.body.parts.hidden

    def prepare(self, embeds: Tensor, state: DecodeState, probed: bool) -> None:
        """Keep the embeddings [N, M, D] of the coming forwards, and find what is due. probed: as in `CachedBody`."""
        if self.embeds is None:
            self.embeds = torch.empty_like(embeds)
            self.body.parts.make_room(self.extra)
        self.embeds.copy_(embeds)
        self.due.copy_(self.body.due(state, probed, self.layout()))
        torch.sum(self.due[:, : self.length], 1, out=self.counts)
        self.order.copy_((self.counts < self.length).byte().argsort(stable=True))
        self.next.zero_()

    def plan(self, counts: list[int]) -> list[Part]:
        """The forwards in which `counts` positions of each row are recomputed; where nothing is due there are none."""
        return plan(counts, self.length, self.block, self.body.schedule.shift)

    def forward(self, part: Part) -> None:
        """Do one of them; the shapes depend on nothing but `part`."""
        assert self.embeds is not None
        parts, layout = self.body.parts, self.layout()  # made anew: another recording may have overwritten the last
        if part.kind == "slices":
            parts.slices(self.embeds, None, self.due.repeat(self.copies, 1), part.size, layout, self.extra)
            return
        rows = self.order[self.next + torch.arange(part.size, device=self.order.device)]
        lines = torch.cat([rows + copy * self.rows for copy in range(self.copies)])
        if layout is None:
            parts.whole(self.embeds, None if part.size == self.rows else lines)
        else:
            parts.slices(self.embeds, lines, self.due[rows].repeat(self.copies, 1), self.length, layout, self.extra)
        self.next.add_(part.size)


def plan(counts: list[int], length: int, block: int, shift: int = 0) -> list[Part]:
    """The forwards in which `counts` positions of each row, of `length`, are recomputed; slices are a power of two of
    blocks wide, and the position before them that shifted logits need."""
    widest = max((count for count in counts if count < length), default=0)
    blocks = 1 << (-(-max(widest - shift, 1) // block) - 1).bit_length()
    parts = [Part("slices", min(blocks * block + shift, length))] if widest else []
    whole = sum(count == length for count in counts)
    return parts + [Part("whole", 1 << bit) for bit in reversed(range(whole.bit_length())) if whole >> bit & 1]
