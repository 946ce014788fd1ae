"""wgmma of sm_90: products of four warps whose operands lie in shared memory.

Hardware reads the operands at some moment between the instruction and the wait for its group. Here they are read at
both ends: results are those of the later moment, and operands that changed in between are a fault. Of the layouts, the
one that Triton uses for rows of 128 bytes: both operands by rows of k, swizzled in 128 bytes.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from benchmarks.kernels.ptx.matrix import as_numbers, whole_warps
from benchmarks.kernels.ptx.memory import Access, Lanes
from benchmarks.kernels.ptx.parse import Immediate, Instruction, Unsupported, Vector
from benchmarks.kernels.ptx.unit import TYPES, WARP, Array, Mask, Product, Reader, Step, Unit, Writer, reader, writer

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
    d, *operands, add, scale_a, scale_b, along_a, along_b = step.operands
    signs = [operand.text for operand in (scale_a, scale_b, along_a, along_b) if isinstance(operand, Immediate)]
    if signs != ["1", "1", "0", "0"] or not isinstance(d, Vector) or len(d.items) != columns // 2:
        raise Unsupported(step.text)
    left, right = (reader(operand, TYPES["b64"]) for operand in operands)
    puts = [writer(item, TYPES["f32"]) for item in d.registers]
    totals = [reader(item, TYPES["f32"]) for item in d.registers]
    adds, access = reader(add, TYPES["pred"]), Access(step, number, 4, 4)

    def issue(unit: Unit, mask: Mask) -> None:
        warps = whole_warps(unit, mask, step)
        first = unit.thread[::WARP] // WARP % 4 * 16  # row of a that a warp begins with
        sides = [(left(unit), first, 16), (right(unit), first * 0, columns)]
        early = [_operand(unit, value, step, rows, count, warps, access) for value, rows, count in sides]
        keep = unit.whole(adds(unit)).reshape(-1, WARP)[:, :1, None]

        def finish(ready: NDArray[np.bool_]) -> None:
            now = whole_warps(unit, ready, step)
            late = [_operand(unit, value, step, rows, count, now, access) for value, rows, count in sides]
            if any((one[now] != other[now]).any() for one, other in zip(early, late, strict=True)):
                unit.faults.add("race", step, "an operand was overwritten before the wait for this product")
            before = _gather(unit, totals)
            a, b = (as_numbers(words, kind) for words in late)
            _scatter(unit, puts, (a @ np.swapaxes(b, 1, 2) + np.where(keep, before, 0)).astype(np.float32), ready)

        here = np.repeat(warps, WARP)
        unit.products.under_way.append(Product(here, unit.products.closed, finish))

    return issue


def _operand(
    unit: Unit, descriptor: Array, step: Instruction, first: Array, rows: int, warps: Array, access: Access
) -> Array:
    """[all warps, rows, 8] words of 16 numbers a row, read by the warps' first threads; 0 of other warps."""
    words = np.zeros((len(warps), rows, _DEPTH // 2), np.uint32)
    given = unit.whole(descriptor).reshape(-1, WARP)[warps, 0].astype(np.int64)
    if (given >> 62 & 3 != _SWIZZLED).any():
        raise Unsupported(f"{step.text}: a layout without swizzling of 128 bytes")
    start, stride = (given & 0x3FFF) << 4, (given >> 32 & 0x3FFF) << 4
    row = first[warps][:, None, None] + np.arange(rows)[:, None]
    plain = start[:, None, None] + row // 8 * stride[:, None, None] + row % 8 * 128 + 16 * np.arange(_PIECES)
    address = plain ^ ((plain >> 7 & 7) << 4)
    lanes = unit.lanes[np.flatnonzero(warps) * WARP]
    each = rows * _PIECES
    many = Lanes(*(np.repeat(values, each) for values in (lanes.slot, lanes.stamp, lanes.thread)))
    found = unit.shared.load(many, address.ravel(), access)
    words[warps] = found.T.reshape(-1, rows, _DEPTH // 2)
    return words


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
