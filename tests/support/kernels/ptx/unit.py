"""Threads that are executed together: their registers, where each of them is, and how an instruction reaches operands.

A register is an array of raw bits, one element a thread, or a single element if it is the same in all of them. Arrays
are never changed in place, so that a copy is a name for the same array. An instruction is decoded once, into a `Step`;
a step gets the unit and the mask of the threads that execute it (None: all of them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tests.support.kernels.ptx.counts import Counts
from tests.support.kernels.ptx.faults import Faults
from tests.support.kernels.ptx.memory import Access, Lanes, Space
from tests.support.kernels.ptx.parse import Immediate, Kernel, Operand, Register, Symbol, Unsupported
from tests.support.kernels.ptx.races import FIRST_EPOCH, stamps

WARP = 32
SHARED_BASE = 1024  # address of a block's shared memory
ORDERS = ("lockstep", "forward", "reverse", "random")
LEFT = 1 << 30  # program counter of a thread that has returned
WAITS = 1 << 20  # added to the program counter of a thread that waits at a barrier

Work = TypeVar("Work")
Array = NDArray[Any]  # of whatever type the instruction reads
Mask = NDArray[np.bool_] | None
TYPES = {
    "pred": np.dtype(bool), "b8": np.dtype("u1"), "u8": np.dtype("u1"), "s8": np.dtype("i1"),
    "b16": np.dtype("u2"), "u16": np.dtype("u2"), "s16": np.dtype("i2"), "f16": np.dtype("f2"), "bf16": np.dtype("u2"),
    "b32": np.dtype("u4"), "u32": np.dtype("u4"), "s32": np.dtype("i4"), "f32": np.dtype("f4"),
    "b64": np.dtype("u8"), "u64": np.dtype("u8"), "s64": np.dtype("i8"), "f64": np.dtype("f8"),
}  # fmt: skip
RAW = {1: np.dtype(bool), 8: np.dtype("u1"), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}
_UNSET = {1: True, 16: 0xBEEF, 32: 0xDEADBEEF, 64: 0xDEADBEEFDEADBEEF}  # what a register holds at first


@dataclass(frozen=True)
class Options:
    """How a launch is executed. `order`: which warp of a block runs first between two barriers: all at once
    ("lockstep"), "forward", "reverse" or "random" (by basic blocks, from `seed`). `ex2_ulps`: error of ex2.approx."""

    order: str = "lockstep"
    races: bool = True
    counting: bool = False
    ex2_ulps: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order is {self.order!r}: it must be one of {ORDERS}")


@dataclass(frozen=True)
class Launch:
    """What all threads of a launch share."""

    kernel: Kernel
    parameters: dict[str, int]  # raw bits
    grid: tuple[int, int, int]
    memory: Space
    options: Options
    faults: Faults
    counts: Counts | None


@dataclass
class Groups(Generic[Work]):
    """Asynchronous work of a unit that has not been waited for; `closed`: how many groups each thread has closed."""

    closed: NDArray[np.int64]
    under_way: list[Work] = field(default_factory=list)

    def close(self, mask: Mask) -> None:
        """These threads close the group that they have filled."""
        self.closed = self.closed + (1 if mask is None else mask)


@dataclass(frozen=True)
class Copy:
    """What one cp.async of the threads `lane` will write; `group` is each thread's number of closed groups then."""

    lane: NDArray[np.int64]
    group: NDArray[np.int64]
    address: NDArray[np.int64]
    values: Array
    access: Access

    def __getitem__(self, chosen: NDArray[np.bool_]) -> Copy:
        return Copy(self.lane[chosen], self.group[chosen], self.address[chosen], self.values[:, chosen], self.access)


@dataclass(frozen=True)
class Product:
    """One wgmma of the threads in `mask`: `finish` computes and writes its result for those of a mask."""

    mask: NDArray[np.bool_]
    group: NDArray[np.int64]
    finish: Callable[[NDArray[np.bool_]], None]


