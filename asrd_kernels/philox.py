"""Counter-based random numbers: Philox4x32-10 (Salmon et al., 2011) in integer tensor arithmetic.

A draw is a function of its key and counter only, so it does not depend on batch size, tiling or device, and is
never stored. Counter words: (index // 4, position, row, step); one call serves four neighbouring indices.
Step 0 is the token noise of sampling; the random probes use the step number, which starts at 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product. int64 wraps, but the bit pattern is the wanted one."""
    product = a * b
    return (product >> 32) & _WORD, product & _WORD


def as_int64(seed: int) -> int:
    """The 64 bits of a seed from 0 to 2^64 - 1 as the signed number that a tensor of seeds holds."""
    return (seed + 2**63) % 2**64 - 2**63


def philox(seed: Tensor | int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four int64 tensors holding 32 random bits each, for broadcastable int64 counter words in [0, 2^32); so is a seed
    of int64."""
    key_a, key_b = seed & _WORD, (seed >> 32) & _WORD
    c0, c1, c2, c3 = counter
    for _ in range(10):
        high_a, low_a = _multiply(c0, _ROUND_A)
        high_b, low_b = _multiply(c2, _ROUND_B)
        c0, c1, c2, c3 = high_b ^ c1 ^ key_a, low_b, high_a ^ c3 ^ key_b, low_a
        key_a, key_b = (key_a + _WEYL_A) & _WORD, (key_b + _WEYL_B) & _WORD
    return c0, c1, c2, c3


def random_bits(seed: Tensor | int, row: Tensor, position: Tensor, step: Tensor | int, count: int) -> Tensor:
    """[*S, count] int64 of 32 random bits, one for each index 0 .. count-1; seed, row, position and step have shape S,
    seed and step perhaps none."""
    quads = torch.arange((count + 3) // 4, device=row.device)
    shape = (*row.shape, len(quads))
    step = step if isinstance(step, Tensor) else torch.full_like(row, step)
    seed = seed[..., None] if isinstance(seed, Tensor) else seed
    words = philox(seed, (quads, position[..., None], row[..., None], step[..., None]))
    return torch.stack([word.expand(shape) for word in words], dim=-1).flatten(-2)[..., :count]


def gumbel(seed: Tensor | int, row: Tensor, position: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """[N, count] standard Gumbel noise of each token id, for row and position of shape [N].

    -log(-log(1 - w)) with w in (0, 1): small w, which decide the argmax, keep all their 32 bits. log(1 - w) is formed
    from a plain log (1 - w is rounded, and the quotient takes that rounding back), as a kernel without log1p does it.
    """
    w = (random_bits(seed, row, position, 0, count).to(dtype) + 0.5) * 2.0**-32
    w = w.clamp(max=1 - 2.0**-24)
    rest = 1 - w
    exponential = torch.where(rest == 1, w, rest.log() * (w / (rest - 1)))
    return -exponential.log()


def gaussian(seed: Tensor | int, row: Tensor, position: Tensor, step: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """[*S, count] standard normal numbers (Box-Muller on neighbouring pairs)."""
    bits = random_bits(seed, row, position, step, count + count % 2).to(dtype)
    radius = (-2 * ((bits[..., 0::2] + 0.5) * 2.0**-32).log()).clamp(min=0).sqrt()
    angle = 2 * math.pi * 2.0**-32 * bits[..., 1::2]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2)[..., :count]


def uniform_token(
    seed: Tensor | int, row: Tensor, position: Tensor, step: Tensor, vocab_size: int, mask_id: int
) -> Tensor:
    """[*S] token ids, uniform over the vocabulary without the mask."""
    drawn = (random_bits(seed, row, position, step, 1)[..., 0] * (vocab_size - 1)) >> 32
    return drawn + (drawn >= mask_id)
