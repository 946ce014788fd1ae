"""The draws of philox.py inside a kernel: the same key and counter give the same bits, whatever the tiling.

`first`, the first index of a tile, and the tile's length must be divisible by 4: one call serves four indices.
"""

import triton
import triton.language as tl

from asrd_kernels.precise_triton import divide


@triton.jit
def random_bits(seed, row, position, step, first, LENGTH: tl.constexpr):
    """[LENGTH] uint32: the random bits of indices first, first + 1, ...; seed is int64, the other words integers."""
    quads = (first // 4 + tl.arange(0, LENGTH // 4)).to(tl.uint32)
    a, b, c, d = tl.philox(seed, quads, position.to(tl.uint32), row.to(tl.uint32), step.to(tl.uint32))
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def gumbel(bits, DTYPE: tl.constexpr):
    """Standard Gumbel noise from random bits; see philox.py for the way."""
    w = (bits.to(DTYPE) + 0.5) * 2.0**-32
    w = tl.minimum(w, 1 - 2.0**-24)
    rest = 1 - w
    quotient = divide(w, tl.where(rest == 1, -1.0, rest - 1).to(DTYPE))
    return -tl.log(tl.where(rest == 1, w, tl.log(rest) * quotient))


@triton.jit
def uniform_token(seed, row, position, step, vocab, mask_id):
    """A token id (int64), uniform over the vocabulary without the mask."""
    first = tl.full((), 0, tl.uint32)
    bits, _, _, _ = tl.philox(seed, first, position.to(tl.uint32), row.to(tl.uint32), step.to(tl.uint32))
    drawn = (bits.to(tl.int64) * (vocab - 1)) >> 32
    return drawn + (drawn >= mask_id).to(tl.int64)
