"""What crosses threads and memory: shuffles, reductions, accesses of all widths, copies, tensor-core products."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

from tests.kernels.ptx.assemble import evaluate, execute
from tests.support.kernels.ptx import matrix, warp
from tests.support.kernels.ptx.decode import program
from tests.support.kernels.ptx.faults import Faults

LANES = 32


def shuffled(how: str, lane: int, offset: int, clamp: int) -> int:
    """The lane read, as the PTX manual's pseudocode has it."""
    segment, bound = (clamp >> 8) & 31, clamp & 31
    last, first = (lane & segment) | (bound & ~segment & 31), lane & segment
    if how == "up":
        source = lane - offset
        inside = source >= last
    elif how == "down":
        source = lane + offset
        inside = source <= last
    elif how == "bfly":
        source = lane ^ offset
        inside = source <= last
    else:
        source = first | (offset & ~segment & 31)
        inside = source <= last
    return source if inside else lane


@pytest.mark.parametrize(
    ("how", "offset", "clamp"),
    [("bfly", 1, 31), ("bfly", 16, 31), ("bfly", 4, 0x181F), ("up", 1, 0), ("up", 8, 0), ("up", 3, 0x1800),
     ("down", 5, 31), ("down", 2, 0x1C1F), ("idx", 7, 31), ("idx", 3, 0x181F), ("idx", 0, 31)],
)  # fmt: skip
def test_a_shuffle_reads_the_lane_that_the_manual_says(how: str, offset: int, clamp: int) -> None:
    given = np.arange(96, dtype=np.uint32) * 7 + 1
    found = evaluate(f"shfl.sync.{how}.b32 {{d}}, {{a}}, {offset}, {clamp}, -1;", ["b32"], "b32", given)
    wanted = [given[i - i % LANES + shuffled(how, i % LANES, offset, clamp)] for i in range(96)]
    assert found.tolist() == [int(x) for x in wanted]
    registers = evaluate(
        f"shfl.sync.{how}.b32 {{d}}, {{a}}, {{b}}, {clamp}, -1;", ["b32", "b32"], "b32",
        given, np.full(96, offset, np.uint32),
    )  # fmt: skip
    assert registers.tolist() == found.tolist()


@pytest.mark.parametrize(
    ("how", "kind", "function"),
    [("add", "s32", np.add), ("min", "s32", np.minimum), ("max", "s32", np.maximum), ("min", "u32", np.minimum),
     ("and", "b32", np.bitwise_and), ("or", "b32", np.bitwise_or), ("xor", "b32", np.bitwise_xor),
     ("min", "f32", np.minimum), ("max", "f32", np.maximum)],
)  # fmt: skip
def test_a_reduction_covers_the_warp(how: str, kind: str, function: np.ufunc) -> None:
    given = np.random.default_rng(1).integers(0, 2**32, 64, dtype=np.uint32)
    typed = given.view({"s": np.int32, "u": np.uint32, "b": np.uint32, "f": np.float32}[kind[0]])
    if kind == "f32":
        typed[:] = np.random.default_rng(2).standard_normal(64)
    with np.errstate(over="ignore"):
        wanted = np.repeat([reduce(function, typed[:32]), reduce(function, typed[32:])], 32)
    found = evaluate(f"redux.sync.{how}.{kind} {{d}}, {{a}}, -1;", ["b32"], "b32", given)
    assert np.array_equal(found.view(typed.dtype), wanted.astype(typed.dtype))


def test_a_wrong_shuffle_and_a_wrong_reduction_fail_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    right = warp.source_lanes
    monkeypatch.setattr(warp, "source_lanes", lambda how, offset, clamp: right(how, offset * 0 + 2, clamp))
    monkeypatch.setitem(warp.REDUCE, "min", np.maximum)
    program.cache_clear()
    with pytest.raises(AssertionError):
        test_a_shuffle_reads_the_lane_that_the_manual_says("bfly", 1, 31)
    with pytest.raises(AssertionError):
        test_a_reduction_covers_the_warp("min", "s32", np.minimum)
    program.cache_clear()


