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
    """One forward: the blocks first, first + 1, ... of these rows, `width` of them."""

    rows: list[int]
    first: list[int]
    width: int


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
        self.forwards = 0
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
        live, stored, ends = torch.stack([~decoder.state.done, self.stored, opened + 1]).tolist()
        due = [(row, first, end) for row, (on, first, end) in enumerate(zip(live, stored, ends, strict=True)) if on]
        for part in self._parts(due):
            self._forward(decoder, part)
        self.stored.copy_(torch.where(decoder.state.done, self.stored, opened))
        return self.hidden

    def put(self, source: BlockBody, rows: tuple[Tensor, Tensor], lines: tuple[Tensor, Tensor], size: int) -> None:
        """Take over what is stored of rows of another one: the first of each pair names them there, the second here,
        of `size`."""
        for name in ("stored", "kept", "computed"):
            getattr(self, name)[rows[1]] = getattr(source, name)[rows[0]]
        self.cache.put(source.cache, *lines, size)

    def _settle(self, decoder: Decoder, opened: Tensor) -> None:
        """The block before the open one is stored already if the last forward of it read its final tokens."""
        behind = self.stored < opened
        columns = self._positions(self.stored.clamp(max=self.kept.shape[1] // self.block - 1))
        same = (self.kept.gather(1, columns) == self._tokens(decoder, columns)).all(1)
        self.stored.add_(behind & same)

    def _parts(self, due: list[tuple[int, int, int]]) -> Iterator[Part]:
        """The forwards of rows (row, first block, one past the last): blocks that wait to be stored before the last of
        them first, as many at a time as allowed, then the rest; rows that bring the same number share a forward."""
        together = 1 if not self.adapter.takes_block_mask else max(CHUNK // self.block, 2)
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
        embeds = self._embeds(decoder, rows, positions, columns)
        same = len(set(part.first)) == 1
        end = (max(part.first) + part.width) * size
        every = None if len(rows) == batch else rows
        self.cache.aim(batch, every, part.first[0] * size if same else first * size, end)
        mask = None
        if part.width > 1 or not same:
            mask = torch.arange(end, device=device) < (positions // size + 1)[:, :, None] * size
        fresh = self.adapter.body(embeds, self.adapter.block_inputs(self.cache, positions, mask))
        self._keep(fresh, rows, columns)
        self.computed[rows] += part.width * size
        self.forwards += 1

    def _embeds(self, decoder: Decoder, rows: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
        """Clean embeddings, but for the open block, which the decoder may edit; and note which tokens they are of."""
        state, table = decoder.state, decoder.table
        tokens = state.tokens[rows[:, None], columns]
        self.kept[rows[:, None], positions] = tokens
        last = columns[:, -self.block :]
        is_open = (positions[:, -1] // self.block == self.opened(decoder)[rows])[:, None]
        if not decoder.edits_embeddings:
            return F.embedding(tokens, table)
        edited = decoder.embed_at(rows, last)
        embeds = F.embedding(tokens, table)
        clean = embeds[:, -self.block :]
        embeds[:, -self.block :] = torch.where(is_open[..., None], edited, clean)
        changed = (embeds[:, -self.block :] != F.embedding(tokens[:, -self.block :], table)).any(2)
        self.kept[rows[:, None], positions[:, -self.block :]] = torch.where(changed, -1, tokens[:, -self.block :])
        return embeds

    def _keep(self, fresh: Tensor, rows: Tensor, columns: Tensor) -> None:
        if len(self.hidden) == 0:
            self.hidden = fresh.new_zeros(len(self.stored), self.canvas, fresh.shape[2])
        last = columns[:, -self.block :].to(fresh.device)
        self.hidden[rows[:, None].to(fresh.device), last] = fresh[:, -self.block :]

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
