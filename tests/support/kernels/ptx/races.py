"""Races: two accesses to one place, at least one a write, by two warps of a block with no barrier in between, or by two
blocks at all.

Every access carries a stamp of block, epoch (barriers passed so far) and warp; per place the last write and the last
read are kept. Two stamps of one block and one epoch but of two warps are not ordered by a barrier. The accesses of one
warp are taken as ordered. A place is one granule of memory.

Exact whatever the order in which the warps were executed, but for one harmless thing: two warps store the same value
to one place with no barrier in between. That is noted, not reported. If one of them stored another value before, or
reads the place after its store, the result is still the same in every order; it is reported in some of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

_WARP_BITS, _BLOCK_SHIFT = 8, 40
_SEVERAL = np.int64((1 << _WARP_BITS) - 1)  # warps of one block in one epoch
_SEVERAL_BLOCKS = -1
FIRST_EPOCH = 1


def stamps(block: I64, warp: I64, epoch: I64) -> I64:
    """Who and when, in one number that is never 0; `epoch` begins with FIRST_EPOCH."""
    return (block << _BLOCK_SHIFT) | (epoch << _WARP_BITS) | (warp + 1)


def block_of(stamp: I64) -> I64:
    """The block of a stamp."""
    return stamp >> _BLOCK_SHIFT


def _unordered(one: I64, other: I64) -> Mask:
    """Of two stamps (0: none): two warps of one block in one epoch, or two blocks."""
    differ = one ^ other
    apart = (differ >> _WARP_BITS == 0) | (differ >> _BLOCK_SHIFT != 0)
    return (one != 0) & (differ != 0) & apart


@dataclass(frozen=True)
class Clash:
    """Where a write meets other accesses."""

    writes: Mask  # of another warp in this epoch
    beside: Mask  # the same, by the very same instruction
    reads: Mask
    blocks: Mask  # reads or writes of another block

    def any(self) -> bool:
        """Is there one?"""
        return any(bool(mask.any()) for mask in (self.writes, self.beside, self.reads, self.blocks))


class Races:
    """Last write and last read of each place. `between_blocks`: may blocks meet here (global memory)?

    Warps may write the same value (Triton does so where they hold it replicated) and each read it back: a read is held
    against the last write, a write against all writes of the epoch."""

    def __init__(self, places: int, *, between_blocks: bool) -> None:
        self.writer, self.reader = np.zeros(places, np.int64), np.zeros(places, np.int64)
        self.writers = np.zeros(places, np.int64)  # as `writer`, but says so if several warps wrote in this epoch
        self.written_by, self.read_by = np.zeros(places, np.int32), np.zeros(places, np.int32)  # instructions
        self.reading_block = np.zeros(places, np.int32) if between_blocks else None  # from 1

    def read(self, place: I64, stamp: I64, step: int) -> Mask | None:
        """Note reads by instruction number `step`; where they meet a write, or None if nowhere."""
        last = self.writer[place]
        clash = _unordered(last, stamp) if last.any() else None
        self._join(self.reader, place, stamp)
        self.read_by[place] = step
        if self.reading_block is not None:
            block = np.broadcast_to(block_of(stamp) + 1, place.shape).astype(np.int32)
            before_block = self.reading_block[place]
            alone = (before_block == 0) | (before_block == block)
            self._put(self.reading_block, place, np.where(alone, block, _SEVERAL_BLOCKS), _SEVERAL_BLOCKS)
        return clash if clash is not None and clash.any() else None

    def _join(self, table: I64, place: I64, stamp: I64) -> None:
        """table[place] = stamp, marked where another warp of the block has been in this epoch."""
        before = table[place]
        several = (before != stamp) & ((before ^ stamp) >> _WARP_BITS == 0)
        self._put(table, place, np.where(several, stamp | _SEVERAL, stamp), stamp | _SEVERAL)

    @staticmethod
    def _put(table: NDArray, place: I64, value: NDArray, contested: NDArray | int) -> None:
        """table[place] = value; where lanes of one instruction put different values at one place, `contested`."""
        table[place] = value
        lost = table[place] != value
        if lost.any():
            table[place[lost]] = np.broadcast_to(contested, place.shape)[lost]

    def write(self, place: I64, stamp: I64, step: int) -> Clash:
        """Note writes by instruction number `step`; what they meet."""
        clash = self.look(place, stamp)
        self.writer[place] = stamp
        self._join(self.writers, place, stamp)
        self.written_by[place] = step
        beside = _unordered(self.writer[place], stamp)
        foreign = beside & (block_of(self.writer[place] ^ stamp) != 0)
        return Clash(clash.writes, beside & ~foreign, clash.reads, clash.blocks | foreign)

    def look(self, place: I64, stamp: I64) -> Clash:
        """What writes would meet, without noting them."""
        last, reader = self.writers[place], self.reader[place]
        met = _unordered(last, stamp)
        foreign = met & (block_of(last ^ stamp) != 0)
        reads = _unordered(reader, stamp) & (block_of(reader ^ stamp) == 0)
        if self.reading_block is not None:
            block = self.reading_block[place]
            foreign |= (block != 0) & (block != block_of(stamp) + 1)
        return Clash(met & ~foreign, np.zeros_like(met), reads, foreign)
