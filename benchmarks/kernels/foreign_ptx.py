"""Two instructions that only other people's kernels have, for the PTX machine: those of CUDA's own expf.

cvt.sat.f32.f32 clamps to [0, 1], and fma.rm.f32 rounds down. Ours use ex2 instead (tl.exp).
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
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)  # the product is exact
    total = product + addend
    part = total - product
    rest = (product - (total - part)) + (addend - part)  # total + rest is the exact sum
    near = np.asarray(total.astype(np.float32))
    above = (near > total) | ((near == total) & (rest < 0))
    return np.asarray(np.where(above & np.isfinite(near), np.nextafter(near, np.float32(-np.inf)), near))


def _convert(step: Instruction) -> Step:
    if "sat" in step.parts and step.parts[-2:] == ("f32", "f32"):
        return alu._apply(step, saturate, [TYPES["f32"]], TYPES["f32"])
    return alu.convert(step)


def _fused(step: Instruction) -> Step:
    if "rm" not in step.parts:
        return alu.arithmetic(step)
    function = floats.with_flush(fused_down) if "ftz" in step.parts else fused_down
    return alu._apply(step, function, [TYPES["f32"]], TYPES["f32"])


@contextmanager
def understood() -> Iterator[None]:
    """Within it the machine knows them."""
    with patch.dict(decode.COMPUTES, {"cvt": _convert, "fma": _fused}):
        yield
