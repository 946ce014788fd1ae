"""wgmma of sm_90: products of four warps, a [64, 16] by b [16, columns].

Hardware reads the operands at some moment between the instruction and the wait for its group. Here they are read at
both ends: results are those of the later moment, and operands that changed in between are a fault. Operand b lies in
shared memory, a there or in registers. Of the layouts in shared memory, those that Triton uses for 128 bytes at a time,
swizzled: by rows of k, b also by its columns.

wgmma.fence and fence.proxy do nothing here: a missing fence would not be noticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tests.support.kernels.ptx.matrix import as_numbers, fragment, whole_warps
from tests.support.kernels.ptx.memory import Access, Lanes
from tests.support.kernels.ptx.parse import Immediate, Instruction, Operand, Unsupported, Vector
from tests.support.kernels.ptx.unit import TYPES, WARP, Array, Mask, Product, Reader, Step, Unit, Writer, reader, writer

Fetch = Callable[[Array], Array]  # [warps] bool: which -> [warps, rows, 8] words of these, 16 numbers of k a row
_SHAPE = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(f16|bf16)\.\2$")
_SWIZZLED = 1  # of 128 bytes, in the descriptor's upper two bits
_GROUP, _QUARTER = np.arange(WARP) // 4, np.arange(WARP) % 4
_DEPTH, _PIECES = 16, 2  # numbers of k, and pieces of 16 bytes that hold them


def decode(step: Instruction, number: int) -> Step:
    """wgmma.mma_async, fence, commit_group and wait_group."""
    if step.opcode == "wgmma.fence.sync.aligned":
        return lambda unit, mask: None
    if step.opcode == "wgmma.commit_group.sync.aligned":
        return _close_group
    if step.opcode == "wgmma.wait_group.sync.aligned" and isinstance(step.operands[0], Immediate):
        pending = int(step.operands[0].text, 0)
        return lambda unit, mask: _finish(unit, mask, pending)
    shape = _SHAPE.match(step.opcode)
    if shape is None:
        raise Unsupported(step.text)
    return _multiply(step, number, int(shape[1]), shape[2])


def _close_group(unit: Unit, mask: Mask) -> None:
    unit.products.close(mask)


def _finish(unit: Unit, mask: Mask, pending: int) -> None:
    """The products of all groups but the latest `pending` are done, in their order."""
    remaining = []
    for product in unit.products.under_way:
        ready = product.mask & (product.group < unit.products.closed - pending)
        if mask is not None:
            ready &= mask
        if ready.any():
            product.finish(ready)
        if (rest := product.mask & ~ready).any():
            remaining.append(Product(rest, product.group, product.finish))
    unit.products.under_way = remaining


def _multiply(step: Instruction, number: int, columns: int, kind: str) -> Step:
    """d = a b + d (or a b, if the predicate is off), a [64, 16], b [16, columns]; a warp makes 16 rows of d."""
    d, a, b, add, *switches = step.operands
    given = [operand.text for operand in switches if isinstance(operand, Immediate)]
    wanted = ["1", "1"] if isinstance(a, Vector) else ["1", "1", "0"]  # signs; a in shared memory lies by rows of k
    if given[:-1] != wanted or not isinstance(d, Vector) or len(d.items) != columns // 2:
        raise Unsupported(step.text)
    access = Access(step, number, 4, 4)
    left = _in_registers(a) if isinstance(a, Vector) else _in_shared(a, access, 16, own_rows=True)
    right = _in_shared(b, access, columns, by_columns=given[-1] == "1")
    puts = [writer(item, TYPES["f32"]) for item in d.registers]
    totals = [reader(item, TYPES["f32"]) for item in d.registers]
    adds = reader(add, TYPES["pred"])

    def issue(unit: Unit, mask: Mask) -> None:
        warps = whole_warps(unit, mask, step)
        sides = (left(unit), right(unit))
        early = [side(warps) for side in sides]
        keep = unit.whole(adds(unit)).reshape(-1, WARP)[:, :1, None]

        def finish(ready: NDArray[np.bool_]) -> None:
            now = whole_warps(unit, ready, step)
            late = [side(now) for side in sides]
            if any((one[now] != other[now]).any() for one, other in zip(early, late, strict=True)):
                unit.faults.add("race", step, "an operand was overwritten before the wait for this product")
            before = _gather(unit, totals)
            a, b = (as_numbers(words, kind) for words in late)
            _scatter(unit, puts, (a @ np.swapaxes(b, 1, 2) + np.where(keep, before, 0)).astype(np.float32), ready)

        here = np.repeat(warps, WARP)
        unit.products.under_way.append(Product(here, unit.products.closed, finish))

    return issue


def _in_registers(operand: Vector) -> Callable[[Unit], Fetch]:
    """Operand a in four registers of each thread, laid out as a of mma.sync."""
    sources = [reader(item, TYPES["b32"]) for item in operand.registers]

    def fetch(unit: Unit, warps: Array) -> Array:
        return fragment([unit.whole(source(unit)).reshape(-1, WARP) for source in sources])

    return lambda unit: partial(fetch, unit)


def _in_shared(
    operand: Operand, access: Access, rows: int, *, own_rows: bool = False, by_columns: bool = False
) -> Callable[[Unit], Fetch]:
    """An operand in shared memory, where a descriptor says. `own_rows`: each warp takes 16 rows of its own."""
    described = reader(operand, TYPES["b64"])

    def at(unit: Unit) -> Fetch:
        descriptor = unit.whole(described(unit)).reshape(-1, WARP)[:, 0].astype(np.int64)

        def fetch(warps: Array) -> Array:
            words = np.zeros((len(warps), rows, _DEPTH // 2), np.uint32)
            given = descriptor[warps, None, None]
            if (given >> 62 & 3 != _SWIZZLED).any():
                raise Unsupported(f"{access.instruction.text}: a layout without swizzling of 128 bytes")
            first = unit.thread[::WARP][warps] // WARP % 4 * 16 if own_rows else np.zeros(len(given), np.int64)
            plain = _columns(given, rows) if by_columns else _rows(given, first, rows)
            found = _read(unit, warps, plain ^ ((plain >> 7 & 7) << 4), access)
            words[warps] = _turned(found) if by_columns else found
            return words

        return fetch

    return at


def _field(descriptor: Array, bit: int) -> Array:
    """Bytes in a field of a descriptor, which counts pieces of 16."""
    return (descriptor >> bit & 0x3FFF) << 4


def _rows(descriptor: Array, first: Array, rows: int) -> Array:
    """[warps, rows, 2] addresses, before swizzling, of the pieces of rows that hold 16 numbers of k."""
    row = first[:, None, None] + np.arange(rows)[:, None]
    groups = row // 8 * _field(descriptor, 32)
    return _field(descriptor, 0) + groups + row % 8 * 128 + 16 * np.arange(_PIECES)


def _columns(descriptor: Array, columns: int) -> Array:
    """[warps, 16, columns / 8] addresses, before swizzling, of the pieces of columns, 64 of which lie side by side."""
    k, piece = np.arange(_DEPTH)[:, None], np.arange(columns // 8)
    groups = k // 8 * _field(descriptor, 32) + piece // 8 * _field(descriptor, 16)
    return _field(descriptor, 0) + groups + k % 8 * 128 + piece % 8 * 16


def _read(unit: Unit, warps: Array, address: Array, access: Access) -> Array:
    """[warps, n, words] of [warps, n, pieces] addresses, read by the warps' first threads."""
    lanes = unit.lanes[np.flatnonzero(warps) * WARP]
    each = address[0].size
    many = Lanes(*(np.repeat(values, each) for values in (lanes.slot, lanes.stamp, lanes.thread)))
    return unit.shared.load(many, address.ravel(), access).T.reshape(*address.shape[:2], -1)


def _turned(words: Array) -> Array:
    """[warps, 16, columns / 2] words of 16-bit numbers as [warps, columns, 8] words of their transpose."""
    halves = np.ascontiguousarray(words).view(np.uint16)
    return np.ascontiguousarray(np.swapaxes(halves, 1, 2)).view(np.uint32)


def _places(number: int) -> tuple[Array, Array]:
    """Row and column, in a warp's part of d, that register `number` of each lane holds."""
    return _GROUP + 8 * (number % 4 // 2), number // 4 * 8 + 2 * _QUARTER + number % 2


def _gather(unit: Unit, totals: list[Reader]) -> Array:
    """[warps, 16, columns] from the registers of the warps' threads."""
    whole = np.empty((unit.size // WARP, 16, 2 * len(totals)), np.float32)
    for i, total in enumerate(totals):
        row, column = _places(i)
        whole[:, row, column] = unit.whole(total(unit)).reshape(-1, WARP)
    return whole


def _scatter(unit: Unit, puts: list[Writer], whole: Array, mask: NDArray[np.bool_]) -> None:
    for i, put in enumerate(puts):
        row, column = _places(i)
        put(unit, np.ascontiguousarray(whole[:, row, column]).ravel(), mask)
