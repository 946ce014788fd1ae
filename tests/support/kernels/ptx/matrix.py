"""Tensor-core instructions: ldmatrix, stmatrix and mma.sync of whole warps.

A product of float16 or bfloat16 is exact in float64; the sum is made in float64 and rounded once to float32. Hardware
adds in an order and precision of its own, so results may differ from it in the last bits.
"""

from __future__ import annotations

import numpy as np

from tests.support.kernels.ptx import floats
from tests.support.kernels.ptx.access import address_reader, read_memory, write_memory
from tests.support.kernels.ptx.memory import Access
from tests.support.kernels.ptx.parse import Instruction, Unsupported, Vector
from tests.support.kernels.ptx.unit import TYPES, WARP, Array, Mask, Step, Unit, reader, writer

_GROUP, _QUARTER = np.arange(WARP) // 4, np.arange(WARP) % 4
_WORDS = 4  # 32-bit words of a row of 8 16-bit numbers


def whole_warps(unit: Unit, mask: Mask, step: Instruction) -> Array:
    """[warps] bool: which warps execute. A fault if one does so with only a part of its threads."""
    if mask is None:
        return np.ones(unit.size // WARP, bool)
    active = mask.reshape(-1, WARP)
    if (active.any(1) != active.all(1)).any():
        unit.faults.add("shuffle", step, "only a part of the warp executes it")
    return np.asarray(active.all(1))


def matrix_access(step: Instruction, number: int) -> Step:
    """ldmatrix and stmatrix: x1, x2 or x4 matrices of 8 rows of 16 bytes; lane 8 i + r has the address of row r of
    matrix i; a thread holds words (row lane // 4, word lane % 4), or of the transposed matrix if .trans."""
    known = {"sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16", step.name}
    if set(step.parts) - known:
        raise Unsupported(step.text)
    count = next(int(part[1:]) for part in step.parts if part in ("x1", "x2", "x4"))
    loads, transposed = step.name == "ldmatrix", "trans" in step.parts
    vector, address = step.operands if loads else step.operands[::-1]
    if not isinstance(vector, Vector) or len(vector.items) != count:
        raise Unsupported(step.text)
    where, access = address_reader(address), Access(step, number, 4, _WORDS)
    puts = [writer(item, TYPES["b32"]) for item in vector.registers]
    values = [reader(item, TYPES["b32"]) for item in vector.registers]

    def rows_mask(unit: Unit, warps: Array) -> Array:
        return (warps[:, None] & (np.arange(WARP) < 8 * count)).ravel()

    def read(unit: Unit, mask: Mask) -> None:
        warps = whole_warps(unit, mask, step)
        words = read_memory(unit, unit.shared, where(unit), rows_mask(unit, warps), access, "shared load")
        matrices = words.T.reshape(-1, count, 8, _WORDS)
        matrices = _transposed(matrices) if transposed else matrices
        for i, put in enumerate(puts):
            found = np.zeros((len(warps), WARP), np.uint32)
            found[warps] = matrices[:, i, _GROUP, _QUARTER]
            put(unit, found.ravel(), mask)

    def write(unit: Unit, mask: Mask) -> None:
        warps = whole_warps(unit, mask, step)
        held = [unit.whole(value(unit)).reshape(-1, WARP)[warps].reshape(-1, 8, _WORDS) for value in values]
        matrices = np.stack(held, axis=1)
        matrices = _transposed(matrices) if transposed else matrices
        words = np.ascontiguousarray(matrices.reshape(-1, _WORDS).T)
        write_memory(unit, unit.shared, where(unit), words, rows_mask(unit, warps), access)

    return read if loads else write


def _transposed(matrices: Array) -> Array:
    """[..., 8, 4] words as matrices of 16-bit numbers, transposed."""
    halves = np.ascontiguousarray(matrices).view(np.uint16)
    return np.ascontiguousarray(np.swapaxes(halves, -1, -2)).view(np.uint32)


def as_numbers(words: Array, kind: str) -> Array:
    """[..., 2 n] float64 of the 16-bit numbers in [..., n] words."""
    halves = np.ascontiguousarray(words).view(np.uint16)
    single = floats.bf16_to_f32(halves) if kind == "bf16" else halves.view(np.float16)
    return single.astype(np.float64)


def fragment(registers: Array | list[Array]) -> Array:
    """[warps, 16, 8] words of matrix a, of which each lane of [warps, 32] holds four."""
    words = np.empty((len(registers[0]), 16, 8), np.uint32)
    for i, held in enumerate(registers):
        words[:, _GROUP + 8 * (i % 2), _QUARTER + 4 * (i // 2)] = held
    return words


def multiply(step: Instruction) -> Step:
    """mma.sync m16n8k16: d = a b + c, a [16, 16] by rows, b [16, 8] by columns, c and d [16, 8] float32."""
    if step.parts[:6] != ("mma", "sync", "aligned", "m16n8k16", "row", "col"):
        raise Unsupported(step.text)
    out, kind, other, add = step.parts[6:]
    if (out, add) != ("f32", "f32") or kind != other or kind not in ("f16", "bf16"):
        raise Unsupported(step.text)
    d, a, b, c = ([*operand.registers] if isinstance(operand, Vector) else [] for operand in step.operands)
    if [len(d), len(a), len(b), len(c)] != [4, 4, 2, 4]:
        raise Unsupported(step.text)
    puts = [writer(item, TYPES["f32"]) for item in d]
    first, second = ([reader(item, TYPES["b32"]) for item in side] for side in (a, b))
    third = [reader(item, TYPES["f32"]) for item in c]

    def product(unit: Unit, mask: Mask) -> None:
        whole_warps(unit, mask, step)
        left, right, plus = (
            np.stack([unit.whole(source(unit)) for source in side]).reshape(len(side), -1, WARP)
            for side in (first, second, third)
        )
        warps = left.shape[1]
        words_b = np.empty((warps, 8, 8), np.uint32)  # of b's columns
        total = np.empty((warps, 16, 8), np.float32)
        for i in range(4):
            total[:, _GROUP + 8 * (i // 2), 2 * _QUARTER + i % 2] = plus[i]
        for i in range(2):
            words_b[:, _GROUP, _QUARTER + 4 * i] = right[i]
        exact = as_numbers(fragment(left), kind) @ np.swapaxes(as_numbers(words_b, kind), 1, 2) + total
        rounded = exact.astype(np.float32)
        for i, put in enumerate(puts):
            found = rounded[:, _GROUP + 8 * (i // 2), 2 * _QUARTER + i % 2]
            put(unit, np.ascontiguousarray(found).ravel(), mask)

    return product
