"""`BlockBody`: the forward passes of a decode on a block-diffusion model: the open block of each row, and the exact K/V
of the blocks before it.

Attention is block-causal: a position sees its own block and those before it, so nothing behind the open block is
computed, and a finished block's K/V never change. They are stored from clean embeddings of its final tokens, together
with the first forward of the next block; so are those of the prompt. Knows blocks and rows. What is written into the
open block is the decoder's affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd.engine.caches.block_layer import BlockCache
from asrd.engine.decoder import Decoder
from asrd.engine.request import Request
from asrd.models.adapter import ModelAdapter

CHUNK = 512  # positions of one forward, at most, before the open block's


class Part(NamedTuple):
    """One forward: the blocks first, first + 1, ... of these rows, `width` of them; with `probe`, two of them and the
    first once more, as the decoder edits it."""

    rows: list[int]
    first: list[int]
    width: int
    probe: bool = False


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
        """[B] forward passes so far."""
        self.boundary = request.config.boundary if adapter.takes_block_mask else "apart"
        if request.config.logprobs:
            self.one_step_a_pass()
        self.fused: tuple[Tensor, Tensor, Tensor] | None = None  # rows of the last forward, block and anchors before it
        self.hidden = torch.empty(0)

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
        opened = self.opened(decoder)
        self._settle(decoder, opened)
        fused = self._fusible(decoder, opened)
        live, stored, ends, both = torch.stack([~decoder.state.done, self.stored, opened + 1, fused]).tolist()
        due = [(row, stored[row], ends[row]) for row, on in enumerate(live) if on and not both[row]]
        for part in self._parts(due):
            self._forward(decoder, part)
        rows = [row for row, on in enumerate(both) if on]
        if rows:
            self._forward(decoder, Part(rows, [stored[row] for row in rows], 2, probe=True))
        self.fused = (fused, decoder.state.active.clone(), decoder.state.anchors.clone()) if rows else None
        self.stored.copy_(torch.where(decoder.state.done, self.stored, opened))
        return self.hidden

    def one_step_a_pass(self) -> None:
        """For observers, who are shown every step by itself. Tokens and steps do not change by it."""
        self.boundary = "merged" if self.boundary == "fused" else self.boundary

    def ahead(self, decoder: Decoder) -> Tensor | None:
        """[B] bool, after a commit: the rows whose next block has been computed already, together with the check that
        their block has passed; None: there are none."""
        if self.fused is None:
            return None
        fused, active, anchors = self.fused
        state, self.fused = decoder.state, None
        columns = self._positions(self.stored)
        same = (self.kept.gather(1, columns) == self._tokens(decoder, columns)).all(1)
        rows = fused & ~state.done & same & (state.active == active + 1) & (state.anchors == anchors)
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

    def _parts(self, due: list[tuple[int, int, int]]) -> Iterator[Part]:
        """The forwards of rows (row, first block, one past the last), the last block being the open one. Those that
        wait to be stored go with it, or before it where that is asked for."""
        together = 1 if not self.adapter.takes_block_mask else max(CHUNK // self.block, 2)
        if self.boundary == "apart":
            yield from self._chunks([(row, first, end - 1) for row, first, end in due if end - first > 1], together)
            due = [(row, end - 1, end) for row, _, end in due]
        yield from self._chunks(due, together)

    def _chunks(self, due: list[tuple[int, int, int]], together: int) -> Iterator[Part]:
        while due:
            widths = sorted({min(end - first, together) for _, first, end in due})
            for width in widths:
                group = [(row, first) for row, first, end in due if min(end - first, together) == width]
                for part in self._shared(group):
                    yield Part([row for row, _ in part], [first for _, first in part], width)
            due = [(row, first + together, end) for row, first, end in due if end - first > together]

    def _shared(self, group: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Without a mask, rows share a forward only if they are at the same block."""
        if self.adapter.takes_block_mask:
            return [group]
        return [[item for item in group if item[1] == first] for first in sorted({first for _, first in group})]

    def _forward(self, decoder: Decoder, part: Part) -> None:
        batch, size, device = len(self.stored), self.block, self.stored.device
        rows = torch.tensor(part.rows, device=device)
        first = torch.tensor(part.first, device=device)
        positions = first[:, None] * size + torch.arange(part.width * size, device=device)
        columns = self._columns(positions, rows)
        embeds = self._embeds(decoder, rows, positions, columns, edit=not part.probe)
        end = (max(part.first) + part.width) * size
        key = torch.arange(end + size * part.probe, device=device)
        mask = key < (positions // size + 1)[:, :, None] * size
        if part.probe:  # once more the first block, behind the others, which it does not see and which do not see it
            again, last = positions[:, :size], key >= (positions[:, -1:] + 1)
            probed = (key < again[:, :1]) | (last & (key < positions[:, -1:] + 1 + size))
            embeds = torch.cat([embeds, decoder.embed_at(rows, columns[:, :size])], dim=1)
            mask = torch.cat([mask, probed[:, None].expand(-1, size, -1)], dim=1)
            positions, columns = torch.cat([positions, again], dim=1), torch.cat([columns, columns[:, :size]], dim=1)
            end += size
        same = len(set(part.first)) == 1
        every = None if len(rows) == batch else rows
        self.cache.aim(batch, every, part.first[0] * size if same else first * size, end)
        visible = None if part.width == 1 and same else mask
        fresh = self.adapter.body(embeds, self.adapter.block_inputs(self.cache, positions, visible))
        self._keep(fresh, rows, columns, 2 if part.probe else 1)
        self.computed[rows] += positions.shape[1]
        self.forwards[rows] += 1

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

    def _keep(self, fresh: Tensor, rows: Tensor, columns: Tensor, blocks: int) -> None:
        """Hidden states of the last so many blocks."""
        if len(self.hidden) == 0:
            self.hidden = fresh.new_zeros(len(self.stored), self.canvas, fresh.shape[2])
        width = blocks * self.block
        last = columns[:, -width:].to(fresh.device)
        self.hidden[rows[:, None].to(fresh.device), last] = fresh[:, -width:]

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
