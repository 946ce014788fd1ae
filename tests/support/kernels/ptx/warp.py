"""Instructions by which the threads of a warp exchange values: shfl.sync, redux.sync, and bar.warp.sync.

All threads that an instruction's mask names must execute it together: a thread that waits for one that is elsewhere
would wait for ever, or get an undefined value.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tests.support.kernels.ptx import floats
from tests.support.kernels.ptx.parse import Immediate, Instruction, Operand, Register, Unsupported
from tests.support.kernels.ptx.unit import TYPES, WARP, Array, Mask, Reader, Step, Unit, reader, writer

_LANE = np.arange(WARP)
REDUCE: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "min": np.minimum, "max": np.maximum,
}  # fmt: skip
FLOAT_REDUCE: dict[str, Callable[[Array, Array], Array]] = {"min": floats.minimum, "max": floats.maximum}


def check_members(unit: Unit, mask: Mask, members: Array, step: Instruction) -> NDArray[np.bool_]:
    """[warps, 32]: the threads that take part. A fault if a warp executes with others than those named."""
    named = unit.whole(members).reshape(-1, WARP)[:, :1] if len(members) > 1 else members[:, None]
    if mask is not None:
        active = mask.reshape(-1, WARP)
        named = np.where(active, unit.whole(members).reshape(-1, WARP), 0).max(1, keepdims=True)  # of those active
    wanted = (named >> _LANE.astype(np.uint32)) & 1 == 1
    wanted = np.broadcast_to(wanted, (unit.size // WARP, WARP))
    if mask is None:
        if not wanted.all():
            unit.faults.add("shuffle", step, "threads take part that the mask does not name")
        return wanted
    if (active.any(1, keepdims=True) & (wanted != active)).any():
        unit.faults.add("shuffle", step, "the threads that the mask names do not execute this together")
    return active


def source_lanes(how: str, offset: Array, clamp: Array) -> tuple[Array, Array]:
    """[.., 32]: from which lane each one reads, and whether that lies in its segment (else it reads itself)."""
    segment = (clamp >> 8) & 31
    top = (_LANE & segment) | (clamp & 31 & ~segment)
    if how == "bfly":
        lane = _LANE ^ offset
        inside = lane <= top
    elif how == "up":
        lane = _LANE - offset
        inside = lane >= top
    elif how == "down":
        lane = _LANE + offset
        inside = lane <= top
    elif how == "idx":
        lane = (_LANE & segment) | (offset & ~segment)
        inside = lane <= top
    else:
        raise Unsupported(f"shfl.sync.{how}")
    return np.where(inside, lane, _LANE), inside


def shuffle(step: Instruction) -> Step:
    """shfl.sync d|p, a, b, c, mask: d is a of another lane."""
    if step.parts[0:2] != ("shfl", "sync") or step.parts[-1] != "b32":
        raise Unsupported(step.text)
    operands = list(step.operands)
    put = writer(operands.pop(0), TYPES["b32"])
    put_inside = writer(operands.pop(0), TYPES["pred"]) if _is_predicate(operands[0]) else None
    value, how = reader(operands[0], TYPES["b32"]), step.parts[2]
    offset, clamp = _amount(operands[1]), _amount(operands[2])
    members = reader(operands[3], TYPES["u32"])

    def exchange(unit: Unit, mask: Mask) -> None:
        active = check_members(unit, mask, members(unit), step)
        lane, inside = source_lanes(how, offset(unit), clamp(unit))
        lane = np.broadcast_to(lane, active.shape)
        if mask is not None and (active & ~np.take_along_axis(active, lane, 1)).any():
            unit.faults.add("shuffle", step, "a value is taken from a thread that does not take part")
        given = unit.whole(value(unit)).reshape(-1, WARP)
        put(unit, np.take_along_axis(given, lane, 1).ravel(), mask)
        if put_inside is not None:
            put_inside(unit, np.broadcast_to(inside, active.shape).ravel(), mask)

    return exchange


def _is_predicate(operand: Operand) -> bool:
    return isinstance(operand, Register) and operand.bits == 1


def _amount(operand: Operand) -> Reader:
    """A lane number or clamp as int64, of shape [1] or [warps, 32]."""
    source = reader(operand, TYPES["u32"])
    if isinstance(operand, Immediate):
        return lambda unit: source(unit).astype(np.int64) & 0x1FFF

    def per_lane(unit: Unit) -> Array:
        value = source(unit).astype(np.int64) & 0x1FFF
        return value if len(value) == 1 else value.reshape(-1, WARP)

    return per_lane


def reduction(step: Instruction) -> Step:
    """redux.sync d, a, mask: every thread gets the sum, minimum, ... over the threads of the mask."""
    how, last = step.parts[2], step.parts[-1]
    table = FLOAT_REDUCE if last == "f32" else REDUCE
    if len(step.parts) != 4 or step.parts[1] != "sync" or how not in table or last not in ("s32", "u32", "b32", "f32"):
        raise Unsupported(step.text)
    function, kind = table[how], TYPES[last]
    put, value = writer(step.operands[0], kind), reader(step.operands[1], kind)
    members = reader(step.operands[2], TYPES["u32"])

    def reduce(unit: Unit, mask: Mask) -> None:
        active = check_members(unit, mask, members(unit), step)
        given = unit.whole(value(unit)).reshape(-1, WARP)
        first = np.take_along_axis(given, active.argmax(1)[:, None], 1)
        total = first
        for lane in range(WARP):
            taken = active[:, lane : lane + 1] & (lane != active.argmax(1)[:, None])
            total = np.where(taken, function(total, given[:, lane : lane + 1]), total)
        put(unit, np.repeat(total[:, 0], WARP), mask)

    return reduce


def synchronise(step: Instruction) -> Step:
    """bar.warp.sync mask: the threads of a warp meet. Accesses of one warp count as ordered anyway."""
    members = reader(step.operands[0], TYPES["u32"])

    def meet(unit: Unit, mask: Mask) -> None:
        check_members(unit, mask, members(unit), step)

    return meet
