"""`PartialForward`: the model's body, run on chosen positions only; the K/V of all others are those computed last.

Knows how rows become forwards: whole canvases share one, and so do slices. Which positions are due is decided
elsewhere, how a model is called in the adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from asrd.engine.caches.layer import CanvasCache, copy_lines
from asrd.models.adapter import AttentionLayout, ModelAdapter


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
    ) -> None:
        self.adapter, self.inputs, self.positions = adapter, inputs, positions
        self.key_mask = adapter.key_mask(attention)
        self.length, self.cache = length, CanvasCache(length)
        self.hidden = torch.empty(0)

    def recompute(self, embeds: Tensor, due: Tensor, layout: AttentionLayout | None = None) -> Tensor:
        """Hidden states [N, M, D] of embeds [N, M, D], fresh where `due` [B, M] says so; the first time, everywhere on
        the canvas. M is L, or more with a layout.

        The host looks once: how much is due?
        """
        batch, copies, room = len(due), len(embeds) // len(due), due.shape[1] - self.length
        if len(self.hidden) == 0 and room:
            self.cache = CanvasCache(self.length, room)
        counts, behind = torch.stack([due.sum(1), due[:, self.length :].sum(1)]).tolist()
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

    def put(self, source: PartialForward, rows: Tensor, slots: Tensor, size: int) -> None:
        """Take over what is known of rows of another one; this one has `size` of them."""
        for new, old in ((self.positions, source.positions), (self.key_mask, source.key_mask)):
            if new is not None and old is not None:
                copy_lines(old, rows, new, slots)
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
        """The positions `due` [R, M] of these lines, in `width` slots each; where fewer are due, some remain unused.

        layout: attention where some of them lie behind the canvas, `extra` of a line at most.
        """
        columns = due.byte().argsort(dim=1, descending=True, stable=True)[:, :width]
        used = torch.arange(width, device=due.device) < due.sum(1, keepdim=True)
        every = torch.arange(len(embeds), device=due.device) if lines is None else lines
        self.cache.aim(len(embeds), lines, torch.where(used, columns, -1), extra)
        inputs: dict[str, Any] = {"past_key_values": self.cache, "use_cache": True}
        if layout is not None:
            inputs |= self._laid_out(layout, every % len(layout.visible), columns, extra)
        else:
            inputs["position_ids"] = columns if self.positions is None else self.positions[every[:, None], columns]
            if self.key_mask is not None:
                mask = _of(lines, self.key_mask)
                inputs["attention_mask"] = mask if mask.dim() == 2 else mask.expand(-1, -1, width, -1)
        fresh = self.adapter.body(embeds[every[:, None], columns], inputs)
        here = (every[:, None].to(fresh.device), columns.to(fresh.device))
        self._buffer(embeds, fresh)[here] = fresh

    def _buffer(self, embeds: Tensor, fresh: Tensor) -> Tensor:
        """`hidden`, allocated when it is first needed."""
        if len(self.hidden) == 0:
            self.hidden = fresh.new_zeros(*embeds.shape[:2], fresh.shape[2])
        return self.hidden

    def _laid_out(self, layout: AttentionLayout, rows: Tensor, columns: Tensor, extra: int) -> dict[str, Tensor]:
        """Attention mask and position ids of the columns [R, W] of these rows [R], as the layout has them."""
        visible = layout.visible[rows[:, None], columns][:, :, : self.length + extra]
        return {
            "attention_mask": self.adapter.layout_mask(visible),
            "position_ids": layout.positions[rows[:, None], columns],
        }


def share_forwards(counts: list[int], length: int) -> list[tuple[list[int], int]]:
    """Rows that share a forward, and its width, given how many positions of each row are due.

    Whole canvases, rows behind them included, go with whole canvases. Slices share a forward as long as at least two
    thirds of every row's slots are used; rows with nothing due are left out.
    """
    groups: list[tuple[list[int], int]] = []
    for row in sorted((row for row, count in enumerate(counts) if count), key=lambda row: -counts[row]):
        if groups and _may_share(counts[row], groups[-1][1], length):
            groups[-1][0].append(row)
        else:
            groups.append(([row], counts[row]))
    return [(sorted(rows), width) for rows, width in groups]


def _may_share(count: int, width: int, length: int) -> bool:
    return count == width or ((count < length) == (width < length) and width != length and 3 * count >= 2 * width)


def _of(lines: Tensor | None, values: Tensor) -> Tensor:
    return values if lines is None else values[lines.to(values.device)]
