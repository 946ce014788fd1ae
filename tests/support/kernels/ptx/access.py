"""Loads, stores and asynchronous copies.

An asynchronous copy reads global memory when it is issued and lands in shared memory at the wait for its group, the
latest moment that is allowed; between the two, what it will overwrite must not be read.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.support.kernels.ptx.memory import Access, Space
from tests.support.kernels.ptx.parse import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Register,
    Symbol,
    Unsupported,
    Vector,
)
from tests.support.kernels.ptx.unit import RAW, TYPES, WARP, Array, Copy, Mask, Reader, Step, Unit, reader, writer

_CACHE_HINTS = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "relaxed", "weak", "nc", "L1::evict_last", "L1::no_allocate"}
_WIDEST = 16  # bytes of an access


def address_reader(operand: Operand) -> Reader:
    """Addresses as int64, one a thread (or a single one)."""
    if not isinstance(operand, Address):
        raise Unsupported(f"{operand} as an address")
    offset = np.int64(operand.offset)
    if isinstance(operand.base, Register):
        base = reader(operand.base, RAW[operand.base.bits])
    elif isinstance(operand.base, Symbol):
        base = reader(operand.base, TYPES["u32"])
    else:
        value = np.array([int(operand.base.text, 0)], np.uint64)
        return lambda unit: value.view(np.int64) + offset
    return lambda unit: base(unit).astype(np.int64) + offset


def space_of(step: Instruction) -> str:
    """global, shared or param."""
    found = [part for part in step.parts if part in ("global", "shared", "param", "shared::cta")]
    if len(found) != 1:
        raise Unsupported(step.text)
    return found[0].removesuffix("::cta")


def _shape(step: Instruction) -> tuple[np.dtype, int]:
    """Type and number of the words that a thread moves."""
    known = {step.name, "global", "shared", "param", "shared::cta", "v2", "v4", "v8", *_CACHE_HINTS}
    *rest, last = step.parts
    if set(rest) - known or last not in TYPES:
        raise Unsupported(step.text)
    count = next((int(part[1:]) for part in rest if part in ("v2", "v4", "v8")), 1)
    return TYPES[last], count


def narrowest(step: Instruction) -> dict[str, int]:
    """Bytes of the smallest piece of each space that an instruction accesses by itself."""
    if step.name in ("ld", "st") and space_of(step) != "param":
        return {space_of(step): _shape(step)[0].itemsize}
    if step.name == "cp" and step.parts[2] in ("ca", "cg"):
        return {"shared": 4, "global": 4}
    if step.name in ("ldmatrix", "stmatrix", "wgmma"):
        return {"shared": 4}
    return {}


def _items(operand: Operand, count: int) -> list[Operand]:
    items: list[Operand] = list(operand.items) if isinstance(operand, Vector) else [operand]
    if len(items) != count:
        raise Unsupported(f"{len(items)} registers for {count} words")
    return items


def read_memory(unit: Unit, space: Space, address: Array, mask: Mask, access: Access, kind: str) -> Array:
    """[count, n] words of the threads in the mask; noted in the counts under `kind`."""
    lanes, where = unit.active(mask), unit.chosen(address, mask)
    if unit.launch.counts is not None:
        unit.launch.counts.access(kind, where, lanes.slot * WARP + lanes.thread // WARP, access.bytes)
    return space.load(lanes, where, access)


def write_memory(unit: Unit, space: Space, address: Array, values: Array, mask: Mask, access: Access) -> None:
    """Store [count, n] words of the threads in the mask."""
    lanes, where = unit.active(mask), unit.chosen(address, mask)
    if unit.launch.counts is not None:
        kind = "shared store" if space is unit.shared else "global store"
        unit.launch.counts.access(kind, where, lanes.slot * WARP + lanes.thread // WARP, access.bytes)
    space.store(lanes, where, values, access)


def spread(unit: Unit, found: Array, mask: Mask) -> Array:
    """Values of the threads in the mask, as an array of all threads."""
    if mask is None:
        return found
    whole = np.zeros(unit.size, found.dtype)
    whole[mask] = found
    return whole


def load(step: Instruction, number: int) -> Step:
    """ld.param, ld.global, ld.shared."""
    kind, count = _shape(step)
    puts = [writer(item, kind) for item in _items(step.operands[0], count)]
    if space_of(step) == "param":
        return _load_parameter(step, kind, puts)
    shared, where = space_of(step) == "shared", address_reader(step.operands[1])
    access = Access(step, number, kind.itemsize, count)
    label = f"{space_of(step)} load"

    def read(unit: Unit, mask: Mask) -> None:
        space = unit.shared if shared else unit.launch.memory
        found = read_memory(unit, space, where(unit), mask, access, label)
        for put, values in zip(puts, found, strict=True):
            put(unit, spread(unit, values, mask).view(kind), mask)

    return read


def _load_parameter(step: Instruction, kind: np.dtype, puts: list[Callable[..., None]]) -> Step:
    address = step.operands[1]
    if not isinstance(address, Address) or not isinstance(address.base, Symbol) or address.offset or len(puts) != 1:
        raise Unsupported(step.text)
    name, bits = address.base.name, 8 * kind.itemsize

    def read(unit: Unit, mask: Mask) -> None:
        value = unit.launch.parameters[name] & ((1 << bits) - 1)
        puts[0](unit, np.array([value], f"u{kind.itemsize}").view(kind), mask)

    return read


def store(step: Instruction, number: int) -> Step:
    """st.global, st.shared."""
    kind, count = _shape(step)
    raw = RAW[8 * kind.itemsize]
    sources = [reader(item, raw) for item in _items(step.operands[1], count)]
    shared, where = space_of(step) == "shared", address_reader(step.operands[0])
    access = Access(step, number, kind.itemsize, count)

    def write(unit: Unit, mask: Mask) -> None:
        values = np.stack([unit.chosen(source(unit), mask) for source in sources])
        write_memory(unit, unit.shared if shared else unit.launch.memory, where(unit), values, mask, access)

    return write


def asynchronous_copy(step: Instruction, number: int) -> Step:
    """cp.async: the copy itself, commit_group, wait_group."""
    if step.opcode == "cp.async.commit_group":
        return _close_group
    if step.opcode in ("cp.async.wait_group", "cp.async.wait_all"):
        (allowed,) = step.operands or (Immediate("0"),)
        if not isinstance(allowed, Immediate):
            raise Unsupported(step.text)
        pending = int(allowed.text, 0)
        return lambda unit, mask: _land(unit, mask, pending)
    if step.parts[:3] not in (("cp", "async", "cg"), ("cp", "async", "ca")) or step.parts[3:5] != ("shared", "global"):
        raise Unsupported(step.text)
    target, source = address_reader(step.operands[0]), address_reader(step.operands[1])
    size = step.operands[2]
    if not isinstance(size, Immediate):
        raise Unsupported(step.text)
    whole = int(size.text, 0)
    given = reader(step.operands[3] if len(step.operands) > 3 else size, TYPES["u32"])
    access = Access(step, number, 4, whole // 4)

    def copy(unit: Unit, mask: Mask) -> None:
        wanted = unit.whole(given(unit))
        if not np.isin(unit.chosen(wanted, mask), (0, whole)).all():
            raise Unsupported(f"{step.text}: a part of the bytes")
        reads = (wanted != 0) if mask is None else (wanted != 0) & mask
        values = np.zeros((access.count, unit.size), np.uint32)
        if reads.any():
            values[:, reads] = read_memory(unit, unit.launch.memory, source(unit), reads, access, "global load")
        lane = np.arange(unit.size) if mask is None else np.flatnonzero(mask)
        address = unit.whole(target(unit))[lane]
        unit.shared.announce(unit.lanes[lane], address, access)
        copies = unit.copies
        copies.under_way.append(Copy(lane, copies.closed[lane], address, values[:, lane], access))

    return copy


def _close_group(unit: Unit, mask: Mask) -> None:
    unit.copies.close(mask)


def _land(unit: Unit, mask: Mask, pending: int) -> None:
    """The copies of all groups but the latest `pending` arrive."""
    remaining = []
    for copy in unit.copies.under_way:
        ready = copy.group < unit.copies.closed[copy.lane] - pending
        if mask is not None:
            ready &= mask[copy.lane]
        if ready.any():
            landed = copy[ready]
            here = np.zeros(unit.size, bool)
            here[landed.lane] = True
            address = np.zeros(unit.size, np.int64)
            address[landed.lane] = landed.address
            write_memory(unit, unit.shared, address, landed.values, here, landed.access)
        if not ready.all():
            remaining.append(copy[~ready])
    unit.copies.under_way = remaining


def granules(steps: list[Instruction]) -> dict[str, int]:
    """The narrowest access of a kernel to global and to shared memory, in bytes."""
    found = {"global": _WIDEST, "shared": _WIDEST}
    for step in steps:
        for space, size in narrowest(step).items():
            found[space] = min(found[space], size)
    return found
