"""Runs the blocks of a launch: which threads execute next, barriers, and the order of the warps between them.

All blocks run in groups, as many at once as make numpy worth its while; a group's blocks have shared memory of their
own and meet only in global memory. Threads at the lowest program counter go first, which brings the parts of a diverged
warp together again where the compiler's code does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.support.kernels.ptx.counts import Counts
from tests.support.kernels.ptx.decode import Code, Program
from tests.support.kernels.ptx.faults import Faults
from tests.support.kernels.ptx.memory import UNWRITTEN, Space
from tests.support.kernels.ptx.races import Races
from tests.support.kernels.ptx.unit import LEFT, SHARED_BASE, WAITS, WARP, Launch, Mask, Options, Unit

_LANES, _BLOCKS = 4096, 128  # of a group: threads in lockstep, blocks otherwise
_ENDLESS = 2_000_000  # basic blocks that a group executes


@dataclass(frozen=True)
class Outcome:
    """What a launch did wrong, and what it did."""

    faults: Faults
    counts: Counts | None


def run(
    program: Program,
    parameters: Iterable[int],
    grid: tuple[int, int, int],
    memory: Space,
    shared: int,
    options: Options,
) -> Outcome:
    """Execute all blocks. `parameters`: raw bits in the kernel's order; `shared`: bytes of a block."""
    kernel, faults = program.kernel, memory.faults
    blocks, warps = int(np.prod(grid)), kernel.threads // WARP
    counts = Counts(programs=blocks, warps=warps) if options.counting else None
    named = {name: value for (name, _), value in zip(kernel.parameters, parameters, strict=True)}
    launch = Launch(kernel, named, grid, memory, options, faults, counts)
    at_once = max(1, _LANES // kernel.threads) if options.order == "lockstep" else _BLOCKS
    with np.errstate(all="ignore"):
        for first in range(0, blocks, at_once):
            numbers = np.arange(first, min(first + at_once, blocks))
            _Group(program, launch, numbers, shared).run()
    return Outcome(faults, counts)


class _Group:
    """Blocks that run at once."""

    def __init__(self, program: Program, launch: Launch, blocks: NDArray[np.int64], shared: int) -> None:
        self.program, self.launch, self.blocks = program, launch, blocks
        granule = program.granules["shared"]
        places = -(-shared // 16) * 16 * len(blocks) // granule
        races = Races(max(1, places), between_blocks=False) if launch.options.races else None
        space = Space(shared, granule, SHARED_BASE, len(blocks), launch.faults, races)
        space.state[:] = UNWRITTEN
        space.place = lambda offset: f"byte {offset} of shared memory"
        warps, order = np.arange(program.kernel.threads // WARP), launch.options.order
        parts = [warps] if order == "lockstep" else [warps[i : i + 1] for i in warps]
        self.units = [Unit(launch, space, blocks, part) for part in parts]
        self.random = np.random.default_rng((launch.options.seed, int(blocks[0])))
        self.executed = 0

    def run(self) -> None:
        """Until every thread has returned."""
        while not all((unit.pc == LEFT).all() for unit in self.units):
            self._to_barriers()
            self._release()

    def _to_barriers(self) -> None:
        """Every thread runs until it waits or returns."""
        order = self.launch.options.order
        if order == "random":
            ready = list(self.units)
            while ready:
                unit = ready[int(self.random.integers(len(ready)))]
                if not self._step(unit):
                    ready.remove(unit)
            return
        for unit in reversed(self.units) if order == "reverse" else self.units:
            while self._step(unit):
                pass

    def _step(self, unit: Unit) -> bool:
        """Execute one basic block of the threads that are furthest behind; False if none can run."""
        at = int(unit.pc.min())
        if at >= WAITS:
            return False
        self.executed += 1
        if self.executed > _ENDLESS:
            raise RuntimeError(f"{self.program.kernel.name} does not end: {_ENDLESS} basic blocks executed")
        here = unit.pc == at
        mask: Mask = None if here.all() else here
        code = self.program.code[at]
        for step in code.steps:
            step(unit, mask)
        if self.launch.counts is not None:
            self._count(here, code)
        self._leave(unit, code, here)
        return True

    def _leave(self, unit: Unit, code: Code, here: NDArray[np.bool_]) -> None:
        """Where the threads go that have executed a basic block."""
        if code.barrier is not None:
            warps = here.reshape(-1, WARP)
            if (warps.any(1) != warps.all(1)).any():
                unit.faults.add("barrier", code.barrier, "only a part of a warp arrives")
            unit.pc = np.where(here, code.next + WAITS, unit.pc)
        elif code.taken is None:
            unit.pc = np.where(here, code.next, unit.pc)
        else:
            goes = code.taken(unit) != code.negated
            unit.pc = np.where(here, np.where(goes, code.branch, code.next), unit.pc)
            if self.launch.counts is not None:
                on = (unit.whole(goes) & here).reshape(-1, WARP).any(1)
                off = (~unit.whole(goes) & here).reshape(-1, WARP).any(1)
                self.launch.counts.divergent += int((on & off).sum())

    def _release(self) -> None:
        """Everybody waits or has returned: those who wait go on, in a new epoch."""
        where, slot = (np.concatenate([getattr(unit, name) for unit in self.units]) for name in ("pc", "slot"))
        waits = where != LEFT
        if not waits.any():
            return
        self._check_barrier(where, slot, waits)
        for unit in self.units:
            waiting = unit.pc != LEFT
            unit.epoch = unit.epoch + waiting
            unit.pc = np.where(waiting, unit.pc - WAITS, LEFT)
            unit.stamp()
        if self.launch.counts is not None:
            self.launch.counts.barriers += len(np.unique(slot[waits]))

    def _check_barrier(self, where: NDArray[np.int64], slot: NDArray[np.int64], waits: NDArray[np.bool_]) -> None:
        """All threads of a block must wait at the same bar.sync."""
        low, high = np.full(len(self.blocks), LEFT), np.zeros(len(self.blocks), np.int64)
        np.minimum.at(low, slot, where)
        np.maximum.at(high, slot, where)
        for number in np.flatnonzero(low != high)[:1]:
            before = int(low[number]) - WAITS - 1
            barrier = self.program.code[before].barrier
            assert barrier is not None
            text = "some threads have returned" if high[number] == LEFT else "others wait at another barrier"
            self.launch.faults.add("barrier", barrier, f"block {int(self.blocks[number])}: {text}")

    def _count(self, here: NDArray[np.bool_], code: Code) -> None:
        assert self.launch.counts is not None
        times = int(here.reshape(-1, WARP).any(1).sum())
        for name, number in code.instructions.items():
            self.launch.counts.instructions[name] += number * times