def test_narrow_loads_are_widened_by_their_type_and_stores_take_the_low_bits() -> None:
    source = np.arange(64, dtype=np.int32) - 40
    wide, small = np.zeros(64, np.int64), np.zeros(64, np.uint16)
    low = np.zeros(64, np.uint8)
    execute(
        """
        mad.wide.u32 %rd10, %r0, 4, %rd0;  ld.global.s32 %rd11, [%rd10];
        mad.wide.u32 %rd12, %r0, 8, %rd1;  st.global.b64 [%rd12], %rd11;
        ld.global.b8 %rs1, [%rd10 + 3];
        mad.wide.u32 %rd13, %r0, 2, %rd2;  st.global.b16 [%rd13], %rs1;
        cvt.u64.u32 %rd14, %r0;  add.s64 %rd14, %rd14, %rd3;
        cvt.u16.u32 %rs2, %r0;  add.s16 %rs2, %rs2, 256;
        st.global.b8 [%rd14], %rs2;
        """,
        source, wide, small, low, threads=64,
    )  # fmt: skip
    assert np.array_equal(wide, source)
    assert np.array_equal(small, np.where(source < 0, 255, 0))
    assert np.array_equal(low, np.arange(64))


def test_vectors_go_in_order_and_a_masked_load_keeps_its_register() -> None:
    source, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    outcome = execute(
        """
        mad.wide.u32 %rd10, %r0, 16, %rd0;  mad.wide.u32 %rd11, %r0, 16, %rd1;
        setp.lt.u32 %p1, %r0, 20;
        mov.b32 %r1, 5; mov.b32 %r2, 6; mov.b32 %r3, 7; mov.b32 %r4, 8;
        @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd10 + 0 ];
        @%p1 st.global.v2.b32 [%rd11], { %r1, %r2 };
        @%p1 st.global.v2.b32 [%rd11 + 8], { %r3, %r4 };
        @!%p1 st.global.v4.b32 [%rd11], { %r1, %r2, %r3, %r4 };
        """,
        source, out,
    )  # fmt: skip
    assert not outcome.faults.found
    assert out[:80].tolist() == source[:80].tolist()
    assert out[80:].reshape(-1, 4).tolist() == [[5, 6, 7, 8]] * 12


def test_parameters_narrower_than_their_register_keep_their_sign() -> None:
    out = np.zeros(32, np.int64)
    execute("ld.param.s32 %rd5, [p0]; mad.wide.u32 %rd6, %r0, 8, %rd0; st.global.b64 [%rd6], %rd5;", out)
    assert (out == 4096).all()  # the low half of the address


COPY = """
    mad.wide.u32 %rd10, %r0, 16, %rd0;  mad.wide.u32 %rd11, %r0, 16, %rd1;
    shl.b32 %r1, %r0, 4;  mov.b32 %r2, global_smem;  add.s32 %r1, %r1, %r2;
    setp.lt.u32 %p1, %r0, 40;  selp.b32 %r3, 16, 0, %p1;
    cp.async.cg.shared.global [ %r1 + 0 ], [ %rd10 + 0 ], 0x10, %r3;
    cp.async.commit_group;
    cp.async.cg.shared.global [ %r1 + 1024 ], [ %rd10 + 0 ], 0x10, %r3;
    cp.async.commit_group;
    cp.async.wait_group 1;
    bar.sync 0;
    xor.b32 %r4, %r1, 16;
    ld.shared.v4.b32 { %r5, %r6, %r7, %r8 }, [ %r4 ];
    st.global.v4.b32 [ %rd11 ], { %r5, %r6, %r7, %r8 };
"""


@pytest.mark.parametrize("order", ["lockstep", "forward", "reverse", "random"])
def test_an_asynchronous_copy_lands_at_its_wait_and_fills_with_zeros(order: str) -> None:
    source, out = np.arange(256, dtype=np.uint32) + 1, np.full(256, 99, np.uint32)
    outcome = execute(COPY, source, out, threads=64, shared=4096, order=order)
    assert not outcome.faults.found
    wanted = np.where(np.arange(64)[:, None] < 40, source.reshape(64, 4), 0)[np.arange(64) ^ 1]
    assert out.reshape(64, 4).tolist() == wanted.tolist()
    late = execute(COPY.replace("[ %r4 ]", "[ %r4 + 1024 ]"), source, out, threads=64, shared=4096, order=order)
    assert late.faults.kinds == {"unwritten"}, "the second group has not been waited for"


