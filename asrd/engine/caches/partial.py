"""`PartialForward`: the model's body, run on chosen positions only; the K/V of all others are those computed last.

Knows how rows become forwards: whole canvases share one, and so do slices. Which positions are due is decided
elsewhere, how a model is called in the adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asrd.engine.caches.layer import CanvasCache
from asrd.engine.caches.stored import copy_lines
from asrd.models.adapter import LayoutWay, ModelAdapter
from asrd.models.extra_rows import AttentionLayout


class PartialForward:
    """Hidden states of B canvases: fresh ones where they are due, the last computed ones elsewhere.

    inputs, attention [N, L] and positions [N, L] (None: nothing is padded) have N = B lines or, with classifier-free
    guidance, 2 B, of which line B + b is row b without its prompt. An attention layout may put rows behind the canvas,
    the same number in each forward; their K/V last no longer than it.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        inputs: dict[str, Any],
        attention: Tensor | None,
        positions: Tensor | None,
        length: int,
        impl: str = "auto",
    ) -> None:
        self.adapter, self.inputs, self.positions, self.impl = adapter, inputs, positions, impl
        self.key_mask = adapter.key_mask(attention)
        self.length, self.cache = length, CanvasCache(length)
        self.hidden = torch.empty(0)

    def recompute(self, embeds: Tensor, due: Tensor, layout: AttentionLayout | None = None) -> Tensor:
        """Hidden states [N, M, D] of embeds [N, M, D], fresh where `due` [B, M] says so; the first time, everywhere on
        the canvas. M is L, or more with a layout.

        The host looks once: how much is due?
        """
        batch, copies = len(due), len(embeds) // len(due)
        self.make_room(due.shape[1] - self.length)
        counts, behind = torch.stack([due[:, : self.length].sum(1), due[:, self.length :].sum(1)]).tolist()
        for rows, width in share_forwards(counts, self.length):
            if len(rows) == batch:
                lines, wanted = None, due
            else:
                chosen = torch.tensor(rows, device=due.device)
                lines, wanted = torch.cat([chosen + copy * batch for copy in range(copies)]), due[chosen]
            extra = max(behind[row] for row in rows)
            if width == self.length and not extra:
                self.whole(embeds, lines)
            else:
                self.slices(embeds, lines, wanted.repeat(copies, 1), width, layout if extra else None, extra)
        return self.hidden

    def make_room(self, rows: int) -> None:
        """For so many rows behind the canvas in each forward; of effect only before the first K/V are there."""
        if len(self.hidden) == 0 and rows:
            self.cache = CanvasCache(self.length, rows)

    @property
    def bytes(self) -> int:
        """Device memory of the K/V and hidden states."""
        return self.hidden.nbytes + self.cache.bytes

    def put(self, source: PartialForward, rows: Tensor, slots: Tensor, size: int) -> None:
        """Take over what is known of rows of another one; this one has `size` of them."""
        for new, old in ((self.positions, source.positions), (self.key_mask, source.key_mask)):
            if new is not None and old is not None:
                copy_lines(old, rows, new, slots)
        self.make_room(source.cache.unused - source.length)
        self.cache.put(source.cache, rows, slots, size)
        if len(source.hidden):
            if not len(self.hidden):
                self.hidden = source.hidden.new_zeros(size, *source.hidden.shape[1:])
            copy_lines(source.hidden, rows, self.hidden, slots)

    def whole(self, embeds: Tensor, lines: Tensor | None) -> None:
        """The whole canvas of these lines (None: of all), just as without a cache."""
        self.cache.aim(len(embeds), lines)
        inputs = {
            name: _of(lines, value) if isinstance(value, Tensor) else value for name, value in self.inputs.items()
        }
        canvas = _of(lines, embeds)[:, : self.length]
        fresh = self.adapter.body(canvas, inputs | {"past_key_values": self.cache, "use_cache": True})
        hidden = self._buffer(embeds, fresh)[:, : self.length]
        if lines is None:
            hidden.copy_(fresh)
        else:
            hidden[lines.to(fresh.device)] = fresh

    def slices(
        self,
        embeds: Tensor,
        lines: Tensor | None,
        due: Tensor,
        width: int,
        layout: AttentionLayout | None = None,
        extra: int = 0,
    ) -> None:
        """The positions `due` [R, M] of these lines, in `width` slots for the canvas and `extra` for what lies behind
        it; where fewer are due, some remain unused. layout: attention if there are any of the latter.
        """
        canvas = due[:, : self.length]
        columns = canvas.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
        used = torch.arange(width, device=due.device) < canvas.sum(1, keepdim=True)
        every = torch.arange(len(embeds), device=due.device) if lines is None else lines
        mask = None if self.key_mask is None else _of(lines, self.key_mask)
        if mask is not None and mask.dim() == 4:
            mask = mask.expand(-1, -1, width, -1)
        if layout is not None:
            behind = torch.arange(self.length, self.length + extra, device=due.device).expand(len(due), -1)
            columns = torch.cat([columns, behind], dim=1)
            used = torch.cat([used, due[:, self.length : self.length + extra]], dim=1)
            all_rows = lines is None and len(embeds) == len(layout.real)
            here = layout.of(None if all_rows else every % len(layout.real), extra)
            inputs = self.adapter.layout_inputs(here, width, mask, self.impl, self._way(due.device))
            inputs["position_ids"] = here.positions.gather(1, columns)
        else:
            inputs = {} if mask is None else {"attention_mask": mask}
            inputs["position_ids"] = columns if self.positions is None else self.positions[every[:, None], columns]
        self.cache.aim(len(embeds), lines, torch.where(used, columns, self.cache.unused), extra)
        inputs |= {"past_key_values": self.cache, "use_cache": True}
        fresh = self.adapter.body(embeds[every[:, None], columns], inputs)
        self._buffer(embeds, fresh)[every[:, None].to(fresh.device), columns.to(fresh.device)] = fresh

    def _way(self, device: torch.device) -> LayoutWay | None:
        """On a CPU one attention with a mask is quicker than two without: a slice is short. None: the model's way."""
        one = device.type == "cpu" and self.impl != "triton" and self.adapter.attention == "sdpa"
        return "mask" if one else None

    def _buffer(self, embeds: Tensor, fresh: Tensor) -> Tensor:
        """`hidden`, allocated when it is first needed."""
        if len(self.hidden) == 0:
            self.hidden = fresh.new_zeros(*embeds.shape[:2], fresh.shape[2])
        return self.hidden


def share_forwards(counts: list[int], length: int) -> list[tuple[list[int], int]]:
    """Rows that share a forward, and its width, given how many canvas positions of each row are due.

    Whole canvases go with whole canvases. Slices share a forward as long as at least two thirds of every row's slots
    are used; rows with nothing due are left out.
    """
    groups: list[tuple[list[int], int]] = []
    for row in sorted((row for row, count in enumerate(counts) if count), key=lambda row: -counts[row]):
        if groups and _may_share(counts[row], groups[-1][1], length):
            groups[-1][0].append(row)
        else:
            groups.append(([row], counts[row]))
    return [(sorted(rows), width) for rows, width in groups]


def _may_share(count: int, width: int, length: int) -> bool:
    return count == width or (width < length and 3 * count >= 2 * width)


def _of(lines: Tensor | None, values: Tensor) -> Tensor:
    return values if lines is None else values[lines.to(values.device)]
