"""`CanvasCache`: the forwards of a batch on a model with full attention, of whole canvases or of what is due.

reach None: everything in each step. "dual": the active block; "prefix": that and all that follows. A row is refreshed
by a forward of its whole canvas at its first step and whenever its active block changes. All other K/V are those
computed last (docs/semantics.md, KV caches). Knows what is due and how rows share forwards; rows never influence each
other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd.engine.caches.kv import KV
from asrd.engine.decoder import Appended, Decoder
from asrd.models.extra_rows import AttentionLayout
from asrd_kernels import DecodeState, Rows

NOWHERE = torch.iinfo(torch.int64).max  # no block has this number


class CanvasPart(NamedTuple):
    """One forward: of the next `size` rows, those of which most is due first, `width` canvas positions and `extra`
    appended rows, as many as the widest of them needs."""

    size: int
    width: int
    extra: int

    @property
    def name(self) -> CanvasPart:
        """Key of its CUDA graph."""
        return self


@dataclass
class Stored(Rows):
    """What is remembered of each row's K/V."""

    block: Tensor  # [B] the active block of the step before
    probed: Tensor  # [B] the block with K/V of probed embeddings
    age: Tensor  # [B] steps since the refresh
    tokens: Tensor  # [B, G] those whose K/V are stored


class CanvasCache:
    """Hidden states [N, L + W, D], fresh where they were due; N is B, or 2 B with classifier-free guidance.

    A step calls `prepare`, `plan` and, for each part, `forward`. With `fixed` shapes only `plan` looks at the device.
    """

    def __init__(self, decoder: Decoder, state: DecodeState, fixed: bool) -> None:
        self.adapter, self.decoder, self.fixed = decoder.adapter, decoder, fixed
        self.reach, self.refresh = decoder.config.kv_cache, decoder.config.kv_refresh
        (self.batch, self.length), self.copies = state.tokens.shape, 2 if state.rules.cfg_scale > 0 else 1
        appended = decoder.append(state)
        self.extra = 0 if appended is None else appended.column.shape[1]
        self.lines, self.room = self.batch * self.copies, self.length + self.extra
        none = torch.zeros_like(state.active)
        self.stored = Stored(none, torch.full_like(none, NOWHERE), none.clone(), torch.zeros_like(state.last))
        self.kv = KV(self.lines, self.room + 1)  # the last column is for slots that are not in use
        self.embeds = decoder.table.new_zeros(self.lines if fixed else 0, self.room, decoder.table.shape[1])
        self.hidden = self.embeds.new_zeros(0)
        self.due = torch.zeros(self.batch, self.room, dtype=torch.bool, device=none.device)
        self.counts = torch.zeros(2, self.batch, dtype=torch.int64, device=none.device)  # of canvas, of appended rows
        self.order = none.clone()  # the rows, those of which most is due first

    def prepare(self, embeds: Tensor, appended: Appended | None, state: DecodeState) -> None:
        """Keep the embeddings of the coming forwards, and find what is due."""
        live = ~state.done
        state.forwards.add_(live)
        if appended is not None:
            embeds = torch.cat([embeds, F.embedding(appended.tokens, self.decoder.table)], 1)
        if self.copies == 2:
            embeds = torch.cat([embeds, self._blind(embeds, appended, state)])
        self.embeds = self.embeds.copy_(embeds) if self.fixed else embeds
        if self.reach is None:  # everything is due
            counts = torch.stack([live * self.length, live * self.extra])
            state.computed.add_(live * (state.real.sum(1) + self.extra))
        else:
            due = self._due(state)
            state.computed.add_((due & state.real).sum(1))
            if appended is not None:
                used = appended.used & live[:, None]
                state.computed.add_(used.sum(1))
                due = torch.cat([due, used], 1)
            self.due.copy_(due)
            counts = torch.stack([due[:, : self.length].sum(1), due[:, self.length :].sum(1)])
        self.counts.copy_(counts)
        self.order.copy_(counts[0].argsort(descending=True, stable=True))

    def _blind(self, embeds: Tensor, appended: Appended | None, state: DecodeState) -> Tensor:
        """The embeddings of classifier-free guidance's second half: masks in place of what is known."""
        known = state.known
        if appended is not None:
            known = torch.cat([known, known.gather(1, appended.column)], 1)
        return torch.where(known[..., None], self.decoder.table[state.rules.mask_id], embeds)

    def _due(self, state: DecodeState) -> Tensor:
        """[B, L] bool: what the coming forward recomputes, all of a row that is refreshed, nothing of a done one.

        Called once a step: it remembers what the next one needs.
        """
        live, size, stored = ~state.done[:, None], state.rules.block_length, self.stored
        place = torch.arange(self.length, device=live.device) - state.prompt_length
        first = state.step == 0
        changed = (state.active != stored.block) & ~first
        refresh = first | changed
        if self.refresh is not None:
            refresh |= stored.age >= self.refresh
        begin = state.active[:, None] * size
        due = place >= begin - self.adapter.shift
        if self.reach == "dual":
            due &= place < begin + size
        due |= place.div(size, rounding_mode="floor") == stored.probed[:, None]
        due[:, state.prompt_length :] |= in_same_block(state.generated != stored.tokens, size)
        due = (due | refresh[:, None]) & live
        # The refresh after a change of block checks the last drafts of the block before. Their K/V come from probed
        # embeddings and nothing else would replace them, so the next step recomputes that block, too.
        probed = changed & state.pending.any(1) & self.decoder.probes
        stored.probed.copy_(torch.where(probed, stored.block, NOWHERE))
        stored.block.copy_(state.active)
        stored.age.copy_(torch.where(refresh, 1, stored.age + 1))
        stored.tokens.copy_(torch.where(due[:, state.prompt_length :], state.generated, stored.tokens))
        return due

    def plan(self, read: Callable[[Tensor], list[Any]]) -> list[CanvasPart]:
        """The forwards of this step; the host reads how much of each row is due, unless that is everything anyway."""
        if self.fixed:
            return self._fixed_plan(read)
        parts: list[CanvasPart] = []
        for canvas, extra in sorted(zip(*read(self.counts), strict=True), key=lambda due: -due[0]):
            size, width, most = parts[-1] if parts else (0, 0, 0)
            # Whole canvases go together, and so do slices if at least two thirds of each row's slots are used.
            if 0 < canvas == width or (0 < width < self.length and 3 * canvas >= 2 * width):
                parts[-1] = CanvasPart(size + 1, width, max(most, extra))
            elif canvas:
                parts.append(CanvasPart(1, canvas, extra))
        return parts

    def _fixed_plan(self, read: Callable[[Tensor], list[Any]]) -> list[CanvasPart]:
        """In few shapes: slices of all rows, a power of two of blocks wide, then whole canvases of 1, 2, 4, ... rows.
        What the slices compute of a row that is due whole, or not at all, is replaced or never read."""
        size, shift = self.decoder.rules.block_length, self.adapter.shift
        if self.reach is None:
            return [CanvasPart(self.batch, self.length, self.extra)]
        due = read(self.counts)[0]
        widest = max((count for count in due if count < self.length), default=0)
        blocks = 1 << (-(-max(widest - shift, 1) // size) - 1).bit_length()
        slices = [CanvasPart(self.batch, min(blocks * size + shift, self.length - 1), self.extra)] if widest else []
        whole = sum(count == self.length for count in due)
        bits = reversed(range(whole.bit_length()))
        return slices + [CanvasPart(1 << bit, self.length, self.extra) for bit in bits if whole >> bit & 1]

    def forward(self, part: CanvasPart, appended: Appended | None, state: DecodeState) -> None:
        """Run the forward of `part`, each once and in the order of `plan`, and keep its hidden states.

        Its shapes depend on nothing but `part`.
        """
        device = self.order.device
        rows = torch.arange(self.batch, device=device) if part.size == self.batch else self.order[: part.size]
        rows = rows.repeat(self.copies)
        lines = rows + torch.arange(self.copies, device=device).repeat_interleave(part.size) * self.batch
        whole = part.size == self.batch and (part.width, part.extra) == (self.length, self.extra)
        columns, used = leftmost(self.due[rows, : self.length], part.width)
        if part.extra:
            there = torch.arange(self.length, self.length + part.extra, device=device).expand(len(rows), -1)
            columns = torch.cat([columns, there], 1)
            used = torch.cat([used, self.due[rows[:, None], there]], 1)
        inputs = self._inputs(part, rows, columns, appended, state)
        if self.reach is not None:
            here = None if part.size == self.batch else lines
            self.kv.aim(here, torch.where(used, columns, self.room), self.length + part.extra)
            inputs |= {"past_key_values": self.kv, "use_cache": True}
        embeds = self.embeds if whole else self.embeds[lines[:, None], columns]
        fresh = self.adapter.body(embeds, inputs)
        if whole and not self.fixed:
            self.hidden = fresh
        else:
            self._keep(fresh, lines, None if whole else columns)
        if part.size < self.batch:
            self.order.copy_(self.order.roll(-part.size))

    def _inputs(
        self, part: CanvasPart, rows: Tensor, columns: Tensor, appended: Appended | None, state: DecodeState
    ) -> dict[str, Any]:
        """The arguments of a forward besides embeddings and K/V."""
        attention, places = state.real[rows].long() if state.padded else None, state.places[rows]
        if part.width == self.length and not part.extra:
            return self.adapter.inputs(attention, places if state.padded else None)
        mask = self.adapter.key_mask(attention)
        if mask is not None and mask.dim() == 4:
            mask = mask.expand(-1, -1, part.width, -1)
        inputs: dict[str, Any] = {"use_cache": False} if self.adapter.takes_use_cache else {}
        if not part.extra:
            inputs |= {} if mask is None else {"attention_mask": mask}
            return inputs | {"position_ids": places.gather(1, columns)}
        assert appended is not None
        column, hidden, shared = (v[rows, : part.extra] for v in (appended.column, appended.hidden, appended.shared))
        places = torch.cat([places, places.gather(1, column)], 1)
        layout = AttentionLayout(state.real[rows], hidden, shared, places)
        # on a CPU one attention with a mask is quicker than two without, for slices are short
        one_call = self.reach and self.decoder.impl == "torch" and self.adapter.attention == "sdpa"
        way: Any = "mask" if one_call and places.device.type == "cpu" else None
        inputs |= self.adapter.layout_inputs(layout, part.width, mask, self.decoder.impl, way)
        return inputs | {"position_ids": places.gather(1, columns)}

    def _keep(self, fresh: Tensor, lines: Tensor, columns: Tensor | None) -> None:
        """Hidden states of these columns (None: all of all lines), in a buffer that graphs can share."""
        if self.hidden.shape[:2] != self.embeds.shape[:2]:
            self.hidden = fresh.new_zeros(*self.embeds.shape[:2], fresh.shape[2])
        if columns is None:
            self.hidden.copy_(fresh)
        else:
            self.hidden[lines[:, None].to(fresh.device), columns.to(fresh.device)] = fresh

    def ahead(self, state: DecodeState) -> Tensor | None:
        """None: no step was computed together with the one before (see `BlockCache`)."""
        return None

    def put(self, slots: Tensor, source: CanvasCache, rows: Tensor) -> None:
        """Take over rows of another one with the same canvas."""
        self.stored.put(slots, source.stored, rows)
        self.kv.put(self._lines(slots), source.kv, source._lines(rows))
        if not len(self.hidden) and len(source.hidden):  # all may be done, so that nothing is due before it is read
            self.hidden = source.hidden.new_zeros(self.lines, *source.hidden.shape[1:])

    def clear(self, slots: Tensor) -> None:
        """Forget the K/V of these rows."""
        self.kv.clear(self._lines(slots))

    def _lines(self, rows: Tensor) -> Tensor:
        return torch.cat([rows + copy * self.batch for copy in range(self.copies)])

    @property
    def bytes(self) -> int:
        """Device memory of K/V, embeddings and hidden states."""
        return self.kv.bytes + self.embeds.nbytes + self.hidden.nbytes


def leftmost(flags: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """[R, number] the columns of the first flags [R, N] that are set, others where there are fewer; and which are."""
    if number == flags.shape[1]:
        return torch.arange(number, device=flags.device).expand(len(flags), -1), flags
    columns = flags.byte().argsort(dim=1, descending=True, stable=True)[:, :number]
    return columns, flags.gather(1, columns)


def in_same_block(changed: Tensor, size: int) -> Tensor:
    """[B, G] bool: the blocks in which `changed` [B, G] holds anywhere."""
    length = changed.shape[1]
    size = min(size, length)
    blocks = F.pad(changed, (0, -length % size)).view(len(changed), -1, size).any(2)
    return blocks.repeat_interleave(size, 1)[:, :length]
