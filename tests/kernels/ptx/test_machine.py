"""Control flow, orders and counts: diverged threads meet again, loops end apart, every order gives the same results."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.ptx.assemble import execute, module
from tests.support.kernels.ptx.decode import program
from tests.support.kernels.ptx.parse import Unsupported, parse
from tests.support.kernels.ptx.unit import ORDERS

OUT = "mov.u32 %r9, %ctaid.x; mov.u32 %r8, %ntid.x; mad.lo.s32 %r9, %r9, %r8, %r0; mad.wide.u32 %rd10, %r9, 4, %rd0;"
STORE = "st.global.b32 [%rd10], %r1;"


@pytest.mark.parametrize("order", ORDERS)
def test_diverged_threads_take_both_ways_and_meet_again(order: str) -> None:
    out = np.zeros(192, np.uint32)
    body = f"""{OUT} and.b32 %r2, %r0, 1; setp.eq.b32 %p1, %r2, 0;
        @%p1 bra $EVEN; mov.b32 %r1, 100; bra.uni $JOIN;
        $EVEN: mov.b32 %r1, 200;
        $JOIN: add.s32 %r1, %r1, %r0; shfl.sync.bfly.b32 %r1, %r1, 1, 31, -1; {STORE}"""
    outcome = execute(body, out, threads=64, blocks=3, order=order, counting=True)
    assert outcome.faults.found == []
    lane = np.tile(np.arange(64), 3) ^ 1
    assert out.tolist() == (lane + np.where(lane % 2 == 0, 200, 100)).tolist()
    assert outcome.counts is not None
    assert outcome.counts.divergent == 6


@pytest.mark.parametrize("order", ORDERS)
def test_loops_of_different_lengths_end_each_in_its_time(order: str) -> None:
    out = np.zeros(192, np.uint32)
    body = f"""{OUT} mov.b32 %r1, 0; mov.b32 %r2, 0;
        $LOOP: add.s32 %r1, %r1, %r2; add.s32 %r2, %r2, 1; setp.le.u32 %p1, %r2, %r9; @%p1 bra $LOOP; {STORE}"""
    assert execute(body, out, threads=64, blocks=3, order=order).faults.found == []
    assert out.tolist() == [n * (n + 1) // 2 for n in range(192)]


@pytest.mark.parametrize("order", ORDERS)
def test_a_block_wide_sum_through_shared_memory(order: str) -> None:
    """In a loop with two barriers a pass, as a reduction over warps has it."""
    out = np.zeros(512, np.uint32)
    body = f"""{OUT} mov.b32 %r2, global_smem; shl.b32 %r3, %r0, 2; add.s32 %r3, %r3, %r2;
        mov.b32 %r1, %r9; mov.b32 %r4, 64;
        $LOOP: st.shared.b32 [%r3], %r1; bar.sync 0;
        xor.b32 %r5, %r0, %r4; shl.b32 %r5, %r5, 2; add.s32 %r5, %r5, %r2; ld.shared.b32 %r6, [%r5]; bar.sync 0;
        add.s32 %r1, %r1, %r6; shr.u32 %r4, %r4, 1; setp.ne.b32 %p1, %r4, 0; @%p1 bra $LOOP; {STORE}"""
    outcome = execute(body, out, threads=128, blocks=4, shared=512, order=order, counting=True)
    assert outcome.faults.found == []
    assert out.tolist() == np.repeat(np.arange(512).reshape(4, 128).sum(1), 128).tolist()
    assert outcome.counts is not None
    assert outcome.counts.barriers == 4 * 14


def test_blocks_are_numbered_along_x_first_and_more_of_them_than_run_at_once() -> None:
    out = np.zeros(300 * 32, np.uint32)
    assert execute(f"{OUT} mov.b32 %r1, %r9; {STORE}", out, blocks=300).faults.found == []
    assert np.array_equal(out, np.arange(300 * 32))


@pytest.mark.parametrize(
    ("stride", "size", "sectors"), [(4, 4, 4), (8, 4, 8), (32, 4, 32), (0, 4, 1), (16, 16, 16), (2, 2, 2)]
)
def test_sectors_of_a_warps_load_are_counted(stride: int, size: int, sectors: int) -> None:
    load = {2: "ld.global.b16 %rs1", 4: "ld.global.b32 %r1", 16: "ld.global.v4.b32 { %r1, %r2, %r3, %r4 }"}[size]
    body = f"mad.wide.u32 %rd10, %r0, {stride}, %rd0; {load}, [%rd10];"
    counts = execute(body, np.zeros(1024, np.uint32), counting=True).counts
    assert counts is not None
    traffic = counts.traffic["global load"]
    assert (traffic.instructions, traffic.bytes, traffic.units) == (1, 32 * size, sectors)


@pytest.mark.parametrize(
    ("stride", "size", "wavefronts", "ideal"),
    [
        (4, 4, 1, 1),
        (8, 4, 2, 1),
        (128, 4, 32, 1),
        (0, 4, 1, 1),
        (16, 16, 4, 4),
        (8, 8, 2, 2),
        (32, 16, 8, 4),
        (132, 4, 1, 1),
    ],
)
def test_bank_conflicts_of_a_warps_store_are_counted(stride: int, size: int, wavefronts: int, ideal: int) -> None:
    """Thread i stores at i times the stride; a stride of 128 bytes puts all of them on one bank."""
    store = {
        4: "st.shared.b32 [%r3], %r4", 8: "st.shared.v2.b32 [%r3], { %r4, %r4 }",
        16: "st.shared.v4.b32 [%r3], { %r4, %r4, %r4, %r4 }",
    }[size]  # fmt: skip
    body = f"mov.b32 %r4, 7; mov.b32 %r2, global_smem; mad.lo.s32 %r3, %r0, {stride}, %r2; {store};"
    outcome = execute(body, shared=8192, counting=True)
    assert outcome.counts is not None
    traffic = outcome.counts.traffic["shared store"]
    assert (traffic.units, traffic.ideal) == (wavefronts, ideal)


def test_warp_instructions_are_counted_without_mov() -> None:
    body = "mov.b32 %r1, 0; $L: add.s32 %r1, %r1, 1; setp.lt.s32 %p1, %r1, 10; @%p1 bra $L;"
    counts = execute(body, threads=96, blocks=2, counting=True).counts
    assert counts is not None
    assert counts.warp_instructions == 2 * 3 * (30 + 1)  # and ret
    assert counts.instructions["add"] == 60


def test_the_line_of_a_fault_is_that_of_the_outermost_call() -> None:
    body = """.loc 1 20 5 // inner.py:20:5 @[ outer.py:7:9 ]
        ld.global.b32 %r1, [%rd0 + 4096];"""
    (fault,) = execute(body, np.zeros(4, np.uint32)).faults.found
    assert fault.line == "outer.py:7"


def test_text_is_cut_into_basic_blocks_and_debug_labels_are_no_targets() -> None:
    kernel = parse(module("$L__tmp0: mov.b32 %r1, 0; bar.sync 0; $A: add.s32 %r1, %r1, 1; @%p1 bra $A;", 1))
    assert [len(block.instructions) for block in kernel.blocks] == [4, 2, 1, 0]
    assert kernel.labels == {"$A": 1}
    assert len(kernel.barriers) == 1


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.sync 0;"])
def test_every_barrier_that_is_executed_is_listed_and_can_be_left_out(barrier: str) -> None:
    text = module(f"mov.b32 %r1, 0; {barrier} add.s32 %r1, %r1, 1;", 1)
    whole, mutant = program(text), program(text, without_barrier=0)
    assert len(whole.kernel.barriers) == 1
    assert [sum(code.barrier is not None for code in one.code) for one in (whole, mutant)] == [1, 0]


@pytest.mark.parametrize(
    "body", ["add.s32 %r999, %r1, %r1;", ".local .b8 stack[16];", "@%p1 ret;", "@%p1 bar.sync 0;", "bra $NOWHERE;"]
)
def test_what_cannot_be_read_is_refused(body: str) -> None:
    with pytest.raises(Unsupported):
        execute(body)
