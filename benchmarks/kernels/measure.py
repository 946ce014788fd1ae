"""Dynamic counts of whatever launches Triton kernels on CPU tensors: ours, a chain, torch.compile's generated code.

Counts come from executing the compiled PTX on a CPU (tests/support/kernels/ptx), so they are exact for the code that
ptxas gets, and say nothing about time. Registers and shared memory come from ptxas, memory from the allocations of
PyTorch, seconds of the compiler from the processor time of this process and its children.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.kernels.gpus import GPUS, Gpu, bytes_bound, issue_bound
from tests.support.kernels.code import Caught, compile_for, is_launch, ptx_for, recorded
from tests.support.kernels.ptx.counts import Traffic
from tests.support.kernels.ptx.launch import Launched, executed
from tests.support.kernels.ptx.unit import Options

Work = Callable[[], Any]
_KINDS = ("global load", "global store", "shared load", "shared store")


@dataclass(frozen=True)
class Launch:
    """What one launch did, in all of its programs."""

    name: str
    programs: int
    warps: int
    warp_instructions: int
    barriers: int
    divergent: int  # branches at which threads of a warp part
    sectors: int  # of 32 bytes, asked for by loads and stores
    least_sectors: int  # that the bytes asked for would fit into
    wavefronts: int  # passes through the banks of shared memory
    least_wavefronts: int
    bytes: int  # distinct bytes of global memory, read and written: what a perfect cache lets through

    @property
    def bank_conflicts(self) -> int:
        """Passes beyond the fewest possible."""
        return self.wavefronts - self.least_wavefronts

    def bound(self, gpu: Gpu) -> float:
        """Seconds at least: a model."""
        return max(bytes_bound(self.bytes, gpu), issue_bound(self.warp_instructions, self.programs, self.warps, gpu))


def counted(work: Work, target: str, at_most: int | None = None, forgiving: bool = False) -> list[Launch]:
    """Execute `work`, its launches compiled for one of the NVIDIA targets, and count.

    `at_most`: along the first axis of a launch's grid, that of rows, only so many programs are executed and the counts
    scaled up, for kernels that do the same for every row. What they compute is then not complete, and a kernel that
    takes its addresses from what others left out goes astray: `forgiving` leaves such accesses out, too.
    """
    shares: list[float] = []
    with executed(target, Options(races=True, counting=True), forgiving=forgiving) as machine:
        execute = machine.launch

        def launch(caught: Caught) -> None:
            total, *others = caught.grid
            cut = at_most is not None and total > at_most
            shares.append(at_most / total if cut and at_most else 1.0)
            execute(replace(caught, grid=(at_most, *others)) if cut else caught)

        machine.launch = launch  # type: ignore[method-assign]
        work()
    return [_launch(launched, share) for launched, share in zip(machine.launches, shares, strict=True)]


def _launch(launched: Launched, share: float) -> Launch:
    counts = launched.counts
    assert counts is not None
    traffic = [counts.traffic.get(kind, Traffic()) for kind in _KINDS]
    whole = lambda number: round(number / share)  # noqa: E731
    return Launch(
        name=launched.name,
        programs=whole(counts.programs),
        warps=counts.warps,
        warp_instructions=whole(counts.warp_instructions),
        barriers=whole(counts.barriers),
        divergent=whole(counts.divergent),
        sectors=whole(sum(one.units for one in traffic[:2])),
        least_sectors=whole(sum(one.ideal for one in traffic[:2])),
        wavefronts=whole(sum(one.units for one in traffic[2:])),
        least_wavefronts=whole(sum(one.ideal for one in traffic[2:])),
        bytes=whole(sum(read.bytes + written.bytes for read, written in _by_storage(launched).values())),
    )


def _by_storage(launched: Launched) -> dict[int, Any]:
    """Bytes read and written of each storage; the machine lists them once for every tensor that lies in it."""
    tensors = {name: value for name, (_, value) in launched.ptx.arguments.items() if isinstance(value, Tensor)}
    return {tensor.untyped_storage().data_ptr(): launched.touched[name] for name, tensor in tensors.items()}


def launched_by(work: Work) -> list[Caught]:
    """The launches of `work`, not executed."""
    with recorded() as caught:
        work()
    return caught


@dataclass(frozen=True)
class Code:
    """What ptxas makes of the launches: the most registers and bytes of shared memory of any, spilled bytes of all."""

    registers: int
    shared: int
    spills: int
    compile_seconds: float  # of processor time, from Triton's source to machine code


def compiled(launches: Sequence[Caught], target: str) -> Code:
    """Compile each distinct launch anew."""
    distinct = {ptx_for(launch, "sm_80" if target.startswith("gfx") else target).text: launch for launch in launches}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        before = processor_seconds()
        for launch in distinct.values():
            compile_only(launch, target)
        spent = processor_seconds() - before
    figures = [compile_for(launch, target) for launch in distinct.values()]
    most = lambda name: max((getattr(one, name) for one in figures), default=0)  # noqa: E731
    return Code(most("registers"), most("shared"), sum(one.spills for one in figures), spent)


def compile_only(launch: Caught, target: str) -> None:
    """As `compile_for`, and do not look at the result."""
    from tests.support.kernels.code import TARGETS, _compiled

    _compiled(launch, TARGETS[target])


def processor_seconds() -> float:
    """Of this process and the children that have ended: ptxas is one."""
    return sum(os.times()[:4])


class Allocations(TorchDispatchMode):
    """Bytes of storages that came into being within, at their peak; and PyTorch's own operations that would launch."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.operations = self.moved = 0
        self.known: set[int] = set()

    def __enter__(self) -> Allocations:
        """Inside an operation of Triton's, which the dispatcher does not look into, memory comes from torch.empty."""
        empty = torch.empty

        def noted(*args: Any, **kwargs: Any) -> Tensor:
            made = empty(*args, **kwargs)
            self._note([made])
            return made

        self.patched = patch.object(torch, "empty", noted)
        self.patched.start()
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self.patched.stop()
        super().__exit__(*details)

    def _note(self, made: list[Tensor]) -> None:
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        for tensor in made:
            key, storage = _storage(tensor), tensor.untyped_storage()
            if key not in self.known and key not in self.alive:
                self.alive[key] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:
            if _storage(tensor) not in self.alive:
                self.known.add(_storage(tensor))
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._note(made)
        if is_launch(func):
            self.operations += 1
            self.moved += sum(_size(tensor) for tensor in (*given, *made))
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _size(tensor: Tensor) -> int:
    """Bytes that an operation reads or writes of it: a broadcast dimension counts once."""
    count = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= length if stride else 1
    return count * tensor.element_size()


def checksum(tensors: Sequence[Tensor]) -> int:
    """Of the tensors' bytes: equal results have equal ones."""
    found = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        found = zlib.crc32(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"", found)
    return found


def bounds(launches: Sequence[Launch], target: str) -> dict[str, float]:
    """Microseconds at least, launch after launch, on each GPU of that target, and by bytes alone on those for which
    nothing is executed: a model."""
    return {
        f"bound on {gpu.name}, us": 1e6 * sum(launch.bound(gpu) for launch in launches)
        for gpu in GPUS
        if gpu.target == target or gpu.clock is None
    }
