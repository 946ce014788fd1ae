"""Memory of a launch: bytes, which of them exist, which were ever written, who accessed them.

A `Space` is global memory, or the shared memory of the blocks that run at once, a slot each. Everything but the bytes
themselves is kept per granule: the narrowest access of the kernel to that space. Accesses are aligned to their size, so
this is as exact as per byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.support.kernels.ptx.faults import Faults
from tests.support.kernels.ptx.parse import Instruction
from tests.support.kernels.ptx.races import Clash, Races, block_of

OUTSIDE, UNWRITTEN, WRITTEN = 0, 1, 2
RUBBISH = 0xFB  # what never-written bytes hold
I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Lanes:
    """The threads that take part in an access: where their shared memory lies, who and when they are."""

    slot: I64
    stamp: I64
    thread: I64  # in the block

    def __getitem__(self, chosen: NDArray) -> Lanes:
        return Lanes(self.slot[chosen], self.stamp[chosen], self.thread[chosen])


@dataclass(frozen=True)
class Access:
    """An instruction's way to touch memory: `count` words of `width` bytes, by instruction number `step`."""

    instruction: Instruction
    step: int
    width: int
    count: int = 1

    @property
    def bytes(self) -> int:
        """Of a thread."""
        return self.width * self.count


class Space:
    """`slots` times `size` bytes at address `base`; `granule` bytes are watched as one."""

    def __init__(self, size: int, granule: int, base: int, slots: int, faults: Faults, races: Races | None) -> None:
        self.size, self.granule, self.base, self.faults, self.races = size, granule, base, faults, races
        self.slots, self.stride = slots, -(-size // 16) * 16
        self.data = np.full(max(16, self.stride * slots), RUBBISH, np.uint8)
        self.state = np.zeros(max(16, self.stride * slots) // granule, np.uint8)
        self.words = {width: self.data.view(f"u{width}") for width in (1, 2, 4, 8)}
        self.place: Callable[[int], str] = lambda offset: f"byte {offset}"  # in words, for messages

    def load(self, lanes: Lanes, address: I64, access: Access) -> NDArray:
        """[count, n] words of unsigned integers, one column a lane."""
        index, sound = self._locate(lanes, address, access, "loads")
        if sound is not None:
            lanes, index = lanes[sound], index[sound]
        place = self._places(index, access.bytes)
        state = self.state[place]
        if (state != WRITTEN).any():
            self._not_readable(lanes, index, state, access)
        if self.races is not None and len(index):
            stamp = lanes.stamp if place.ndim == 1 else lanes.stamp[:, None]
            clash = self.races.read(place, stamp, access.step)
            if clash is not None:
                self._read_race(lanes, index, place, clash, access)
        first = index // access.width
        found = np.stack([self.words[access.width][first + i] for i in range(access.count)])
        if sound is None:
            return found
        whole = np.full((access.count, len(sound)), RUBBISH * 0x0101010101010101, np.uint64).astype(found.dtype)
        whole[:, sound] = found
        return whole

    def store(self, lanes: Lanes, address: I64, values: NDArray, access: Access) -> None:
        """Store [count, n] words."""
        index, sound = self._locate(lanes, address, access, "stores")
        if sound is not None:
            lanes, index, values = lanes[sound], index[sound], values[:, sound]
        if len(index) == 0:
            return
        place = self._places(index, access.bytes)
        state = self.state[place]
        if (state == OUTSIDE).any():
            inside = (state != OUTSIDE).reshape(len(index), -1).all(1)
            self._outside(lanes, index, ~inside, access, "stores")
            lanes, index, values, place = lanes[inside], index[inside], values[:, inside], place[inside]
        first, words = index // access.width, self.words[access.width]
        clash, same = None, np.ones(len(index), bool)
        if self.races is not None:
            clash = self.races.write(place, lanes.stamp if place.ndim == 1 else lanes.stamp[:, None], access.step)
            clash = clash if clash.any() else None
        for i in range(access.count):
            if clash is not None:
                same &= words[first + i] == values[i]
            words[first + i] = values[i]
        after = np.logical_and.reduce([words[first + i] == values[i] for i in range(access.count)])
        self.state[place] = WRITTEN
        if clash is not None:
            self._write_race(lanes, index, clash, same, after, access)
            after |= clash.beside.reshape(len(index), -1).any(1)
        if not after.all():
            text = f"lanes of one warp store different values to {self._where(index[~after][0])}"
            self.faults.add("race", access.instruction, text)

    def announce(self, lanes: Lanes, address: I64, access: Access) -> None:
        """A write that lands later, at an unknown moment: until then its bytes must not be read."""
        index, sound = self._locate(lanes, address, access, "stores")
        if sound is not None:
            lanes, index = lanes[sound], index[sound]
        place = self._places(index, access.bytes)
        if self.races is not None:
            clash = self.races.look(place, lanes.stamp if place.ndim == 1 else lanes.stamp[:, None])
            if clash.any():
                never = np.zeros(len(index), bool)
                self._write_race(lanes, index, clash, never, never, access)
        state = self.state[place]
        self.state[place] = np.where(state == OUTSIDE, OUTSIDE, UNWRITTEN)

    def _locate(self, lanes: Lanes, address: I64, access: Access, does: str) -> tuple[I64, Mask | None]:
        """Offsets in `data`; the lanes whose access is in range and aligned, None if all are."""
        offset = address - self.base
        aligned = offset & (access.bytes - 1) == 0
        sound = (offset >= 0) & (offset <= self.size - access.bytes) & aligned
        index = offset if self.slots == 1 else offset + lanes.slot * self.stride
        if sound.all():
            return index, None
        if not aligned.all():
            lane = int(np.flatnonzero(~aligned)[0])
            text = f"{does} {access.bytes} bytes at {self._where(index[lane])}, {_who(lanes, lane)}"
            self.faults.add("misaligned", access.instruction, text)
        if (aligned & ~sound).any():
            self._outside(lanes, index, aligned & ~sound, access, does)
        return index, sound

    def _places(self, index: I64, size: int) -> I64:
        """Numbers of the granules: [n], or [n, k] if an access covers several."""
        first, count = index // self.granule, max(1, size // self.granule)
        return first if count == 1 else first[:, None] + np.arange(count)

    def _where(self, index: int) -> str:
        return self.place(int(index) % self.stride if self.stride else int(index))

    def _outside(self, lanes: Lanes, index: I64, bad: Mask, access: Access, does: str) -> None:
        lane = int(np.flatnonzero(bad)[0])
        text = f"{int(bad.sum())} lanes; {_who(lanes, lane)} {does} {self._where(index[lane])}"
        self.faults.add("out of bounds", access.instruction, text)

    def _not_readable(self, lanes: Lanes, index: I64, state: NDArray, access: Access) -> None:
        state = state.reshape(len(index), -1)
        for kind, bad in (("out of bounds", (state == OUTSIDE).any(1)), ("unwritten", (state == UNWRITTEN).any(1))):
            if bad.any() and kind == "out of bounds":
                self._outside(lanes, index, bad, access, "loads")
            elif bad.any():
                lane = int(np.flatnonzero(bad)[0])
                text = f"{int(bad.sum())} lanes; {_who(lanes, lane)} reads {self._where(index[lane])}"
                self.faults.add(kind, access.instruction, text)

    def _read_race(self, lanes: Lanes, index: I64, place: I64, clash: Mask, access: Access) -> None:
        assert self.races is not None
        at = np.unravel_index(int(np.flatnonzero(clash)[0]), clash.shape)
        foreign = block_of(self.races.writer[place[at]] ^ lanes.stamp[at[0]]) != 0
        other = int(self.races.written_by[place[at]])
        text = f"{_who(lanes, int(at[0]))} reads {self._where(index[at[0]])}, written by instruction {other}"
        text += " of another block" if foreign else " of another warp with no barrier in between"
        self.faults.add("programs" if foreign else "race", access.instruction, text)

    def _write_race(self, lanes: Lanes, index: I64, clash: Clash, before: Mask, after: Mask, access: Access) -> None:
        """`before`, `after`: lanes whose value was there before the store, and is there after it."""
        lanes_of = lambda mask: mask.reshape(len(index), -1).any(1)  # noqa: E731
        earlier, beside = lanes_of(clash.writes), lanes_of(clash.beside)
        harmful = (earlier & ~before) | (beside & ~after)
        for kind, bad, text in (
            ("race", lanes_of(clash.reads), "read by another warp with no barrier in between"),
            ("race", harmful, "written by another warp with no barrier in between"),
            ("race", (earlier | beside) & ~harmful, "written by another warp, the same value"),
            ("programs", lanes_of(clash.blocks), "accessed by another block"),
        ):
            if bad.any():
                lane = int(np.flatnonzero(bad)[0])
                text = f"{_who(lanes, lane)} writes {self._where(index[lane])}, {text}"
                self.faults.add(kind, access.instruction, text, harmless="same value" in text)


def _who(lanes: Lanes, lane: int) -> str:
    return f"block {int(block_of(lanes.stamp[lane]))} thread {int(lanes.thread[lane])}"
