"""What is read from machine code is what the kernel does: registers, spills, shared memory and access widths."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.support.kernels.code import TARGETS, Figures, compile_for, recorded


@triton.jit
def double(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < count
    tl.store(y_ptr + o, 2 * tl.load(x_ptr + o, mask=m), mask=m)


@triton.jit
def hoard(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Holds many values in registers, and needs all of them twice."""
    o = tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + o)
    b_sum = tl.sum(b_x)
    tl.store(y_ptr + o, b_x / b_sum)


def compiled(target: str, kernel: triton.JITFunction, *args: object, **options: object) -> Figures:
    with recorded() as caught:
        kernel[(1,)](*args, **options)
    (launch,) = caught
    return compile_for(launch, target)


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        ("sm_80", torch.float32),
        ("sm_90", torch.bfloat16),
        ("sm_100", torch.bfloat16),
        ("gfx942", torch.float32),
        ("gfx942", torch.bfloat16),
    ],
)
def test_aligned_accesses_are_seen_as_128_bit_and_misaligned_ones_are_not(target: str, dtype: torch.dtype) -> None:
    x, y = torch.zeros(2, 8192, dtype=dtype)
    wide = compiled(target, double, x, y, 8192, BLOCK=4096)
    assert set(wide.loads) == set(wide.stores) == {128}
    assert wide.spills == 0
    odd = compiled(target, double, x, y, 8191, BLOCK=4096)  # a mask that may end anywhere
    shifted = compiled(target, double, x[1:], y[1:], 8176, BLOCK=4096)  # a pointer that is not a multiple of 16
    for narrow in (odd, shifted):
        assert set(narrow.loads) == set(narrow.stores) == {x.element_size() * 8}


@pytest.mark.parametrize("target", TARGETS)
def test_spills_are_seen(target: str) -> None:
    x, y = torch.zeros(2, 4096)
    few = {"waves_per_eu": 8} if target.startswith("gfx") else {"maxnreg": 32}  # registers a thread may have
    assert compiled(target, hoard, x, y, BLOCK=4096, num_warps=1, **few).spills > 0
    lean = compiled(target, hoard, x, y, BLOCK=4096, num_warps=4)
    assert lean.spills == 0
    assert 0 < lean.registers < 128
    assert lean.shared > 0  # the sum crosses warps