STAGE = """
    mad.wide.u32 %rd10, %r0, 16, %rd0;  shl.b32 %r1, %r0, 4;  mov.b32 %r2, global_smem;  add.s32 %r1, %r1, %r2;
    ld.global.v4.b32 { %r5, %r6, %r7, %r8 }, [ %rd10 ];
    st.shared.v4.b32 [ %r1 ], { %r5, %r6, %r7, %r8 };
    bar.sync 0;
"""


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix_spread_rows_over_the_warp(transposed: bool) -> None:
    """A thread gets two neighbouring numbers of row lane / 4 of each matrix, or of a column if transposed."""
    rows = np.random.default_rng(0).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    out, back = np.zeros((32, 4), np.uint32), np.zeros((4, 8, 8), np.uint16)
    trans = ".trans" if transposed else ""
    outcome = execute(
        STAGE + f"""
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{ %r10, %r11, %r12, %r13 }}, [ %r1 ];
        mad.wide.u32 %rd11, %r0, 16, %rd1;
        st.global.v4.b32 [ %rd11 ], {{ %r10, %r11, %r12, %r13 }};
        bar.sync 0;
        stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [ %r1 + 512 ], {{ %r10, %r11, %r12, %r13 }};
        bar.sync 0;
        ld.shared.v4.b32 {{ %r5, %r6, %r7, %r8 }}, [ %r1 + 512 ];
        mad.wide.u32 %rd12, %r0, 16, %rd2;
        st.global.v4.b32 [ %rd12 ], {{ %r5, %r6, %r7, %r8 }};
        """,
        rows, out, back, shared=1024,
    )  # fmt: skip
    assert not outcome.faults.found
    for lane in range(32):
        for i in range(4):
            held = rows[i].T if transposed else rows[i]
            low, high = (int(x) for x in held[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2])
            assert out[lane, i] == low | high << 16
    assert np.array_equal(back, rows)


