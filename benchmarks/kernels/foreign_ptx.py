"""Three instructions that only other people's kernels have, for the PTX machine: those of CUDA's own expf and log1pf.

cvt.sat.f32.f32 clamps to [0, 1], fma.rm.f32 rounds down, add.rz.f32 towards zero. Ours have no need of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from benchmarks.kernels.ptx import alu, decode, floats
from benchmarks.kernels.ptx.parse import Instruction
from benchmarks.kernels.ptx.unit import TYPES, Step

Floats = NDArray[Any]


def saturate(x: Floats) -> Floats:
    """Clamped to [0, 1]; NaN gives 0."""
    return np.asarray(np.where(np.isnan(x), 0, np.clip(x, 0, 1)), np.float32)


def fused_down(a: Floats, b: Floats, c: Floats) -> Floats:
    """a b + c, rounded once, towards minus infinity."""
    product = a.astype(np.float64) * b.astype(np.float64)  # which is exact
    near, above, _ = _nearest(product, c.astype(np.float64))
    return np.asarray(np.where(above, np.nextafter(near, np.float32(-np.inf)), near))


def add_to_zero(a: Floats, b: Floats) -> Floats:
    """a + b, rounded towards zero."""
    near, above, below = _nearest(a.astype(np.float64), b.astype(np.float64))
    too_far = np.where(near > 0, above, below)
    return np.asarray(np.where(too_far, np.nextafter(near, np.float32(0)), near))


def _nearest(a: Floats, b: Floats) -> tuple[Floats, Floats, Floats]:
    """a + b rounded to float32, and whether that is above or below the exact sum."""
    total = a + b
    part = total - a
    rest = (a - (total - part)) + (b - part)  # total + rest is the exact sum
    near = np.asarray(total.astype(np.float32))
    finite = np.isfinite(near)
    above = finite & ((near > total) | ((near == total) & (rest < 0)))
    below = finite & ((near < total) | ((near == total) & (rest > 0)))
    return near, above, below


def _convert(step: Instruction) -> Step:
    if "sat" in step.parts and step.parts[-2:] == ("f32", "f32"):
        return alu._apply(step, saturate, [TYPES["f32"]], TYPES["f32"])
    return alu.convert(step)


def _fused(step: Instruction) -> Step:
    if "rm" not in step.parts:
        return alu.arithmetic(step)
    function = floats.with_flush(fused_down) if "ftz" in step.parts else fused_down
    return alu._apply(step, function, [TYPES["f32"]], TYPES["f32"])


def _add(step: Instruction) -> Step:
    if "rz" not in step.parts:
        return alu.arithmetic(step)
    function = floats.with_flush(add_to_zero) if "ftz" in step.parts else add_to_zero
    return alu._apply(step, function, [TYPES["f32"]], TYPES["f32"])


@contextmanager
def understood() -> Iterator[None]:
    """Within it the machine knows them."""
    with patch.dict(decode.COMPUTES, {"cvt": _convert, "fma": _fused, "add": _add}):
        yield
