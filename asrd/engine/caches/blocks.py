"""`BlockBody`: the forward passes of a decode on a block-diffusion model: the open block of each row, and the exact K/V
of the blocks before it.

Attention is block-causal: a position sees its own block and those before it, so nothing behind the open block is
computed, and a finished block's K/V never change. They are stored from clean embeddings of its final tokens, together
with the first forward of the next block; so are those of the prompt. Knows blocks and rows. What is written into the
open block is the decoder's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd.engine.caches.block_behind import Behind, edited_block, witnesses
from asrd.engine.caches.block_layer import BlockCache
from asrd.engine.decoder import Decoder
from asrd.engine.request import Request
from asrd.models.adapter import ModelAdapter

CHUNK = 512  # positions of one forward, at most, before the open block's


class Due(NamedTuple):
    """The blocks from `first` to before `end` of a row, the last one open, and how many witnesses that has."""

    row: int
    first: int
    end: int
    witnesses: int


class Part(NamedTuple):
    """One forward: the blocks first, first + 1, ... of these rows, `width` of them, and so many witnesses of each; with
    `probe`, two of them and the first once more, as the decoder edits it."""

    rows: list[int]
    first: list[int]
    width: int
    witnesses: list[int]
    probe: bool = False


class Checked(NamedTuple):
    """The rows [B] bool whose last forward only checked their open block, and what there was before it."""

    rows: Tensor
    active: Tensor  # [B] int64
    anchors: Tensor  # [B] int64, how many
    tokens: Tensor  # [B, BL] int64, of the open block


class BlockBody:
    """Hidden states for the loop, valid in the open block of each row."""

    def __init__(self, adapter: ModelAdapter, request: Request) -> None:
        self.adapter, self.request, self.block = adapter, request, request.rules.block_length
        (batch, width), device = request.prompt.shape, request.prompt.device
        self.canvas = width + request.length
        room = (self.canvas // self.block + 1) * self.block
        self.cache = BlockCache(room)
        self.stored = torch.zeros(batch, dtype=torch.int64, device=device)
        """[B] how many blocks of each row have their final K/V."""
        self.kept = torch.full((batch, room), -1, dtype=torch.int64, device=device)
        """[B, room] the token that each position's K/V come from, -1 where they come from another embedding."""
        self.computed = torch.zeros_like(self.stored)
        """[B] positions computed so far."""
        self.forwards = torch.zeros_like(self.stored)
        """[B] forward passes so far; with `watched` those that it takes without."""
        self.boundary = request.config.boundary if adapter.takes_block_mask else "apart"
        if self.boundary == "fused" and request.config.logprobs:
            self.boundary = "merged"
        self.watched = False
        """Is every step to be made by itself, for observers? Tokens and steps do not change by it."""
        self.checked: Checked | None = None
        self.hidden = torch.empty(0)

    @property
    def bytes(self) -> int:
        """Device memory of the K/V and hidden states."""
        return self.cache.bytes + self.hidden.nbytes

    @property
    def starts(self) -> Tensor:
        """[B] real tokens of each prompt."""
        assert self.request.starts is not None
        return self.request.starts

    def opened(self, decoder: Decoder) -> Tensor:
        """[B] the open block, counted from the row's first token."""
        return self.starts // self.block + decoder.state.active

    def __call__(self, decoder: Decoder) -> Tensor:
        """Hidden states [B, L, D] of the canvas, fresh in the open blocks of the rows that are not done. The host looks
        once: which blocks are due?"""
        self.compute(decoder, self.look(decoder).tolist())
        return self.hidden

    def look(self, decoder: Decoder) -> Tensor:
        """[5, B] int64, what the host must know before the coming forwards: whether a row goes on, how many of its
        blocks are stored, which block is behind the open one, how many witnesses that has, and whether it is fused."""
        opened = self.opened(decoder)
        self._settle(decoder, opened)
        checked = decoder.witness_positions()
        used = torch.zeros_like(opened) if checked is None else (checked < decoder.state.length).sum(1)
        return torch.stack([~decoder.state.done, self.stored, opened + 1, used, self._fusible(decoder, opened)])

    def compute(
        self, decoder: Decoder, told: list[list[int]], open_blocks: Callable[[int], None] | None = None
    ) -> None:
        """The forwards of a step; told is what `look` says. open_blocks: does the rows of which nothing but the open
        block is due, up to so many blocks, together."""
        live, stored, ends, extra, both = told
        due = [Due(row, stored[row], ends[row], extra[row]) for row, on in enumerate(live) if on]
        fused = [item for item in due if both[item.row]]
        plain = [item for item in due if self.watched or not both[item.row]]
        if self.boundary == "apart":
            waiting = [item._replace(end=item.end - 1, witnesses=0) for item in plain if item.end - item.first > 1]
            self._forwards(decoder, waiting)
            plain = [item._replace(first=item.end - 1) for item in plain]
        alone = [item for item in plain if item.end - item.first == 1]
        if open_blocks is not None and alone:
            open_blocks(max(item.end for item in alone))
            plain = [item for item in plain if item.end - item.first > 1]
        self._forwards(decoder, plain)
        opened, state, self.checked = self.opened(decoder), decoder.state, None
        if fused:
            if not self.watched:
                rows, first, _, extra = map(list, zip(*fused, strict=True))
                self._forward(decoder, Part(rows, first, 2, extra, probe=decoder.edits_embeddings))
            tokens = self._tokens(decoder, self._positions(opened))
            self.checked = Checked(self._fusible(decoder, opened), state.active.clone(), state.anchors.clone(), tokens)
        self.stored.copy_(torch.where(state.done, self.stored, opened))

    def open_blocks(self, decoder: Decoder, told: Tensor, blocks: int) -> None:
        """The open blocks of all rows in one forward that sees so many blocks: its shapes depend on nothing else, and
        the host looks at nothing. Rows of which more is due, or nothing, must be computed after it, or never again."""
        live, stored, end, used, fused = told
        size, opened, every = self.block, end - 1, torch.arange(told.shape[1], device=told.device)
        positions = self._positions(opened)
        columns = self._columns(positions)
        embeds = self._embeds(decoder, every, positions, columns, edit=True)
        checked, behind, keys = decoder.witness_positions(), None, blocks * size
        if checked is not None:
            behind = witnesses(decoder, every, self.starts, checked.shape[1], used)
            embeds, columns = torch.cat([embeds, behind.embeds], 1), torch.cat([columns, behind.columns], 1)
            keys = min(keys + behind.width, self.kept.shape[1])
        self.cache.aim(len(every), None, opened * size, keys)
        fresh = self.adapter.body(embeds, self._inputs(positions, keys, behind, whole=False))
        self._keep(fresh, every, columns, columns.shape[1], decoder)
        due = live if self.watched else live * (1 - fused)
        if self.boundary != "apart":
            due = due * (stored == opened)
        self.computed.add_(due * (size + used))
        self.forwards.add_(due)

    def ahead(self, decoder: Decoder) -> Tensor | None:
        """[B] bool, after a commit: the rows whose next block has been computed already, together with the check that
        their block has passed; None: there are none."""
        if self.checked is None:
            return None
        rows, active, anchors, tokens = self.checked
        state, self.checked = decoder.state, None
        same = (self._tokens(decoder, self._positions(self.stored)) == tokens).all(1)
        rows = rows & ~state.done & same & (state.active == active + 1) & (state.anchors == anchors)
        if self.watched:
            self.forwards -= rows.long()
            return None
        return rows if bool(rows.any()) else None

    def _fusible(self, decoder: Decoder, opened: Tensor) -> Tensor:
        """[B] bool: the rows whose open block is only checked, and has another behind it."""
        checks = decoder.checks() if self.boundary == "fused" else None
        if checks is None:
            return torch.zeros_like(decoder.state.done)
        last = (self.starts + decoder.state.lengths) // self.block - 1
        return checks & (opened < last) & (self.stored == opened)

    def put(self, source: BlockBody, rows: tuple[Tensor, Tensor], lines: tuple[Tensor, Tensor], size: int) -> None:
        """Take over what is stored of rows of another one: the first of each pair names them there, the second here,
        of `size`."""
        for name in ("stored", "kept", "computed", "forwards"):
            getattr(self, name)[rows[1]] = getattr(source, name)[rows[0]]
        self.cache.put(source.cache, *lines, size)

    def _settle(self, decoder: Decoder, opened: Tensor) -> None:
        """The block before the open one is stored already if the last forward of it read its final tokens."""
        behind = self.stored < opened
        columns = self._positions(self.stored.clamp(max=self.kept.shape[1] // self.block - 1))
        same = (self.kept.gather(1, columns) == self._tokens(decoder, columns)).all(1)
        self.stored.add_(behind & same)

    def _forwards(self, decoder: Decoder, due: list[Due]) -> None:
        """Blocks that wait to be stored go with the open one."""
        together = 1 if not self.adapter.takes_block_mask else max(CHUNK // self.block, 2)
        for part in self._chunks(due, together):
            self._forward(decoder, part)

    def _chunks(self, due: list[Due], together: int) -> Iterator[Part]:
        """So many blocks of a row at a time; witnesses go with the last of them."""
        while due:
            widths = sorted({min(item.end - item.first, together) for item in due})
            for width in widths:
                group = [item for item in due if min(item.end - item.first, together) == width]
                for part in self._shared(group):
                    rows, first, end, witnesses = map(list, zip(*part, strict=True))
                    last = [stop == begin + width for begin, stop in zip(first, end, strict=True)]
                    here = [number * is_last for number, is_last in zip(witnesses, last, strict=True)]
                    yield Part(rows, first, width, here)
            due = [item._replace(first=item.first + together) for item in due if item.end - item.first > together]

    def _shared(self, group: list[Due]) -> list[list[Due]]:
        """Without a mask, rows share a forward only if they are at the same block."""
        if self.adapter.takes_block_mask:
            return [group]
        return [[item for item in group if item.first == first] for first in sorted({item.first for item in group})]

    def _forward(self, decoder: Decoder, part: Part) -> None:
        batch, size, device = len(self.stored), self.block, self.stored.device
        rows = torch.tensor(part.rows, device=device)
        first = torch.tensor(part.first, device=device)
        positions = first[:, None] * size + torch.arange(part.width * size, device=device)
        columns = self._columns(positions, rows)
        embeds = self._embeds(decoder, rows, positions, columns, edit=not part.probe)
        self.computed[rows] += positions.shape[1]
        behind: Behind | None = None
        if part.probe:
            behind = edited_block(decoder, rows, positions[:, :size], columns[:, :size])
        elif any(part.witnesses):
            number = torch.tensor(part.witnesses, device=device)
            behind = witnesses(decoder, rows, self.starts[rows], max(part.witnesses), number)
        same, last = len(set(part.first)) == 1, size
        end = (max(part.first) + part.width) * size
        if behind is not None:
            end, last = end + behind.width, last + behind.width
            embeds, columns = torch.cat([embeds, behind.embeds], 1), torch.cat([columns, behind.columns], 1)
            self.computed[rows] += behind.used
        every = None if len(rows) == batch else rows
        self.cache.aim(batch, every, part.first[0] * size if same else first * size, end)
        fresh = self.adapter.body(embeds, self._inputs(positions, end, behind, part.width == 1 and same))
        self._keep(fresh, rows, columns, last, decoder)
        self.forwards[rows] += 1

    def _inputs(self, positions: Tensor, end: int, behind: Behind | None, whole: bool) -> dict[str, Any]:
        """The arguments of a forward of blocks at these positions [R, N] besides the embeddings, which sees `end` keys.
        whole: every query of the blocks sees all of these that are not of the rows behind them."""
        size, places = self.block, positions
        if behind is not None:
            places = torch.cat([positions, behind.positions], dim=1)
            if not self.adapter.takes_block_mask:
                layout = behind.beside_flash(self.adapter, positions.shape[1], end, self.request.impl)
                return self.adapter.block_inputs(self.cache, places, None) | layout
        elif whole:
            return self.adapter.block_inputs(self.cache, places, None)
        visible = torch.arange(end, device=places.device) < (positions // size + 1)[:, :, None] * size
        if behind is not None:
            visible = torch.cat([visible, behind.visible(positions, size, end)], dim=1)
        return self.adapter.block_inputs(self.cache, places, visible)

    def _embeds(self, decoder: Decoder, rows: Tensor, positions: Tensor, columns: Tensor, edit: bool) -> Tensor:
        """Clean embeddings, but for the open block, which the decoder may edit; and note which tokens they are of."""
        tokens = decoder.state.tokens[rows[:, None], columns]
        embeds = F.embedding(tokens, decoder.table)
        if edit and decoder.edits_embeddings:
            last = slice(positions.shape[1] - self.block, None)
            is_open = positions[:, -1:] // self.block == self.opened(decoder)[rows][:, None]
            edited = decoder.embed_at(rows, columns[:, last])
            changed = (edited != embeds[:, last]).any(2) & is_open
            embeds[:, last] = torch.where(is_open[..., None], edited, embeds[:, last])
            tokens[:, last] = torch.where(changed, -1, tokens[:, last])
        self.kept[rows[:, None], positions] = tokens
        return embeds

    def _keep(self, fresh: Tensor, rows: Tensor, columns: Tensor, last: int, decoder: Decoder) -> None:
        """Hidden states of the last so many positions; those of witnesses behind the canvas."""
        if len(self.hidden) == 0:
            checked = decoder.witness_positions()
            width = self.canvas + (0 if checked is None else checked.shape[1])
            self.hidden = fresh.new_zeros(len(self.stored), width, fresh.shape[2])
        here = columns[:, -last:].to(fresh.device)
        self.hidden[rows[:, None].to(fresh.device), here] = fresh[:, -last:]

    def _positions(self, block: Tensor) -> Tensor:
        """[R, BL] the positions of a block of each row."""
        return block[:, None] * self.block + torch.arange(self.block, device=block.device)

    def _columns(self, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """The canvas columns of positions [R, W] of these rows (None: all)."""
        starts = self.starts if rows is None else self.starts[rows]
        padding = self.request.prompt.shape[1] - starts
        return (positions + padding[:, None]).clamp(max=self.canvas - 1)

    def _tokens(self, decoder: Decoder, positions: Tensor) -> Tensor:
        return decoder.state.tokens.gather(1, self._columns(positions))
