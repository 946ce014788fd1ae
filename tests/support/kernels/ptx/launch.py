"""Triton launches on CPU tensors, executed by the PTX machine.

    with executed("sm_80") as machine:      # not where TRITON_INTERPRET is set
        vocab_stats_triton(...)             # runs the code that Triton compiles for the target, in place
    machine.launches[0].counts

A launch is caught, compiled as a GPU's driver would have asked for it, and executed at once on copies of the storages
behind its tensors, which are then written back. `KernelFault` is raised at the launch that does something wrong.
The elements of the tensors handed in exist, nothing else does; memory that the launchers of asrd_kernels take from
torch.empty counts as never written until a kernel writes it.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.jit import JITFunction

from tests.support.kernels.code import Caught, Ptx, ptx_for
from tests.support.kernels.ptx.counts import Counts
from tests.support.kernels.ptx.decode import Program, program
from tests.support.kernels.ptx.faults import Fault, Faults, KernelFault
from tests.support.kernels.ptx.machine import run
from tests.support.kernels.ptx.memory import RUBBISH, UNWRITTEN, WRITTEN, Space
from tests.support.kernels.ptx.races import Races
from tests.support.kernels.ptx.unit import Options

GLOBAL_BASE = 0x7F_0000_0000  # more than 32 bits
_GAP = 4096  # bytes between two storages
_FRESH_KEPT = 64  # tensors of torch.empty that are remembered
_FORMATS = {"fp32": "<f", "fp64": "<d", "fp16": "<e"}


@dataclass
class Region:
    """A storage in the machine's memory: `bytes` from `start` on; the names and views of its tensors."""

    start: int
    bytes: NDArray[np.uint8]
    views: list[tuple[str, Tensor]]

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.start + len(self.bytes)


@dataclass(frozen=True)
class Touched:
    """How much of a tensor's storage was touched at least once."""

    bytes: int


@dataclass(frozen=True)
class Launched:
    """A launch that was executed. `touched`: what of each tensor was read and written, if races were watched."""

    name: str
    ptx: Ptx
    grid: tuple[int, int, int]
    faults: list[Fault]
    notes: list[Fault]
    counts: Counts | None
    touched: dict[str, tuple[Touched, Touched]]
    results: dict[str, int]  # checksum of each tensor's storage afterwards, if asked for

    def by_argument(self) -> dict[str, tuple[Touched, Touched]]:
        """Loads and stores of each tensor, as of KernelGuard's launches."""
        return self.touched


