"""Floating-point operations that numpy lacks, or has otherwise: fused multiply-add, directed rounding, bfloat16, ex2,
rcp, min, max.

All work on whole arrays. A NaN is a NaN: its sign and payload mean nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Array = NDArray[Any]
Mask = NDArray[np.bool_]

_SPLITTER = float(2**27 + 1)
_SMALL, _LARGE = 2.0**-900, 2.0**990  # between them neither a product's low part is lost nor a step overflows; what a
# register holds at first (unit.py) has a square below _LARGE, so that idle threads cost nothing


def _two_sum(a: F64, b: F64) -> tuple[F64, F64]:
    """The rounded sum and its error, exactly (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: F64, b: F64) -> tuple[F64, F64]:
    """The rounded product and its error, exactly (Dekker, Veltkamp)."""
    product = a * b
    high_a, high_b = _upper(a), _upper(b)
    low_a, low_b = a - high_a, b - high_b
    return product, ((high_a * high_b - product) + high_a * low_b + low_a * high_b) + low_a * low_b


def _upper(x: F64) -> F64:
    scaled = x * _SPLITTER
    return scaled - (scaled - x)


def _rounded_to_odd(total: F64, error: F64) -> F64:
    """total + error, rounded to the neighbour whose last bit is odd where it is inexact: a later rounding to fewer
    bits then gives what one rounding of the exact number would (Boldo and Melquiond)."""
    bits = np.ascontiguousarray(total).view(np.int64)
    even = (error != 0) & np.isfinite(total) & ~np.isnan(error) & (bits & 1 == 0)
    outwards = (error > 0) == (total > 0)
    return np.where(even, np.where(outwards, bits + 1, bits - 1), bits).view(np.float64)


def fma32(a: F32, b: F32, c: F32) -> F32:
    """a * b + c with one rounding. The product is exact in float64; rounding the sum twice is as good as once, unless
    the first rounding ends half-way between two float32 or the result is subnormal."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    doubtful = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    doubtful |= (np.abs(total) < 2.0**-125) & (total != 0)
    if doubtful.any():
        product, c = np.broadcast_arrays(product, c)
        total[doubtful] = _rounded_to_odd(*_two_sum(product[doubtful], c[doubtful]))
    return total.astype(np.float32)


def fma64(a: F64, b: F64, c: F64) -> F64:
    """a * b + c with one rounding; finite numbers of extreme size go through exact fractions, one at a time."""
    a, b, c = np.broadcast_arrays(a, b, c)
    high, low = _two_product(a, b)
    inner, inner_error = _two_sum(c, low)
    outer, outer_error = _two_sum(high, inner)
    result = outer + _rounded_to_odd(*_two_sum(inner_error, outer_error))
    size = np.abs(high)
    plain = ((a == 0) | (b == 0) | (size > _SMALL)) & (size < _LARGE)
    plain &= np.maximum(np.maximum(np.abs(a), np.abs(b)), np.abs(c)) < _LARGE
    result = np.where(plain & (result == 0), a * b + c, result)  # the sign of a zero
    if plain.all():
        return result
    finite = np.isfinite(a) & np.isfinite(b)
    endless = ~(finite & np.isfinite(c))
    result = np.where(endless, np.where(finite, c, a * b + c), result)  # a * b alone might overflow
    for i in zip(*np.nonzero(~plain & ~endless), strict=True):
        result[i] = _exact_fma(float(a[i]), float(b[i]), float(c[i]))
    return result


def _exact_fma(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return float(np.copysign(0.0, a) * np.copysign(1.0, b) + c) if c == 0 else 0.0
    try:
        return float(exact)
    except OverflowError:
        return float(np.copysign(np.inf, 1 if exact > 0 else -1))


def fma32_down(a: F32, b: F32, c: F32) -> F32:
    """a * b + c, rounded once, towards minus infinity; a zero sum is -0 unless both summands are +0."""
    product, c = np.broadcast_arrays(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    near, above, _ = _single(product, c)
    zero = np.where(np.signbit(product) | np.signbit(c), np.float32(-0.0), np.float32(0))
    return np.where(product + c == 0, zero, np.where(above, np.nextafter(near, np.float32(-np.inf)), near))


def add32_to_zero(a: F32, b: F32) -> F32:
    """a + b, rounded towards zero."""
    near, above, below = _single(a.astype(np.float64), b.astype(np.float64))
    return np.where(np.where(near > 0, above, below), np.nextafter(near, np.float32(0)), near)


def _single(a: F64, b: F64) -> tuple[F32, Mask, Mask]:
    """a + b as the nearest float32, and whether that is above or below the exact sum."""
    total, error = _two_sum(a, b)
    near = total.astype(np.float32)
    finite = np.isfinite(total)
    above = finite & ((near > total) | ((near == total) & (error < 0)))
    below = finite & ((near < total) | ((near == total) & (error > 0)))
    return near, above, below


def saturated(x: F32) -> F32:
    """Clamped to [+0, 1]; NaN gives 0."""
    return np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0))


def flushed(x: F32) -> F32:
    """Subnormal numbers as zeros of their sign (.ftz)."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def with_flush(operation: Callable[..., F32]) -> Callable[..., F32]:
    """An operation on float32 whose subnormal inputs and outputs are zeros."""
    return lambda *args: flushed(operation(*(flushed(arg) for arg in args)))


def _extreme(a: Array, b: Array, *, largest: bool) -> Array:
    """minimum or maximum: a NaN loses against a number, -0 is less than +0."""
    pick, zero = (np.fmax, np.bitwise_and) if largest else (np.fmin, np.bitwise_or)
    a, b = np.broadcast_arrays(a, b)
    whole = f"u{a.itemsize}"
    by_sign = zero(np.ascontiguousarray(a).view(whole), np.ascontiguousarray(b).view(whole)).view(a.dtype)
    return np.where((a == 0) & (b == 0), by_sign, pick(a, b))


minimum, maximum = partial(_extreme, largest=False), partial(_extreme, largest=True)


def bf16_to_f32(bits: NDArray[np.uint16]) -> F32:
    """The float32 of the same value."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_bf16(x: F32) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def ex2(x: F32, ulps: int = 0) -> F32:
    """2^x rounded to float32, or off by up to `ulps` units: hardware's is an approximation. The error is a function of
    the input, as hardware's is."""
    result = np.exp2(x.astype(np.float64)).astype(np.float32)
    if ulps == 0:
        return result
    mixed = np.ascontiguousarray(x).view(np.uint32) * np.uint32(2654435761)
    offset = (mixed >> np.uint32(16)).astype(np.int32) % (2 * ulps + 1) - ulps
    ordinary = np.isfinite(result) & (result > np.finfo(np.float32).tiny * 8)
    return np.where(ordinary, (result.view(np.int32) + offset).view(np.float32), result)


def rcp_ftz64(x: F64) -> F64:
    """rcp.approx.ftz.f64: the upper 32 bits of 1/x, from the upper 32 bits of x."""
    upper = np.uint64(0xFFFFFFFF00000000)
    coarse = (np.ascontiguousarray(x).view(np.uint64) & upper).view(np.float64)
    tiny = np.finfo(np.float64).tiny
    coarse = np.where(np.abs(coarse) < tiny, np.copysign(0.0, coarse), coarse)
    result = ((1.0 / coarse).view(np.uint64) & upper).view(np.float64)
    result = np.where(np.abs(result) < tiny, np.copysign(0.0, result), result)
    return np.where(np.isnan(x), np.nan, result)
