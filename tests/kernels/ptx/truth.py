"""Exact answers for single numbers, by Python's integers and fractions, and by the C library: slow and independent of
the machine."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np

FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}
_STRUCT = {"f16": "<e", "f32": "<f", "f64": "<d"}


def signed(bits: int, width: int) -> int:
    """The two's complement number of some bits."""
    return bits - (1 << width) if bits >> (width - 1) else bits


def wrapped(value: int, width: int) -> int:
    """The low bits of a number."""
    return value & ((1 << width) - 1)


def number(bits: int, kind: str) -> float:
    """The float of some bits."""
    if kind == "bf16":
        return number(bits << 16, "f32")
    return struct.unpack(_STRUCT[kind], bits.to_bytes(struct.calcsize(_STRUCT[kind]), "little"))[0]


def raw(value: float, kind: str) -> int:
    """The bits of a float that the format can hold."""
    if kind == "bf16":
        return raw(value, "f32") >> 16
    return int.from_bytes(struct.pack(_STRUCT[kind], value), "little")


def rounded(exact: Fraction, kind: str, how: Callable[[Fraction], int] = round) -> float:
    """An exact number in a format. `how` rounds its size: `round` to nearest, ties to even; `math.floor` towards zero;
    `math.ceil` away from it. Too large is infinite, or towards zero the largest number."""
    digits, lowest, highest = FORMATS[kind]
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = max(lowest, size.numerator.bit_length() - size.denominator.bit_length() - 1)
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - digits + 1)
    result, largest = how(size / unit) * unit, (2 - Fraction(2) ** (1 - digits)) * Fraction(2) ** highest
    near = float(result) if result <= largest else float(largest) if how is math.floor else math.inf
    return near if exact > 0 else -near


def fused(a: float, b: float, c: float, kind: str) -> float:
    """a * b + c, rounded once."""
    if math.isfinite(a) and math.isfinite(b) and not math.isfinite(c):
        return c
    if not all(map(math.isfinite, (a, b, c))):
        with np.errstate(all="ignore"):
            return float(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c if 0 in (a, b) else 0.0 if c != 0 else a * b * 0.0 + c
    return rounded(exact, kind)


def fused_down(a: float, b: float, c: float) -> float:
    """a * b + c of float32, rounded once, towards minus infinity; -0 if the summands cancel or one of them is -0."""
    if not all(map(math.isfinite, (a, b, c))):
        return fused(a, b, c, "f32")
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return 0.0 if math.copysign(1, a * b) == math.copysign(1, c) == 1 else -0.0
    return rounded(exact, "f32", math.floor if exact > 0 else math.ceil)


def sum_to_zero(a: float, b: float) -> float:
    """a + b of float32, rounded towards zero."""
    if not (math.isfinite(a) and math.isfinite(b)) or a == -b:
        return a + b
    return rounded(Fraction(a) + Fraction(b), "f32", math.floor)


def same(found: np.ndarray, wanted: list[int], kind: str) -> np.ndarray:
    """Where bits are those wanted; of a float, NaN is as good as any other NaN."""
    wanted_bits = np.array(wanted, dtype=found.dtype)
    equal = found == wanted_bits
    if kind in FORMATS:
        nan = [
            math.isnan(number(int(x), kind)) and math.isnan(number(int(y), kind))
            for x, y in zip(found, wanted_bits, strict=True)
        ]
        equal |= np.array(nan)
    return equal
