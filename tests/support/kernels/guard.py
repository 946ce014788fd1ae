"""`KernelGuard`: watches every memory access of the Triton kernels that run in the interpreter.

    with KernelGuard() as guard:      # TRITON_INTERPRET=1, tensors on the CPU
        launch_something(...)
    guard.launches[0].loads.sectors   # raises MemoryFault at the end of the block if anything was wrong

It finds
- an access outside the elements of the tensor that its pointer was made from (of a view: its own elements only);
- two programs of one launch that write one byte, or one that reads what another writes;
- two lanes of one store that write different values to one address;
- in a program of several warps, a load and a store of one address with no barrier in between: every warp executes a
  scalar load, one of them stores, and a late warp reads what an early one wrote;
and it counts bytes and distinct 32-byte sectors.

An address has 48 bits, so the upper 16 bits of a pointer hold the number of the argument that it was made from. The
wrapped load and store of the interpreter read the number and remove it. A faulty access is masked out, so that the
process survives and all faults are listed.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from triton.runtime import interpreter

SECTOR = 32  # bytes that a GPU fetches at least
_TAG = 48
_ADDRESS = np.uint64((1 << _TAG) - 1)
_DEFAULT_WARPS = 4


class MemoryFault(AssertionError):
    """Invalid memory accesses of a kernel, one line per fault."""


@dataclass(frozen=True)
class Argument:
    """A tensor handed to a kernel: which addresses are its elements."""

    name: str
    base: int
    item: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    contiguous: bool

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Argument:
        size, stride = tuple(tensor.shape), tensor.stride()
        return cls(name, tensor.data_ptr(), tensor.element_size(), size, stride, tensor.is_contiguous())

    def holds(self, address: np.ndarray, width: int) -> np.ndarray:
        """For each address: are the `width` bytes there an element (of a contiguous tensor: bytes of elements)?"""
        offset = address.astype(np.int64) - self.base
        count = int(np.prod(self.sizes))
        if self.contiguous:
            return (offset >= 0) & (offset + width <= count * self.item) & (offset % width == 0)
        inside = (offset >= 0) & (offset % self.item == 0) & (width == self.item) & (count > 0)
        rest = offset // self.item
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True), reverse=True):
            if stride > 0:
                index = np.minimum(rest // stride, size - 1)
                rest = rest - index * stride
        return inside & (rest == 0)


@dataclass(frozen=True)
class Traffic:
    """Bytes that the loads or the stores of a launch moved."""

    bytes: int  # by all instructions, each address once an instruction
    sectors: int  # distinct 32-byte sectors touched by the launch


@dataclass
class Spans:
    """Byte ranges that were touched, each with its argument, its program and the stretch between two barriers."""

    rows: list[np.ndarray] = field(default_factory=list)  # of (start, end, argument, program, stretch)

    def add(self, address: np.ndarray, width: int, *labels: int) -> None:
        """Note the accesses at the sorted distinct addresses of one instruction."""
        cut = np.flatnonzero(np.diff(address) != width)
        start = address[np.r_[0, cut + 1]]
        end = address[np.r_[cut, len(address) - 1]] + width
        row = np.empty((len(start), 5), dtype=np.int64)
        row[:, 0], row[:, 1], row[:, 2:] = start, end, labels
        self.rows.append(row)

    def table(self) -> np.ndarray:
        """All ranges [N, 5]."""
        return np.concatenate(self.rows) if self.rows else np.empty((0, 5), dtype=np.int64)

    def traffic(self, argument: int | None = None) -> Traffic:
        """Sums over all arguments or one."""
        table = self.table()
        if argument is not None:
            table = table[table[:, 2] == argument]
        sectors = np.stack([table[:, 0] // SECTOR, -(-table[:, 1] // SECTOR)], axis=1)
        covered = _merged(np.concatenate([sectors, np.zeros_like(sectors[:, :1])], axis=1))
        return Traffic(int((table[:, 1] - table[:, 0]).sum()), int((covered[:, 1] - covered[:, 0]).sum()))


@dataclass
class Launch:
    """One launch of a kernel and what it did to memory."""

    kernel: str
    file: str
    warps: int
    names: list[tuple[str, torch.Tensor]]
    arguments: list[Argument] = field(default_factory=list)
    read: Spans = field(default_factory=Spans)
    written: Spans = field(default_factory=Spans)
    faults: list[str] = field(default_factory=list)
    grid: tuple[int, ...] = ()
    program: int = 0
    stretch: int = 0

    @property
    def loads(self) -> Traffic:
        """What was loaded."""
        return self.read.traffic()

    @property
    def stores(self) -> Traffic:
        """What was stored."""
        return self.written.traffic()

    def by_argument(self) -> dict[str, tuple[Traffic, Traffic]]:
        """Loads and stores of each tensor."""
        numbers = range(len(self.arguments))
        return {self.arguments[i].name: (self.read.traffic(i), self.written.traffic(i)) for i in numbers}

    def fault(self, text: str) -> None:
        """Note a fault once."""
        line = f"{self.kernel}: {text}"
        if line not in self.faults:
            self.faults.append(line)

    def where(self, address: int) -> str:
        """The element that an address belongs to, in words."""
        for argument in self.arguments:
            if argument.holds(np.array([address], dtype=np.uint64), 1 if argument.contiguous else argument.item)[0]:
                return f"{argument.name}, byte {address - argument.base}"
        return f"address {address:#x}"


def _merged(spans: np.ndarray) -> np.ndarray:
    """Union of (start, end, group) within each group, ordered by group and start."""
    spans = spans[np.lexsort((spans[:, 0], spans[:, 2]))]
    if not len(spans):
        return spans
    points = np.unique(spans[:, :2])  # ranks instead of addresses, so that the groups fit behind each other on one line
    group = np.unique(spans[:, 2], return_inverse=True)[1] * len(points)
    start, end = (np.searchsorted(points, spans[:, i]) for i in (0, 1))
    reach = np.maximum.accumulate(group + end)
    first = np.flatnonzero(np.r_[True, (group + start)[1:] > reach[:-1]])
    last = np.r_[first[1:], len(spans)] - 1
    return np.stack([spans[first, 0], points[reach[last] - group[last]], spans[first, 2]], axis=1)


def _total(spans: np.ndarray) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())


def _overlaps(some: np.ndarray, others: np.ndarray) -> list[tuple[int, int, int]]:
    """(address, group of the one, group of the other) where spans overlap; `others` must be disjoint."""
    others = others[np.argsort(others[:, 0], kind="stable")]
    low = np.searchsorted(others[:, 1], some[:, 0], side="right")
    high = np.searchsorted(others[:, 0], some[:, 1], side="left")
    pairs = [(i, j) for i in np.flatnonzero(low < high) for j in range(low[i], high[i])]
    return [(int(max(some[i, 0], others[j, 0])), int(some[i, 2]), int(others[j, 2])) for i, j in pairs]


def _check_programs(launch: Launch) -> None:
    """Writes of one program must not meet reads or writes of another in the same launch."""
    reads, writes = (_merged(spans.table()[:, [0, 1, 3]]) for spans in (launch.read, launch.written))
    ordered = writes[np.argsort(writes[:, 0], kind="stable")]
    clash = np.flatnonzero(ordered[1:, 0] < ordered[:-1, 1])  # if two spans overlap, two neighbours do
    for i in clash[:4]:
        a, b = sorted((int(ordered[i, 2]), int(ordered[i + 1, 2])))
        launch.fault(f"programs {a} and {b} both write {launch.where(int(ordered[i + 1, 0]))}")
    if not len(clash):
        foreign = [overlap for overlap in _overlaps(reads, writes) if overlap[1] != overlap[2]]
        for address, reader, writer in foreign[:4]:
            launch.fault(f"program {reader} reads what program {writer} writes: {launch.where(address)}")


def _check_stretches(launch: Launch) -> None:
    """With several warps, a program needs a barrier between a load and a store, or two stores, of one address."""
    if launch.warps == 1:
        return
    loads, stores = (spans.table()[:, [0, 1, 4]] for spans in (launch.read, launch.written))
    loads, once = _merged(loads), _merged(stores)
    if _total(once) != _total(stores):
        launch.fault(f"one program stores one address twice with no barrier in between (num_warps={launch.warps})")
    if _total(_merged(np.concatenate([loads, once]))) == _total(loads) + _total(once):
        return
    for stretch in np.unique(once[:, 2]):
        for address, _, _ in _overlaps(loads[loads[:, 2] == stretch], once[once[:, 2] == stretch])[:4]:
            place = launch.where(address)
            launch.fault(f"one program loads and stores {place} with no barrier in between (num_warps={launch.warps})")


class KernelGuard:
    """Context in which interpreted kernels are watched; see the module's docstring."""

    def __init__(self) -> None:
        if not triton.knobs.runtime.interpret:
            raise RuntimeError("KernelGuard needs TRITON_INTERPRET=1 in the environment before triton is imported")
        self.launches: list[Launch] = []
        self._stack = ExitStack()

    @property
    def faults(self) -> list[str]:
        """Every fault of every launch."""
        return [fault for launch in self.launches for fault in launch.faults]

    def __enter__(self) -> KernelGuard:
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        inner = {
            name: getattr(builder, name)
            for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw", "create_atomic_cas")
        }
        run, convert, move = executor.__call__, interpreter._implicit_cvt, builder.set_grid_idx

        def launch(this: Any, *args: Any, **kwargs: Any) -> None:
            self._begin(this, args, kwargs)
            run(this, *args, **kwargs)
            self._end()

        def tagged(arg: Any) -> Any:
            value = convert(arg)
            if hasattr(arg, "data_ptr"):
                value.handle.data = value.handle.data | np.uint64(self._number(arg) << _TAG)
            return value

        def load(this: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            return inner["create_masked_load"](this, *self._watch(ptrs, mask, store=None), *rest)

        def store(this: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            ptrs, mask = self._watch(ptrs, mask, store=value)
            return inner["create_masked_store"](this, ptrs, value, mask, *rest)

        def no_atomics(this: Any, *args: Any) -> Any:
            raise NotImplementedError("KernelGuard: no kernel of asrd uses atomics; their order is not reproducible")

        def barrier(this: Any) -> None:
            self.launches[-1].stretch += 1

        def program(this: Any, *index: int) -> None:
            move(this, *index)
            self.launches[-1].stretch += 1
            self.launches[-1].program = int(np.ravel_multi_index(index, this.grid_dim))

        for target, name, function in (
            (executor, "__call__", launch),
            (interpreter, "_implicit_cvt", tagged),
            (builder, "create_masked_load", load),
            (builder, "create_masked_store", store),
            (builder, "create_atomic_rmw", no_atomics),
            (builder, "create_atomic_cas", no_atomics),
            (builder, "create_barrier", barrier),
            (builder, "set_grid_idx", program),
        ):
            self._stack.enter_context(patch.object(target, name, function))
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        self._stack.close()
        if kind is None and self.faults:
            raise MemoryFault("\n".join(self.faults))

    def _begin(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(executor.arg_names, args, strict=False)) | kwargs
        names = [(name, value) for name, value in given.items() if isinstance(value, torch.Tensor)]
        if any(tensor.device.type != "cpu" for _, tensor in names):
            raise RuntimeError("KernelGuard watches CPU tensors only: the interpreter copies others")
        file = inspect.getsourcefile(executor.fn) or ""
        warps = int(kwargs.get("num_warps", _DEFAULT_WARPS))
        self.launches.append(Launch(executor.fn.__name__, file, warps, names))

    def _end(self) -> None:
        launch = self.launches[-1]
        launch.grid = tuple(interpreter.interpreter_builder.grid_dim)
        _check_programs(launch)
        _check_stretches(launch)

    def _number(self, tensor: Any) -> int:
        """Register an argument of the launch that begins; its number, from 1."""
        launch = self.launches[-1]
        like = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        matching = [
            name for name, given in launch.names if (given.data_ptr(), tuple(given.shape), given.stride()) == like
        ]
        launch.arguments.append(Argument.of(matching[0] if matching else "an argument", tensor))
        return len(launch.arguments)

    def _watch(self, ptrs: Any, mask: Any, store: Any) -> tuple[Any, Any]:
        """Check and note one access; its pointers without numbers, and its mask without faulty lanes."""
        launch = self.launches[-1]
        pointers = np.asarray(ptrs.data)
        lanes = np.broadcast_to(np.asarray(mask.data), pointers.shape).astype(bool)
        width = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        address = pointers & _ADDRESS
        sound = lanes.copy()
        for number in np.unique(pointers[lanes] >> np.uint64(_TAG)):
            mine = lanes & (pointers >> np.uint64(_TAG) == number)
            if not 1 <= number <= len(launch.arguments):
                launch.fault(f"a pointer that comes from no argument is used{self._line(launch)}")
                sound &= ~mine
                continue
            argument = launch.arguments[int(number) - 1]
            inside = argument.holds(address, width)
            if not inside[mine].all():
                self._outside(launch, argument, address[mine & ~inside], store is not None)
            sound &= inside | ~mine
            self._note(launch, int(number) - 1, address[mine & inside], width, store, mine & inside)
        handle = interpreter.TensorHandle
        return handle(address, ptrs.dtype), handle(sound, triton.language.int1)

    def _note(
        self, launch: Launch, number: int, address: np.ndarray, width: int, store: Any, lanes: np.ndarray
    ) -> None:
        if not len(address):
            return
        distinct, first, back = np.unique(address, return_index=True, return_inverse=True)
        if store is not None and len(distinct) < len(address):
            values = np.ascontiguousarray(np.broadcast_to(store.data, lanes.shape)[lanes])
            if (values.view(f"V{values.itemsize}") != values.view(f"V{values.itemsize}")[first][back]).any():
                name = launch.arguments[number].name
                launch.fault(f"lanes of one store write different values to one element of {name}{self._line(launch)}")
        spans = launch.read if store is None else launch.written
        spans.add(distinct.astype(np.int64), width, number, launch.program, launch.stretch)

    def _outside(self, launch: Launch, argument: Argument, address: np.ndarray, store: bool) -> None:
        low, high = (int(a) - argument.base for a in (address.min(), address.max()))
        launch.fault(
            f"program {launch.program} {'stores' if store else 'loads'} outside {argument.name} "
            f"(shape {list(argument.sizes)}, strides {list(argument.strides)}, {argument.item} bytes each): "
            f"{len(address)} lanes at bytes {low} to {high}{self._line(launch)}"
        )

    def _line(self, launch: Launch) -> str:
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_filename != launch.file:
            frame = frame.f_back  # type: ignore[assignment]
        return f", line {frame.f_lineno}" if frame is not None else ""
