"""`BlockCache`: the forwards of a batch on a block-diffusion model: the open block of each row, on the exact K/V of the
blocks before it.

A position sees its own block and those before it, so nothing after the open block is computed, and the K/V of a
finished block never change. They are stored from clean embeddings of its final tokens, together with the first pass of
the next block; so are those of the prompt. Rows have positions of their own, counted from their first token, so nothing
is padded.

boundary "fused": where a pass only checks its block, it is also the first pass of the next: if all tokens stand,
`ahead` says so and that step is committed as well. "merged": it is a pass of its own. "apart": a finished block is
stored by a pass of its own. Tokens and steps are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asrd.engine.caches.kv import KV
from asrd.engine.decoder import Appended, Decoder
from asrd.models.extra_rows import AttentionLayout
from asrd_kernels import DecodeState, Rows

CHUNK = 512  # positions of one forward, at most


class BlockPart(NamedTuple):
    """One forward: `width` blocks of these rows, from `first` on, that see `blocks` blocks; and appended to them
    nothing, this many witnesses, or the first block once more as the decoder edits it."""

    rows: tuple[int, ...] | None  # None: the open block of all rows, in shapes that depend on nothing but the part
    first: tuple[int, ...]
    width: int
    blocks: int
    witnesses: int = 0
    probe: bool = False

    @property
    def name(self) -> Any:
        """Key of its CUDA graph; None: it is not recorded."""
        return self if self.rows is None else None


class Piece(NamedTuple):
    """What one row needs of a forward."""

    row: int
    first: int
    width: int
    witnesses: int
    probe: bool


class Tail(NamedTuple):
    """W rows appended to the blocks of a forward, which do not see them."""

    embeds: Tensor  # [R, W, D]
    places: Tensor  # [R, W] int64, position ids
    columns: Tensor  # [R, W] int64, where their hidden states are kept
    hidden: Tensor | None  # [R, W] int64, the key of the blocks that each does not see; None: it is an edited block

    def visible(self, keys: int, size: int) -> Tensor:
        """[R, W, keys + W] bool: which keys of the blocks and of these rows each sees."""
        key, width = torch.arange(keys, device=self.places.device), self.places.shape[1]
        first = (self.places // size * size)[..., None]
        if self.hidden is None:  # the blocks before it, and itself
            seen, itself = key < first, torch.ones(width, width, dtype=torch.bool, device=key.device)
        else:
            seen = (key < first + size) & (key != self.hidden[..., None])
            itself = torch.eye(width, dtype=torch.bool, device=key.device)
        return torch.cat([seen, itself.expand(len(seen), -1, -1)], 2)


@dataclass
class Stored(Rows):
    """What is remembered of each row's K/V."""

    blocks: Tensor  # [B] how many are final
    tokens: Tensor  # [B, K] the token that each position's come from, -1: from an edited embedding


@dataclass
class Checked(Rows):
    """What a fused pass must find unchanged, so that the next block's first step is what it would have been."""

    rows: Tensor  # [B] bool
    active: Tensor  # [B]
    anchors: Tensor  # [B]
    tokens: Tensor  # [B, size] of the open block


