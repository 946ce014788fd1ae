"""Arithmetic that Triton has only roughly or not at all: correctly rounded division, ln(1 + x)."""

import triton
import triton.language as tl


@triton.jit
def divide(x, y):
    """x / y correctly rounded; a plain / of float32 is up to 2 ulp off on NVIDIA."""
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y


@triton.jit
def log1p(x):
    """ln(1 + x) for x > -1 from a plain log: 1 + x is rounded, and the quotient takes that rounding back."""
    w = 1 + x
    step = tl.where(w == 1, 1.0, w - 1).to(x.dtype)
    return tl.where(w == 1, x, tl.log(w) * divide(x, step))