@dataclass
class Machine:
    """Executes launches for one target. `without_barrier`: (kernel's name, number of the bar.sync to leave out)."""

    target: str
    options: Options = field(default_factory=Options)
    forgiving: bool = False  # faults are listed instead of raised
    without_barrier: tuple[str, int] | None = None
    keep_results: bool = False
    launches: list[Launched] = field(default_factory=list)
    fresh: dict[int, tuple[Tensor, NDArray[np.bool_]]] = field(default_factory=dict)  # by address: bytes written

    def launch(self, caught: Caught) -> None:
        """Compile and execute."""
        ptx = ptx_for(caught, self.target)
        without = self.without_barrier
        code = program(ptx.text, without[1] if without is not None and without[0] == caught.name else None)
        tensors = {name: value for name, (_, value) in ptx.arguments.items() if isinstance(value, Tensor)}
        if any(tensor.device.type != "cpu" for tensor in tensors.values()):
            raise ValueError(f"{caught.name}: the PTX machine takes tensors on the CPU")
        regions = _regions(tensors)
        memory = self._memory(code, regions)
        grid = _grid(caught, ptx)
        outcome = run(code, _parameters(code, ptx, regions), grid, memory, ptx.shared, self.options)
        self._write_back(memory, regions)
        faults = outcome.faults
        self.launches.append(
            Launched(
                caught.name,
                ptx,
                grid,
                faults.found,
                faults.notes,
                outcome.counts,
                _touched(memory, regions),
                _checksums(regions) if self.keep_results else {},
            )
        )
        if faults.found and not self.forgiving:
            raise KernelFault("\n".join(f"{caught.name}: {fault}" for fault in faults.found))

    @property
    def faults(self) -> list[Fault]:
        """Of all launches."""
        return [fault for launch in self.launches for fault in launch.faults]

    def remember(self, tensor: Tensor) -> Tensor:
        """A tensor that holds nothing yet."""
        size = tensor.untyped_storage().nbytes()
        self.fresh[tensor.untyped_storage().data_ptr()] = (tensor, np.zeros(size, bool))
        while len(self.fresh) > _FRESH_KEPT:
            self.fresh.pop(next(iter(self.fresh)))
        return tensor

    def _memory(self, code: Program, regions: dict[int, Region]) -> Space:
        size = max((region.end for region in regions.values()), default=0) + _GAP
        granule, faults = code.granules["global"], Faults()
        races = Races(-(-size // 16) * 16 // granule, between_blocks=True) if self.options.races else None
        space = Space(size, granule, GLOBAL_BASE, 1, faults, races)
        for address, region in regions.items():
            space.data[region.start : region.end] = region.bytes
            known = self.fresh[address][1] if address in self.fresh else None
            if known is not None:
                space.data[region.start : region.end][~known] = RUBBISH
            for _, tensor in region.views:
                _mark(space, region, tensor, known)
        ordered = list(regions.values())
        space.place = lambda offset: _place(ordered, offset)
        return space

    def _write_back(self, memory: Space, regions: dict[int, Region]) -> None:
        for address, region in regions.items():
            region.bytes[:] = memory.data[region.start : region.end]
            if address in self.fresh:
                granule, known = memory.granule, self.fresh[address][1]
                state = np.repeat(memory.state[region.start // granule : -(-region.end // granule)], granule)
                known |= state[region.start % granule :][: len(known)] == WRITTEN


@contextmanager
def executed(target: str, options: Options | None = None, **settings: Any) -> Iterator[Machine]:
    """In this context Triton launches are executed by the machine, compiled for one of the NVIDIA targets."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: nothing can be compiled in this process")
    machine, empty = Machine(target, options or Options(), **settings), torch.empty

    def launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        machine.launch(Caught(kernel, args, given, grid))

    def fresh(*args: Any, **given: Any) -> Tensor:
        made = empty(*args, **given)
        ours = sys._getframe(1).f_globals.get("__name__", "").startswith("asrd_kernels")
        return machine.remember(made) if ours else made

    with patch.object(JITFunction, "run", launch), patch.object(torch, "empty", fresh):
        yield machine


def _regions(tensors: dict[str, Tensor]) -> dict[int, Region]:
    """The storages behind tensors by address, laid out with gaps, each as aligned as it is."""
    regions: dict[int, Region] = {}
    end = _GAP
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in regions:
            start = -(-end // 256) * 256 + address % 256
            whole = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            regions[address] = Region(start, whole, [])
            end = start + len(whole) + _GAP
        regions[address].views.append((name, tensor))
    return regions


def _mark(space: Space, region: Region, tensor: Tensor, known: NDArray[np.bool_] | None) -> None:
    """A tensor's elements exist; they were written, or where `known` says so."""
    if tensor.numel() == 0:
        return
    granule, item = space.granule, tensor.element_size()
    offset = tensor.storage_offset() * item
    if tensor.is_contiguous() and known is None:
        start, end = region.start + offset, region.start + offset + tensor.numel() * item
        space.state[-(-start // granule) : end // granule] = WRITTEN
        return
    exists = np.zeros(len(region.bytes), bool)
    strides = (*(stride * item for stride in tensor.stride()), 1)
    np.lib.stride_tricks.as_strided(exists[offset:], (*tensor.shape, item), strides)[...] = True
    first, skew = region.start // granule, region.start % granule
    whole = np.zeros(-(-(skew + len(exists)) // granule) * granule, bool)
    whole[skew : skew + len(exists)] = exists
    there: NDArray[np.bool_] = np.asarray(whole.reshape(-1, granule).all(1))
    state = space.state[first : first + len(there)]
    written = there
    if known is not None:
        whole[skew : skew + len(exists)] = known
        written = np.asarray(whole.reshape(-1, granule).all(1))
    state[there] = np.where(written[there], WRITTEN, UNWRITTEN)


def _place(regions: list[Region], offset: int) -> str:
    """A place in words: tensor and byte from its first element on."""
    region = min(regions, key=lambda region: max(region.start - offset, offset - region.end + 1, 0), default=None)
    if region is None:
        return f"byte {offset} of global memory"
    within = lambda view: offset - region.start - view[1].storage_offset() * view[1].element_size()  # noqa: E731
    name, tensor = max((view for view in region.views), key=lambda view: (within(view) >= 0, -abs(within(view))))
    return f"{name}, byte {within((name, tensor))} (shape {list(tensor.shape)}, {tensor.element_size()} bytes each)"


def _touched(memory: Space, regions: dict[int, Region]) -> dict[str, tuple[Touched, Touched]]:
    found: dict[str, tuple[Touched, Touched]] = {}
    if memory.races is None:
        return found
    for region in regions.values():
        where = slice(region.start // memory.granule, -(-region.end // memory.granule))
        read, written = (int(np.count_nonzero(table[where])) for table in (memory.races.reader, memory.races.writer))
        for name, _ in region.views:
            found[name] = Touched(read * memory.granule), Touched(written * memory.granule)
    return found


def _checksums(regions: dict[int, Region]) -> dict[str, int]:
    return {name: zlib.crc32(region.bytes.tobytes()) for region in regions.values() for name, _ in region.views}


def _grid(caught: Caught, ptx: Ptx) -> tuple[int, int, int]:
    grid = caught.grid
    if callable(grid):
        grid = grid({name: value for name, (_, value) in ptx.arguments.items()} | caught.options)
    x, y, z = (*grid, 1, 1, 1)[:3]
    return int(x), int(y), int(z)


def _parameters(code: Program, ptx: Ptx, regions: dict[int, Region]) -> list[int]:
    """Raw bits of every parameter: the arguments, then Triton's pointers to scratch memory, which are unused."""
    found: list[int] = []
    for kind, value in ptx.arguments.values():
        if isinstance(value, Tensor):
            region = regions[value.untyped_storage().data_ptr()]
            found.append(GLOBAL_BASE + region.start + int(value.storage_offset()) * value.element_size())
        elif kind in _FORMATS:
            found.append(int.from_bytes(struct.pack(_FORMATS[kind], value), "little"))
        else:
            found.append(int(value) & 0xFFFF_FFFF_FFFF_FFFF)
    return found + [0] * (len(code.kernel.parameters) - len(found))
