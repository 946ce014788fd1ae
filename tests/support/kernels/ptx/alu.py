"""Arithmetic, comparison, selection and conversion: the tables that say what each such instruction computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from tests.support.kernels.ptx import floats
from tests.support.kernels.ptx.parse import Instruction, Symbol, Unsupported, Vector
from tests.support.kernels.ptx.unit import RAW, TYPES, Array, Mask, Reader, Step, Unit, reader, writer

Function = Callable[..., Array]


def _shift_left(a: Array, count: Array) -> Array:
    bits = 8 * a.itemsize
    return np.where(count < bits, a << np.minimum(count, bits - 1).astype(a.dtype), a.dtype.type(0))


def _shift_right(a: Array, count: Array) -> Array:
    bits = 8 * a.itemsize
    moved = a >> np.minimum(count, bits - 1).astype(a.dtype)
    return moved if a.dtype.kind == "i" else np.where(count < bits, moved, a.dtype.type(0))


def _quotient(a: Array, b: Array) -> Array:
    """Rounded towards zero; whatever by zero."""
    divisor = np.where(b == 0, b.dtype.type(1), b)
    floor = a // divisor
    return floor + ((floor < 0) & (floor * divisor != a)).astype(a.dtype)


def _remainder(a: Array, b: Array) -> Array:
    return a - _quotient(a, b) * b


def _product_high(a: Array, b: Array) -> Array:
    if a.itemsize > 4:
        raise Unsupported("mul.hi of 64 bits")
    wide = f"{a.dtype.kind}{2 * a.itemsize}"
    return ((a.astype(wide) * b.astype(wide)) >> np.array(8 * a.itemsize, wide)).astype(a.dtype)


def _product_wide(a: Array, b: Array) -> Array:
    wide = f"{a.dtype.kind}{2 * a.itemsize}"
    return a.astype(wide) * b.astype(wide)


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """Four of the eight bytes of b (above) and a, each by four bits of the selector: its number, and whether to fill
    the byte with its sign instead."""
    eight, result = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.uint32(0)
    for place in range(4):
        choice = selector >> np.uint32(4 * place) & np.uint32(15)
        byte = (eight >> (choice & np.uint32(7)).astype(np.uint64) * np.uint64(8) & np.uint64(255)).astype(np.uint32)
        result = result | np.where(choice & 8, (byte >> np.uint32(7)) * np.uint32(255), byte) << np.uint32(8 * place)
    return np.asarray(result)


INTEGER: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum, "mul.lo": np.multiply,
    "mul.hi": _product_high, "mul.wide": _product_wide, "div": _quotient, "rem": _remainder,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "neg": np.negative,
    "abs": np.abs, "mad.lo": lambda a, b, c: a * b + c, "mad.wide": lambda a, b, c: _product_wide(a, b) + c,
    "shl": _shift_left, "shr": _shift_right, "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
    "prmt": _permute,
}  # fmt: skip
PREDICATE: dict[str, Function] = {
    "and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not,
}  # fmt: skip
FLOAT: dict[str, Function] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs,
    "min": lambda *a: reduce(floats.minimum, a), "max": lambda *a: reduce(floats.maximum, a),
}  # fmt: skip
FUSED: dict[str, Function] = {"f32": floats.fma32, "f64": floats.fma64}
DIRECTED: dict[str, Function] = {"fma.rm": floats.fma32_down, "add.rz": floats.add32_to_zero}  # of float32
COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_OPPOSITE = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
_DIVIDES = ("div", "rem")
_ROUND: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
SATURATED: dict[str, Function] = {
    "cvt.sat.f32.f32": floats.saturated, "cvt.ftz.sat.f32.f32": floats.with_flush(floats.saturated),
}  # fmt: skip


def _float_compare(name: str) -> Function:
    """Ordered comparisons are false of a NaN, unordered ones (equ, ltu, ...) true."""
    if name in ("num", "nan"):
        wanted = name == "nan"
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == wanted
    if name in _OPPOSITE:
        ordered = _float_compare(_OPPOSITE[name])
        return lambda a, b: ~ordered(a, b)
    plain = COMPARE[name]
    if name == "ne":
        return lambda a, b: plain(a, b) & ~np.isnan(a) & ~np.isnan(b)
    return plain


def _apply(step: Instruction, function: Function, kinds: list[np.dtype], result: np.dtype) -> Step:
    """destination = function(operands), operand i read as kinds[i] (the last kind serves the rest)."""
    put = writer(step.operands[0], result)
    sources = [reader(operand, kinds[min(i, len(kinds) - 1)]) for i, operand in enumerate(step.operands[1:])]
    if len(sources) == 2:
        first, second = sources
        return lambda unit, mask: put(unit, function(first(unit), second(unit)), mask)
    return lambda unit, mask: put(unit, function(*(source(unit) for source in sources)), mask)


def _only(step: Instruction, allowed: set[str], suffixes: tuple[str, ...]) -> None:
    if unknown := set(suffixes) - allowed:
        raise Unsupported(f"{'.'.join(sorted(unknown))} in {step.text!r}")


def arithmetic(step: Instruction) -> Step:
    """add, sub, mul, div, min, max, fma, logic, shifts, ... of one type."""
    *suffixes, last = step.parts[1:]
    if last in ("f32", "f64"):
        return _float_arithmetic(step, tuple(suffixes), last)
    if last == "f32x2":
        return _pairs(step, tuple(suffixes))
    if last in ("bf16", "f16") and suffixes[-1:] == ["f32"]:
        return _mixed(step, tuple(suffixes[:-1]), last)
    kind = TYPES.get(last)
    name = ".".join((step.name, *suffixes))
    table = PREDICATE if last == "pred" else INTEGER
    if kind is None or kind.kind == "f" or name not in table:
        raise Unsupported(step.text)
    if step.name in _DIVIDES:
        return _divide(step, table[name], kind)
    if step.name in ("shl", "shr"):
        return _apply(step, table[name], [kind, TYPES["u32"]], kind)
    if name == "popc":
        return _apply(step, table[name], [kind], TYPES["u32"])
    if name == "mul.wide":
        return _apply(step, table[name], [kind], _doubled(kind))
    if name == "mad.wide":
        return _apply(step, table[name], [kind, kind, _doubled(kind)], _doubled(kind))
    return _apply(step, table[name], [kind], kind)


def _doubled(kind: np.dtype) -> np.dtype:
    return np.dtype(f"{kind.kind}{2 * kind.itemsize}")


def _float_arithmetic(step: Instruction, suffixes: tuple[str, ...], last: str) -> Step:
    if step.opcode == "div.full.f32":  # hardware's is off by up to 2 units
        suffixes = ("rn",)
    directed = DIRECTED.get(f"{step.name}.{suffixes[0]}") if suffixes and last == "f32" else None
    _only(step, {"ftz", "rn" if directed is None else suffixes[0]}, suffixes)
    function = directed or (FUSED[last] if step.name == "fma" else FLOAT.get(step.name))
    if function is None or (step.name in ("div", "fma") and directed is None and "rn" not in suffixes):
        raise Unsupported(step.text)
    if "ftz" in suffixes:
        function = floats.with_flush(function)
    return _apply(step, function, [TYPES[last]], TYPES[last])


def _pairs(step: Instruction, suffixes: tuple[str, ...]) -> Step:
    """f32x2: two float32 in a 64-bit register."""
    _only(step, {"rn"}, suffixes)
    function = FUSED["f32"] if step.name == "fma" else FLOAT[step.name]

    def both(*values: Array) -> Array:
        halves = [np.ascontiguousarray(value).view(np.float32).reshape(-1, 2) for value in values]
        return np.ascontiguousarray(function(*halves)).view(np.uint64)[:, 0]

    return _apply(step, both, [TYPES["b64"]], TYPES["b64"])


def _mixed(step: Instruction, suffixes: tuple[str, ...], narrow: str) -> Step:
    """add.rn.f32.bf16: the first operand is narrow, widened exactly."""
    _only(step, {"rn"}, suffixes)
    if step.name not in ("add", "sub"):
        raise Unsupported(step.text)
    plain, widen = FLOAT[step.name], floats.bf16_to_f32 if narrow == "bf16" else _half_to_single
    return _apply(step, lambda a, b: plain(widen(a), b), [TYPES[narrow], TYPES["f32"]], TYPES["f32"])


def _half_to_single(x: Array) -> Array:
    return x.astype(np.float32)


def _divide(step: Instruction, function: Function, kind: np.dtype) -> Step:
    compute, divisor = _apply(step, function, [kind], kind), reader(step.operands[2], kind)

    def divide(unit: Unit, mask: Mask) -> None:
        if (unit.chosen(divisor(unit), mask) == 0).any():
            unit.faults.add("division", step, "by zero")
        compute(unit, mask)

    return divide


def approximate(step: Instruction) -> Step:
    """ex2.approx.f32 and rcp.approx.ftz.f64."""
    if step.opcode in ("ex2.approx.f32", "ex2.approx.ftz.f32"):
        put, source = writer(step.operands[0], TYPES["f32"]), reader(step.operands[1], TYPES["f32"])

        def power(unit: Unit, mask: Mask) -> None:
            function: Function = lambda x: floats.ex2(x, unit.launch.options.ex2_ulps)  # noqa: E731
            function = floats.with_flush(function) if "ftz" in step.parts else function
            put(unit, function(source(unit)), mask)

        return power
    if step.opcode == "rcp.approx.ftz.f64":
        return _apply(step, floats.rcp_ftz64, [TYPES["f64"]], TYPES["f64"])
    raise Unsupported(step.text)


def bit_field(step: Instruction) -> Step:
    """bfe: `length` bits from `start` on, with zeros or their sign in front."""
    kind = TYPES[step.parts[-1]]
    bits, signed = 8 * kind.itemsize, kind.kind == "i"

    def extract(value: Array, start: Array, length: Array) -> Array:
        start, length = start & 0xFF, np.minimum(length & 0xFF, bits)
        inside = _shift_left(np.ones(1, np.uint64), length) - np.uint64(1)
        field = _shift_right(value, start).astype(np.uint64) & inside
        if signed:
            sign = (_shift_right(value, start + length - np.uint32(1)) & 1 == 1) & (length > 0)
            field = np.where(sign, field | ~inside, field)
        return field.astype(f"u{kind.itemsize}").view(kind)

    return _apply(step, extract, [kind, TYPES["u32"]], kind)


def compare(step: Instruction) -> Step:
    """setp."""
    if len(step.parts) != 3 or len(step.operands) != 3:
        raise Unsupported(step.text)
    _, how, last = step.parts
    kind = TYPES[last]
    if kind.kind == "f" or last == "bf16":
        function = _float_compare(how)
        if last == "bf16":
            inner = function
            function = lambda a, b: inner(floats.bf16_to_f32(a), floats.bf16_to_f32(b))  # noqa: E731
    elif how in COMPARE:
        function = COMPARE[how]
    else:
        raise Unsupported(step.text)
    return _apply(step, function, [kind], TYPES["pred"])


def select(step: Instruction) -> Step:
    """selp d, a, b, p: a where p, else b."""
    kind = RAW[8 * TYPES[step.parts[-1]].itemsize]
    choose: Function = lambda a, b, p: np.asarray(np.where(p, a, b))  # noqa: E731
    return _apply(step, choose, [kind, kind, TYPES["pred"]], kind)


def move(step: Instruction) -> Step:
    """mov: a copy, or packing and unpacking of a vector of narrower registers."""
    kind = TYPES[step.parts[-1]] if len(step.parts) == 2 else None
    if kind is None:
        raise Unsupported(step.text)
    target, source = step.operands
    if isinstance(target, Vector):
        return _unpack(target, reader(source, kind), kind)
    if isinstance(source, Vector):
        part = f"u{kind.itemsize // len(source.items)}"
        pieces = [reader(item, np.dtype(part)) for item in source.items]
        put = writer(target, kind)

        def pack(unit: Unit, mask: Mask) -> None:
            columns = np.stack(np.broadcast_arrays(*(piece(unit) for piece in pieces)), axis=1)
            put(unit, np.ascontiguousarray(columns).view(kind)[:, 0], mask)

        return pack
    return _apply(step, lambda a: a, [kind], kind)


def _unpack(target: Vector, source: Reader, kind: np.dtype) -> Step:
    part = np.dtype(f"u{kind.itemsize // len(target.items)}")
    puts = [None if isinstance(item, Symbol) else writer(item, part) for item in target.items]

    def unpack(unit: Unit, mask: Mask) -> None:
        columns = np.ascontiguousarray(source(unit)).view(part).reshape(-1, len(puts))
        for i, put in enumerate(puts):
            if put is not None:
                put(unit, np.ascontiguousarray(columns[:, i]), mask)

    return unpack


def convert(step: Instruction) -> Step:
    """cvt between integers, float16, bfloat16, float32 and float64."""
    *suffixes, target, source = step.parts[1:]
    if target in ("bf16x2", "f16x2"):
        return _convert_pair(step, tuple(suffixes), target)
    if step.opcode in SATURATED:
        return _apply(step, SATURATED[step.opcode], [TYPES["f32"]], TYPES["f32"])
    _only(step, {"rn", *_ROUND}, tuple(suffixes))
    into, kind = TYPES[target], TYPES[source]
    whole = next((_ROUND[suffix] for suffix in suffixes if suffix in _ROUND), None)

    def value(x: Array) -> Array:
        number = floats.bf16_to_f32(x) if source == "bf16" else x
        if whole is not None:
            number = whole(number)
        if target == "bf16":
            if number.dtype != np.float32:
                raise Unsupported(step.text)
            return floats.f32_to_bf16(number)
        if into.kind in "iu" and number.dtype.kind == "f":
            return _to_integer(number, into)
        return number.astype(into)

    if into.kind in "iu" and target != "bf16" and (kind.kind == "f" or source == "bf16") and whole is None:
        raise Unsupported(f"{step.text}: no rounding given")
    return _apply(step, value, [kind], into)


def _to_integer(x: Array, into: np.dtype) -> Array:
    """Clamped to the type's range; NaN is 0."""
    limits: Any = np.iinfo(into)
    inside = np.where(np.isnan(x), 0.0, x.astype(np.float64))
    low, high = inside <= limits.min, inside >= limits.max
    plain = np.where(low | high, 0.0, inside).astype(into)
    return np.where(low, into.type(limits.min), np.where(high, into.type(limits.max), plain))


def _convert_pair(step: Instruction, suffixes: tuple[str, ...], target: str) -> Step:
    """Two float32 into the upper and the lower half of a register."""
    if suffixes != ("rn",) or step.parts[-1] != "f32":
        raise Unsupported(step.text)
    narrow: Function = floats.f32_to_bf16 if target == "bf16x2" else lambda x: x.astype(np.float16).view(np.uint16)
    pair: Function = lambda high, low: (narrow(high).astype(np.uint32) << np.uint32(16)) | narrow(low)  # noqa: E731
    return _apply(step, pair, [TYPES["f32"]], TYPES["b32"])


DECODE: dict[str, Callable[[Instruction], Step]] = {
    **dict.fromkeys(
        ("add", "sub", "mul", "div", "rem", "min", "max", "mad", "fma", "neg", "abs", "not", "and", "or", "xor",
         "shl", "shr", "popc", "prmt"),
        arithmetic,
    ),
    "ex2": approximate, "rcp": approximate, "bfe": bit_field, "setp": compare, "selp": select, "mov": move,
    "cvt": convert,
}  # fmt: skip