def product(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """What mma gives, and the product of the same matrices; fragments laid out as the manual's tables say."""
    draw = np.random.default_rng(4)
    a, b, c = (draw.integers(-8, 8, shape).astype(np.float32) / 4 for shape in ((16, 16), (16, 8), (16, 8)))
    narrow = lambda x: np.uint32(np.float16(x).view(np.uint16) if kind == "f16" else x.view(np.uint32) >> 16)  # noqa: E731
    words = np.zeros((32, 12), np.uint32)
    place = lambda lane, i: (lane // 4 + 8 * (i in (2, 3)), 2 * (lane % 4) + i % 2)  # noqa: E731
    for lane in range(32):
        group, pair = lane // 4, 2 * (lane % 4)
        for i in range(4):
            row, column = group + 8 * (i % 2), pair + 8 * (i // 2)
            words[lane, i] = narrow(a[row, column]) | narrow(a[row, column + 1]) << np.uint32(16)
            words[lane, 8 + i] = c[place(lane, i)].view(np.uint32)
        for i in range(2):
            words[lane, 4 + i] = narrow(b[pair + 8 * i, group]) | narrow(b[pair + 8 * i + 1, group]) << np.uint32(16)
    out = np.zeros((32, 4), np.float32)
    execute(
        f"""
        mad.wide.u32 %rd10, %r0, 48, %rd0;
        ld.global.v4.b32 {{ %r10, %r11, %r12, %r13 }}, [ %rd10 ];
        ld.global.v2.b32 {{ %r14, %r15 }}, [ %rd10 + 16 ];
        ld.global.v4.b32 {{ %r18, %r19, %r20, %r21 }}, [ %rd10 + 32 ];
        mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{ %r1, %r2, %r3, %r4 }},
            {{ %r10, %r11, %r12, %r13 }}, {{ %r14, %r15 }}, {{ %r18, %r19, %r20, %r21 }};
        mad.wide.u32 %rd11, %r0, 16, %rd1;
        st.global.v4.b32 [ %rd11 ], {{ %r1, %r2, %r3, %r4 }};
        """,
        words, out,
    )  # fmt: skip
    found = np.zeros((16, 8), np.float32)
    for lane in range(32):
        for i in range(4):
            found[place(lane, i)] = out[lane, i]
    return found, a @ b + c


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mma_is_the_product_of_its_fragments(kind: str) -> None:
    """Numbers so small that every sum is exact."""
    found, wanted = product(kind)
    assert np.array_equal(found, wanted)


def test_a_wrong_fragment_layout_fails_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_QUARTER", matrix._QUARTER[::-1].copy())
    found, wanted = product("f16")
    assert not np.array_equal(found, wanted)


def swizzled(rows: np.ndarray) -> np.ndarray:
    """Bytes of rows of 16 numbers, each row in 128 bytes of which the pieces of 16 bytes change places by the row."""
    image = np.zeros(len(rows) * 128, np.uint8)
    for row, numbers in enumerate(rows):
        for piece, some in enumerate(numbers.view(np.uint8).reshape(2, 16)):
            at = row * 128 + (piece ^ row % 8) * 16
            image[at : at + 16] = some
    return image


WGMMA = """
    mov.b32 %r1, global_smem; mad.lo.s32 %r1, %r0, 8, %r1; mad.wide.u32 %rd10, %r0, 8, %rd0;
    mov.b32 %r2, 0;
    $COPY: ld.global.v2.b32 { %r3, %r4 }, [%rd10]; st.shared.v2.b32 [%r1], { %r3, %r4 };
    add.s32 %r1, %r1, 1024; add.s64 %rd10, %rd10, 1024; add.s32 %r2, %r2, 1;
    setp.lt.s32 %p1, %r2, 9; @%p1 bra $COPY;
    fence.proxy.async.shared::cta; bar.sync 0;
    mov.b32 %r5, global_smem; bfe.u32 %r6, %r5, 4, 14; cvt.u64.u32 %rd11, %r6;
    or.b64 %rd11, %rd11, 4611686293305294848; add.s64 %rd12, %rd11, 512;
    mov.b32 %r20, 0f3F800000; mov.b32 %r21, %r20; mov.b32 %r22, %r20; mov.b32 %r23, %r20; mov.pred %p2, -1;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r20,%r21,%r22,%r23}, %rd11, %rd12, %p2, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned;
    mov.b32 %r7, 0;
    wgmma.wait_group.sync.aligned 0;
    mad.wide.u32 %rd13, %r0, 16, %rd1; st.global.v4.b32 [%rd13], { %r20, %r21, %r22, %r23 };
"""


@pytest.mark.parametrize("order", ["lockstep", "forward", "random"])
@pytest.mark.parametrize(("predicate", "before"), [("-1", 1), ("0", 0)], ids=["added to", "replaced"])
def test_wgmma_is_the_product_of_matrices_in_shared_memory(predicate: str, before: int, order: str) -> None:
    """The sums are 1 before it."""
    draw = np.random.default_rng(6)
    a, b = (draw.integers(-8, 8, (rows, 16)).astype(np.float16) / 4 for rows in (64, 8))
    given, out = np.concatenate([swizzled(a), swizzled(b)]), np.zeros((128, 4), np.float32)
    body = WGMMA.replace("mov.pred %p2, -1;", f"mov.pred %p2, {predicate};")
    assert execute(body, given, out, threads=128, shared=9216, order=order).faults.found == []
    wanted = a.astype(np.float32) @ b.astype(np.float32).T + before
    for thread in range(128):
        for i in range(4):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2)
            assert out[thread, i] == wanted[row, 2 * (thread % 4) + i % 2]


def test_an_operand_of_wgmma_that_changes_before_the_wait_is_a_fault() -> None:
    given, out = np.zeros(9216, np.uint8), np.zeros((128, 4), np.float32)
    late = WGMMA.replace("mov.b32 %r7, 0;", "bar.sync 0; st.shared.b32 [%r5], %r20; bar.sync 0;")
    faults = execute(late, given, out, threads=128, shared=9216).faults
    assert any("overwritten before the wait" in fault.text for fault in faults.found)


@pytest.mark.parametrize("order", ["lockstep", "forward", "random"])
@pytest.mark.parametrize(("overwritten", "pending"), [(8192, False), (0, True)], ids=["first group", "second group"])
def test_a_wait_leaves_the_latest_groups_of_wgmma_pending(overwritten: int, pending: bool, order: str) -> None:
    """Only the first product reads the bytes from 8192 on; the second is a by its own first rows."""
    given, out = np.zeros(9216, np.uint8), np.zeros((128, 4), np.float32)
    two = """
        mov.b32 %r24, 0; mov.b32 %r25, 0; mov.b32 %r26, 0; mov.b32 %r27, 0;
        wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r24,%r25,%r26,%r27}, %rd11, %rd11, %p2, 1, 1, 0, 0;
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 1;
    """
    late = WGMMA.replace("mov.b32 %r7, 0;", f"{two} bar.sync 0; st.shared.b32 [%r5 + {overwritten}], %r2; bar.sync 0;")
    faults = execute(late, given, out, threads=128, shared=9216, order=order).faults
    assert any("overwritten before the wait" in fault.text for fault in faults.found) == pending
    assert pending or faults.found == []


COLUMNS = 72  # of b: 64 of them lie side by side, the other 8 in a group of their own
SUMS = [f"%r{number}" for number in range(20, 20 + COLUMNS // 2)]
BY_REGISTERS = f"""
    mad.wide.u32 %rd10, %r0, 16, %rd1; ld.global.v4.b32 {{ %r10, %r11, %r12, %r13 }}, [%rd10];
    mov.b32 %r1, global_smem; mad.lo.s32 %r1, %r0, 16, %r1; mad.wide.u32 %rd10, %r0, 16, %rd0;
    ld.global.v4.b32 {{ %r3, %r4, %r5, %r6 }}, [%rd10]; st.shared.v4.b32 [%r1], {{ %r3, %r4, %r5, %r6 }};
    ld.global.v4.b32 {{ %r3, %r4, %r5, %r6 }}, [%rd10 + 2048]; st.shared.v4.b32 [%r1 + 2048], {{ %r3, %r4, %r5, %r6 }};
    fence.proxy.async.shared::cta; bar.sync 0;
    mov.b32 %r5, global_smem; bfe.u32 %r6, %r5, 4, 14; cvt.u64.u32 %rd11, %r6;
    or.b64 %rd11, %rd11, {1 << 62 | 1024 >> 4 << 32 | 2048 >> 4 << 16};
    {" ".join(f"mov.b32 {one}, 0;" for one in SUMS)}
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{COLUMNS}k16.f32.f16.f16 {{{",".join(SUMS)}}}, {{%r10,%r11,%r12,%r13}}, %rd11,
        0, 1, 1, 1;
    wgmma.commit_group.sync.aligned;
    mov.b32 %r7, 0;
    wgmma.wait_group.sync.aligned 0;
    mad.wide.u32 %rd13, %r0, {2 * COLUMNS}, %rd2;
    {" ".join(f"st.global.b32 [%rd13 + {4 * i}], {one};" for i, one in enumerate(SUMS))}
"""


def product_by_registers(body: str, order: str = "lockstep") -> tuple[np.ndarray, np.ndarray, Faults]:
    """What wgmma gives for a in registers and b by columns, laid out as the manual says; the product; faults."""
    draw = np.random.default_rng(8)
    a, b = (draw.integers(-8, 8, shape).astype(np.float16) / 4 for shape in ((64, 16), (16, COLUMNS)))
    padded = np.concatenate([b, np.zeros((16, 128 - COLUMNS), np.float16)], axis=1)
    image = np.zeros((2, 16, 8, 8), np.float16)  # group of 64 columns, k, piece of 8 columns
    for group, k, piece in np.ndindex(2, 16, 8):
        image[group, k, piece ^ k % 8] = padded[k, 64 * group + 8 * piece :][:8]
    held = np.zeros((128, 4, 2), np.float16)
    for thread, i, half in np.ndindex(128, 4, 2):
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i % 2)
        held[thread, i, half] = a[row, 2 * (thread % 4) + half + 8 * (i // 2)]
    out, found = np.zeros((128, COLUMNS // 2), np.float32), np.zeros((64, COLUMNS), np.float32)
    faults = execute(body, image, held, out, threads=128, shared=4096, order=order).faults
    for thread, i in np.ndindex(128, COLUMNS // 2):
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i % 4 // 2)
        found[row, i // 4 * 8 + 2 * (thread % 4) + i % 2] = out[thread, i]
    return found, a.astype(np.float32) @ b.astype(np.float32), faults


@pytest.mark.parametrize("order", ["lockstep", "forward", "random"])
def test_wgmma_takes_a_from_registers_and_b_by_columns(order: str) -> None:
    found, wanted, faults = product_by_registers(BY_REGISTERS, order)
    assert faults.found == []
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("0, 1, 1, 1;", "0, 1, 1, 0;"),  # b by rows
        ("{%r10,%r11,%r12,%r13}, %rd11", "{%r10,%r12,%r11,%r13}, %rd11"),
        (str(1 << 62 | 1024 >> 4 << 32 | 2048 >> 4 << 16), str(1 << 62 | 1024 >> 4 << 32 | 1024 >> 4 << 16)),
    ],
    ids=["rows for columns", "registers of a", "stride between groups of columns"],
)
def test_a_wrong_layout_of_wgmmas_operands_gives_another_product(right: str, wrong: str) -> None:
    assert right in BY_REGISTERS
    found, wanted, _ = product_by_registers(BY_REGISTERS.replace(right, wrong))
    assert not np.array_equal(found, wanted)


def test_a_register_of_wgmma_that_changes_before_the_wait_is_a_fault() -> None:
    _, _, faults = product_by_registers(BY_REGISTERS.replace("mov.b32 %r7, 0;", "add.s32 %r10, %r10, 1;"))
    assert any("overwritten before the wait" in fault.text for fault in faults.found)
