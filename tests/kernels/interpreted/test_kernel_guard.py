"""The guard over the interpreter finds what it must find, says nothing of sound kernels, and counts bytes exactly."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.support.kernels.guard import KernelGuard, MemoryFault


@triton.jit
def scale_rows(
    x_ptr,
    y_ptr,
    x_stride,
    y_stride,
    columns,
    SHIFT: tl.constexpr,
    EXTRA: tl.constexpr,
    MASKED: tl.constexpr,
    SAME_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = 2 x, one program a row; the constants plant a bug each."""
    row = tl.program_id(0)
    target = 0 if SAME_ROW else row
    for start in range(0, columns, BLOCK):
        o_column = start + tl.arange(0, BLOCK)
        m_column = o_column < columns + EXTRA
        if MASKED:
            b_x = tl.load(x_ptr + row * x_stride + o_column + SHIFT, mask=m_column, other=0.0)
        else:
            b_x = tl.load(x_ptr + row * x_stride + o_column + SHIFT)
        tl.store(y_ptr + target * y_stride + o_column, 2 * b_x, mask=m_column)


def run(x: torch.Tensor, y: torch.Tensor, **planted: Any) -> KernelGuard:
    settings = {"x_stride": x.stride(0), "y_stride": y.stride(0), "columns": x.shape[1], "BLOCK": 16}
    settings |= {"SHIFT": 0, "EXTRA": 0, "MASKED": True, "SAME_ROW": False}
    with KernelGuard() as guard:
        scale_rows[(x.shape[0],)](x, y, **settings | planted)
    return guard


def test_a_sound_kernel_passes_and_its_bytes_are_counted() -> None:
    x, y = torch.randn(3, 40), torch.full((3, 40), torch.nan)
    guard = run(x, y)
    assert torch.equal(y, 2 * x)
    (launch,) = guard.launches
    assert (launch.kernel, launch.grid) == ("scale_rows", (3, 1, 1))
    assert launch.loads.bytes == launch.stores.bytes == 3 * 40 * 4
    assert launch.loads.sectors == launch.stores.sectors == 15
    assert launch.by_argument()["x_ptr"] == (launch.loads, type(launch.loads)(0, 0))


def test_views_are_judged_by_their_elements() -> None:
    whole = torch.randn(6, 64)
    x, y = whole[::2, :40], torch.empty(3, 64)[:, :40]
    run(x, y)
    with pytest.raises(MemoryFault, match=r"loads outside x_ptr \(shape \[3, 40\], strides \[128, 1\]"):
        run(x, y, x_stride=64)  # lands between the rows of the view, in the same storage


@pytest.mark.parametrize(
    ("planted", "complaint"),
    [
        ({"EXTRA": 1}, "loads outside x_ptr .* 1 lanes at bytes 480 to 480, line"),  # off by one
        ({"EXTRA": 1}, "stores outside y_ptr .* 1 lanes at bytes 480 to 480, line"),
        ({"SHIFT": -1}, "program 0 loads outside x_ptr .* at bytes -4 to -4"),  # negative offset
        ({"MASKED": False}, "program 2 loads outside x_ptr .* 8 lanes"),  # tail without a mask
        ({"SAME_ROW": True}, "programs 0 and 1 both write y_ptr, byte 0"),  # two programs, one element
        ({"x_stride": 41}, "program 2 loads outside x_ptr .* 2 lanes"),  # wrong stride
        ({"y_stride": 39}, "programs 0 and 1 both write y_ptr, byte 156"),
    ],
)
def test_planted_bugs_are_found(planted: dict[str, Any], complaint: str) -> None:
    with pytest.raises(MemoryFault, match=complaint):
        run(torch.randn(3, 40), torch.empty(3, 40), **planted)


def test_an_access_meant_for_one_tensor_that_lands_in_another_is_found() -> None:
    whole = torch.randn(2, 3, 40)
    with pytest.raises(MemoryFault, match="loads outside x_ptr"):
        run(whole[0], whole[1], SHIFT=40)


@triton.jit
def shift_in_place(x_ptr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + o, tl.load(x_ptr + BLOCK + o))


def test_a_program_that_reads_what_another_writes_is_found() -> None:
    with pytest.raises(MemoryFault, match="program 0 reads what program 1 writes: x_ptr, byte 32"), KernelGuard():
        shift_in_place[(3,)](torch.randn(32), BLOCK=8)


@triton.jit
def count_up(counter_ptr, x_ptr, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    b_count = tl.load(counter_ptr + row) + 1
    if BARRIER:
        tl.debug_barrier()
    tl.store(counter_ptr + row, b_count)
    tl.store(x_ptr + row * BLOCK + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.int64) + b_count)


@pytest.mark.parametrize(("barrier", "warps", "sound"), [(True, 4, True), (False, 1, True), (False, 4, False)])
def test_warps_of_one_program_need_a_barrier_between_load_and_store(barrier: bool, warps: int, sound: bool) -> None:
    counter, x = torch.arange(3), torch.empty(3, 8, dtype=torch.int64)
    complaint = pytest.raises(MemoryFault, match="loads and stores counter_ptr, byte 0 with no barrier")
    with nullcontext() if sound else complaint, KernelGuard():
        count_up[(3,)](counter, x, barrier, 8, num_warps=warps)
    assert counter.tolist() == [1, 2, 3]


@triton.jit
def scatter(x_ptr, y_ptr, MODULUS: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y_ptr + o % MODULUS, tl.load(x_ptr + o))


def test_lanes_that_write_one_element_differently_are_found() -> None:
    with KernelGuard():
        scatter[(1,)](torch.ones(8), torch.empty(4), 4, 8)  # all write the same: harmless
    with pytest.raises(MemoryFault, match=r"lanes .* different values to one element of y_ptr"), KernelGuard():
        scatter[(1,)](torch.arange(8.0), torch.empty(4), 4, 8)


def test_the_interpreter_is_as_before_once_the_guard_is_gone() -> None:
    with pytest.raises(MemoryFault):
        run(torch.randn(3, 40), torch.empty(3, 40), EXTRA=1)
    x, y = torch.randn(3, 40), torch.empty(3, 40)
    scale_rows[(3,)](x, y, 40, 40, 40, 0, 0, True, False, 16)
    assert torch.equal(y, 2 * x)
