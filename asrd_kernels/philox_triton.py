"""The draws of philox.py inside a kernel: the same key and counter give the same bits, whatever the tiling.

`first`, the first index of a tile, and the tile's length must be divisible by 4: one call serves four indices.
"""

import triton
import triton.language as tl


@triton.jit
def random_bits(seed, row, position, step, first, LENGTH: tl.constexpr):
    """[LENGTH] uint32: the random bits of indices first, first + 1, ...; seed is int64, the other words integers."""
    quads = (first // 4 + tl.arange(0, LENGTH // 4)).to(tl.uint32)
    a, b, c, d = tl.philox(seed, quads, position.to(tl.uint32), row.to(tl.uint32), step.to(tl.uint32))
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def exponential(bits, DTYPE: tl.constexpr):
    """Standard exponential draws -ln(1 - w) from random bits; philox.gumbel is minus their logarithm.

    float32: with p the power of two next to u = 1 - w and s = (p - u) / (p + u), ln(p / u) = 2 artanh s = s R(s^2), R
    fitted over |s| < 0.174 to 2e-9. p - u is formed as w - (1 - p), exact, so that a small w keeps all its digits.
    """
    w = (bits.to(DTYPE) + 0.5) * 2.0**-32
    w = tl.minimum(w, 1 - 2.0**-24)
    rest = 1 - w
    if tl.float32 == DTYPE:
        exponent = (rest.to(tl.int32, bitcast=True) + 0x4AFB0D) & 0x7F800000  # carries from a mantissa of sqrt(2) on
        power = exponent.to(tl.float32, bitcast=True)
        s = (w - (1 - power)) / (power + rest)
        t = s * s
        ratio = tl.fma(tl.fma(tl.fma(t, 0.299523885, 0.399738113), t, 0.666668246), t, 2.0)
        draw = tl.fma((127 - (exponent >> 23)).to(tl.float32), 0.693147181, s * ratio)
    else:
        quotient = w / tl.where(rest == 1, -1.0, rest - 1).to(DTYPE)
        draw = tl.where(rest == 1, w, tl.log(rest) * quotient)
    return draw


@triton.jit
def uniform_token(seed, row, position, step, vocab, mask_id):
    """A token id (int64), uniform over the vocabulary without the mask."""
    first = tl.full((), 0, tl.uint32)
    bits, _, _, _ = tl.philox(seed, first, position.to(tl.uint32), row.to(tl.uint32), step.to(tl.uint32))
    drawn = (bits.to(tl.int64) * (vocab - 1)) >> 32
    return drawn + (drawn >= mask_id).to(tl.int64)