class BlockCache:
    """Hidden states [B, L + W, D], valid in the open block of each row and in the rows appended to it."""

    def __init__(self, decoder: Decoder, state: DecodeState, fixed: bool) -> None:
        self.adapter, self.decoder, self.size = decoder.adapter, decoder, state.rules.block_length
        self.masked = self.adapter.takes_block_mask
        self.fixed = fixed and self.masked
        self.boundary = decoder.config.boundary if self.masked else "apart"
        (rows, self.length), none, appended = state.tokens.shape, torch.zeros_like(state.active), decoder.append(state)
        self.witnesses = 0 if appended is None else appended.column.shape[1]
        self.most = self.length // self.size + 1  # blocks of a row
        keys = self.most * self.size + max(self.size, self.witnesses)
        self.kv = KV(rows, keys)
        self.stored = Stored(none, torch.full((rows, keys), -1, device=none.device))
        block = none[:, None].repeat(1, self.size)
        self.checked = Checked(torch.zeros_like(state.done), none.clone(), none.clone(), block)
        self.embeds = decoder.table.new_zeros(rows, self.length, decoder.table.shape[1])
        self.hidden = self.embeds.new_zeros(0)
        self.due = torch.zeros(5, rows, dtype=torch.int64, device=none.device)  # live, first, end, witnesses, fused
        self.any_fused = False

    def prepare(self, embeds: Tensor, appended: Appended | None, state: DecodeState) -> None:
        """Keep the embeddings of the coming forwards, and find which blocks are due."""
        stored, opened, fresh = self.stored, state.starts // self.size + state.active, state.step == 0
        stored.blocks.masked_fill_(fresh, 0)
        stored.tokens.masked_fill_(fresh[:, None], -1)
        # the block before the open one is stored already if its last pass read its final tokens
        places = self._places_in(stored.blocks.clamp(max=self.most - 1))
        final = (stored.tokens.gather(1, places) == self._tokens(state, places)).all(1)
        stored.blocks.add_((stored.blocks < opened) & final)
        fused, last = torch.zeros_like(state.done), (state.starts + state.lengths) // self.size - 1
        if self.boundary == "fused" and (checks := self.decoder.checks(state)) is not None:
            fused = checks & (opened < last) & (stored.blocks == opened)
        used = torch.zeros_like(opened) if appended is None else appended.used.sum(1)
        self.embeds.copy_(embeds)
        self.due.copy_(torch.stack([~state.done, stored.blocks, opened + 1 + fused, used, fused]))
        now = Checked(fused, state.active, state.anchors, self._tokens(state, self._places_in(opened)))
        self.checked.copy_(now, torch.ones_like(fused))
        stored.blocks.copy_(torch.where(state.done, stored.blocks, opened))

    def plan(self, read: Callable[[Tensor], list[Any]]) -> list[BlockPart]:
        """The forwards of this step: of each row what is not stored, the open block, and fused the next one."""
        due = [(row, *numbers) for row, (live, *numbers) in enumerate(zip(*read(self.due), strict=True)) if live]
        self.any_fused = any(fused for *_, fused in due)
        parts = []
        if self.fixed and any(end - first == 1 for _, first, end, *_ in due):
            most = max(end for _, _, end, *_ in due)  # witnesses' K/V must overwrite those of no row
            parts.append(BlockPart(None, (), 1, min(1 << (most - 1).bit_length(), self.most), self.witnesses))
            due = [item for item in due if item[2] - item[1] > 1]
        rounds = [list(self._pieces(*item)) for item in due]
        for turn in range(max(map(len, rounds), default=0)):
            groups: dict[Any, list[Piece]] = {}
            for piece in (pieces[turn] for pieces in rounds if turn < len(pieces)):
                alike = (piece.width, piece.probe, self.masked or piece.first)  # without a mask all see the same keys
                groups.setdefault(alike, []).append(piece)
            for pieces in groups.values():
                rows, first, _, used, _ = zip(*pieces, strict=True)
                width, probe = pieces[0].width, pieces[0].probe
                parts.append(BlockPart(rows, first, width, max(first) + width, max(used), probe))
        return parts

    def _pieces(self, row: int, first: int, end: int, witnesses: int, fused: int) -> Iterator[Piece]:
        """The forwards of one row, in order; witnesses go with the last."""
        together = max(CHUNK // self.size, 2) if self.masked else 1
        while first < end:
            width = min(end - first, together)
            if self.boundary == "apart" and end - first > 1:
                width = min(end - 1 - first, together)
            probe = bool(fused) and self.decoder.probes
            used = witnesses if not probe and first + width == end else 0
            yield Piece(row, first, width, used, probe)
            first += width

    def forward(self, part: BlockPart, appended: Appended | None, state: DecodeState) -> None:
        """Run the forward of `part`; keep its hidden states, and which tokens its K/V come from."""
        size, device, (live, begin, end, used, fused) = self.size, self.embeds.device, self.due
        if part.rows is None:
            rows, first = torch.arange(len(live), device=device), end - 1 - fused
            counted = live * (end - begin == 1)
        else:
            rows, first = torch.tensor(part.rows, device=device), torch.tensor(part.first, device=device)
            counted = torch.ones_like(rows)
        places = first[:, None] * size + torch.arange(part.width * size, device=device)
        columns = self._columns(state, places, rows)
        tokens = state.tokens[rows[:, None], columns]
        clean, edited = F.embedding(tokens, self.decoder.table), self.embeds[rows[:, None], columns]
        embeds = clean if part.probe else edited
        if self.decoder.probes:
            self.stored.tokens[rows[:, None], places] = torch.where((embeds != clean).any(2), -1, tokens)
        else:
            self.stored.tokens[rows[:, None], places] = tokens
        computed, tail, keys = torch.full_like(rows, part.width * size), None, part.blocks * size
        if part.probe:
            tail = Tail(edited[:, :size], places[:, :size], columns[:, :size], None)
            computed += size
        elif part.witnesses:
            assert appended is not None
            tail = self._witnesses(appended, rows, part.witnesses, state)
            computed += used[rows] * (first + part.width == end[rows])
        inputs = self._inputs(part, places, tail, keys)
        last, stored_at, seen = size, places, keys
        if tail is not None:
            number = tail.places.shape[1]
            there = keys + torch.arange(number, device=device)
            stored_at, seen = torch.cat([places, there.expand(len(rows), -1)], 1), keys + number
            embeds, columns = torch.cat([embeds, tail.embeds], 1), torch.cat([columns, tail.columns], 1)
            last += number
        self.kv.aim(None if len(rows) == len(live) else rows, stored_at, seen)
        fresh = self.adapter.body(embeds, inputs)
        if len(self.hidden) == 0:
            self.hidden = fresh.new_zeros(len(live), self.length + self.witnesses, fresh.shape[2])
        self.hidden[rows[:, None].to(fresh.device), columns[:, -last:].to(fresh.device)] = fresh[:, -last:]
        state.computed.index_add_(0, rows, counted * computed)
        state.forwards.index_add_(0, rows, counted)

    def _inputs(self, part: BlockPart, places: Tensor, tail: Tail | None, keys: int) -> dict[str, Any]:
        """The arguments of a forward besides embeddings and K/V."""
        alike = part.rows is not None and part.width == 1 and len(set(part.first)) == 1
        if tail is None:
            if alike:  # everybody sees everything
                return self.adapter.block_inputs(self.kv, places, None)
        elif not self.masked:
            assert tail.hidden is not None
            inputs = self.adapter.block_inputs(self.kv, torch.cat([places, tail.places], 1), None)
            nobody = torch.zeros_like(tail.places, dtype=torch.bool)
            real = torch.ones(len(places), keys, dtype=torch.bool, device=places.device)
            layout = AttentionLayout(real, tail.hidden[..., None], nobody, tail.places)
            queries, impl = places.shape[1], self.decoder.impl
            return inputs | self.adapter.layout_inputs(layout, queries, None, impl, way="attention")
        key = torch.arange(keys, device=places.device)
        sees = key < (places // self.size + 1)[..., None] * self.size
        if tail is not None:
            sees = torch.cat([F.pad(sees, (0, tail.places.shape[1])), tail.visible(keys, self.size)], 1)
            places = torch.cat([places, tail.places], 1)
        return self.adapter.block_inputs(self.kv, places, sees)

    def _witnesses(self, appended: Appended, rows: Tensor, number: int, state: DecodeState) -> Tail:
        """Each sees the blocks up to its own but for the token that it checks, and itself."""
        padding = self._padding(state)[rows]
        place, hidden = appended.column[rows, :number] - padding, appended.hidden[rows, :number, 0] - padding
        embeds = F.embedding(appended.tokens[rows, :number], self.decoder.table)
        columns = (self.length + torch.arange(number, device=rows.device)).expand_as(place)
        return Tail(embeds, place, columns, hidden)

    def ahead(self, state: DecodeState) -> Tensor | None:
        """[B] bool, after a commit: the rows whose block has passed its check, so that the step computed with it holds;
        None: there are none."""
        if not self.any_fused:
            return None
        was = self.checked
        same = (self._tokens(state, self._places_in(self.stored.blocks)) == was.tokens).all(1)
        rows = was.rows & ~state.done & same & (state.active == was.active + 1) & (state.anchors == was.anchors)
        return rows if bool(rows.any()) else None

    def put(self, slots: Tensor, source: BlockCache, rows: Tensor) -> None:
        """Take over rows of another one with the same canvas."""
        self.stored.put(slots, source.stored, rows)
        self.kv.put(slots, source.kv, rows)
        if not len(self.hidden) and len(source.hidden):  # all may be done, so that nothing is due before it is read
            self.hidden = source.hidden.new_zeros(len(self.embeds), *source.hidden.shape[1:])

    def clear(self, slots: Tensor) -> None:
        """Forget the K/V of these rows."""
        self.kv.clear(slots)

    @property
    def bytes(self) -> int:
        """Device memory of K/V, embeddings and hidden states."""
        return self.kv.bytes + self.embeds.nbytes + self.hidden.nbytes

    def _places_in(self, block: Tensor) -> Tensor:
        """[R, size] the positions of a block of each row."""
        return block[:, None] * self.size + torch.arange(self.size, device=block.device)

    def _padding(self, state: DecodeState) -> Tensor:
        """[B, 1] columns of the canvas before a row's first token."""
        return (state.prompt_length - state.starts)[:, None]

    def _columns(self, state: DecodeState, places: Tensor, rows: Tensor) -> Tensor:
        return (places + self._padding(state)[rows]).clamp(max=self.length - 1)

    def _tokens(self, state: DecodeState, places: Tensor) -> Tensor:
        return state.tokens.gather(1, (places + self._padding(state)).clamp(max=self.length - 1))