class Unit:
    """Whole warps: all of some blocks, or the warps of one number of some blocks."""

    def __init__(self, launch: Launch, shared: Space, blocks: NDArray[np.int64], warps: NDArray[np.int64]) -> None:
        """`blocks`: numbers of the blocks; `warps`: which of their warps."""
        self.launch, self.shared, self.faults = launch, shared, launch.faults
        each = len(warps) * WARP
        self.size = len(blocks) * each
        thread = (warps[:, None] * WARP + np.arange(WARP)).ravel()
        self.thread = np.tile(thread, len(blocks))
        self.slot = np.repeat(np.arange(len(blocks)), each)
        self.block = np.repeat(blocks, each)
        self.epoch = np.full(self.size, FIRST_EPOCH, np.int64)
        self.pc = np.zeros(self.size, np.int64)
        unset = {bits: np.full(1, value, RAW[bits]) for bits, value in _UNSET.items()}
        self.registers: list[Array] = [unset[register.bits] for register in launch.kernel.registers]
        self.special = self._special(launch.grid, launch.kernel.threads)
        self.copies: Groups[Copy] = Groups(np.zeros(self.size, np.int64))
        self.products: Groups[Product] = Groups(np.zeros(self.size, np.int64))
        self.stamp()

    def _special(self, grid: tuple[int, int, int], threads: int) -> dict[str, Array]:
        x, y, z = grid
        numbers: dict[str, Any] = {
            "%tid.x": self.thread, "%tid.y": 0, "%tid.z": 0, "%ntid.x": threads, "%ntid.y": 1, "%ntid.z": 1,
            "%ctaid.x": self.block % x, "%ctaid.y": self.block // x % y, "%ctaid.z": self.block // (x * y),
            "%nctaid.x": x, "%nctaid.y": y, "%nctaid.z": z, "%laneid": self.thread % WARP,
        }  # fmt: skip
        found = {name: np.atleast_1d(value).astype(np.uint32) for name, value in numbers.items()}
        return found | {"global_smem": np.array([SHARED_BASE], np.uint32)}

    def stamp(self) -> None:
        """Say who and when the threads are; to be called when an epoch begins."""
        self.lanes = Lanes(self.slot, stamps(self.block, self.thread // WARP, self.epoch), self.thread)

    def put(self, number: int, value: Array, mask: Mask) -> None:
        """Write a register of the threads in the mask."""
        self.registers[number] = value if mask is None else np.where(mask, value, self.registers[number])

    def whole(self, value: Array) -> Array:
        """A value with one element a thread."""
        return value if len(value) == self.size else np.repeat(value, self.size)

    def active(self, mask: Mask) -> Lanes:
        """The threads of a mask, for an access to memory."""
        return self.lanes if mask is None else self.lanes[mask]

    def chosen(self, value: Array, mask: Mask) -> Array:
        """The value's elements of the threads in the mask."""
        return self.whole(value) if mask is None else self.whole(value)[mask]


Step = Callable[[Unit, Mask], None]
Reader = Callable[[Unit], Array]
Writer = Callable[[Unit, Array, Mask], None]


def constant(text: str, kind: np.dtype) -> Array:
    """An immediate as an array of one element."""
    if text[:2].lower() in ("0f", "0d"):
        value = np.array([int(text[2:], 16)], "u4" if text[1] in "fF" else "u8")
        number = value.view("f4" if text[1] in "fF" else "f8")
        return number.astype(kind) if kind.kind == "f" and kind != number.dtype else value.view(kind)
    whole = int(text, 0)
    if kind.kind == "b":
        return np.array([whole != 0])
    if kind.kind == "f":
        raise Unsupported(f"the immediate {text} of a floating-point instruction")
    return np.array([whole & ((1 << 8 * kind.itemsize) - 1)], f"u{kind.itemsize}").view(kind)


def reader(operand: Operand, kind: np.dtype) -> Reader:
    """Read an operand as a type; of a wider register, its low bits."""
    if isinstance(operand, Immediate):
        value = constant(operand.text, kind)
        return lambda unit: value
    if isinstance(operand, Symbol):
        name, bits = operand.name, f"u{kind.itemsize}"
        return lambda unit: _special(unit, name).astype(bits).view(kind)
    if not isinstance(operand, Register):
        raise Unsupported(f"operand {operand}")
    number, width = operand.number, 8 * kind.itemsize if kind.kind != "b" else 1
    if operand.bits == width:
        return lambda unit: unit.registers[number].view(kind)
    if operand.bits < width or operand.bits == 1:
        raise Unsupported(f"{operand.name} read as {kind}")
    return lambda unit: unit.registers[number].astype(f"u{kind.itemsize}").view(kind)


def _special(unit: Unit, name: str) -> Array:
    if name not in unit.special:
        raise Unsupported(f"{name} as an operand")
    return unit.special[name]


def writer(operand: Operand, kind: np.dtype) -> Writer:
    """Write a value of a type to a register; a wider one takes it with its sign or with zeros."""
    if not isinstance(operand, Register):
        raise Unsupported(f"{operand} as a destination")
    number, raw = operand.number, RAW[operand.bits]
    if operand.bits == (8 * kind.itemsize if kind.kind != "b" else 1):
        return lambda unit, value, mask: unit.put(number, value.view(raw), mask)
    if operand.bits < 8 * kind.itemsize or kind.kind == "f":
        raise Unsupported(f"{kind} written to {operand.name}")
    wide = f"{kind.kind}{raw.itemsize}"
    return lambda unit, value, mask: unit.put(number, value.astype(wide).view(raw), mask)
