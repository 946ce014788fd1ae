"""Exact answers for single numbers, by Python's integers and fractions, and by the C library: slow and independent of
the machine."""

from __future__ import annotations

import math
import struct
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


def nearest(exact: Fraction, kind: str) -> float:
    """The number of a format that is nearest to an exact one; ties to even, too large is infinite."""
    digits, lowest, highest = FORMATS[kind]
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = max(lowest, size.numerator.bit_length() - size.denominator.bit_length() - 1)
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    unit = Fraction(2) ** (exponent - digits + 1)
    count = round(size / unit)  # of a fraction: ties to even
    if count * unit >= Fraction(2) ** (highest + 1):
        return math.inf if exact > 0 else -math.inf
    return float(count * unit) if exact > 0 else -float(count * unit)


def fused(a: float, b: float, c: float, kind: str) -> float:
    """a * b + c, rounded once."""
    if not all(map(math.isfinite, (a, b, c))):
        with np.errstate(all="ignore"):
            return float(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c if 0 in (a, b) else 0.0 if c != 0 else a * b * 0.0 + c
    return nearest(exact, kind)


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
