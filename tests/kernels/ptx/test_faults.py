"""Small kernels with one planted fault each: the machine names it in every order of the warps, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.kernels.ptx.assemble import execute
from tests.support.kernels.ptx import machine
from tests.support.kernels.ptx.machine import Outcome
from tests.support.kernels.ptx.unit import ORDERS

AT = "mad.wide.u32 %rd10, %r0, 4, %rd0;"
MINE = "shl.b32 %r1, %r0, 2; mov.b32 %r2, global_smem; add.s32 %r1, %r1, %r2;"
OTHERS = "xor.b32 %r3, %r0, 32; shl.b32 %r3, %r3, 2; add.s32 %r3, %r3, %r2;"
SAY = "st.shared.b32 [%r1], %r0;"
EXCHANGE = f"{AT} {MINE} {OTHERS} {SAY} bar.sync 0; ld.shared.b32 %r4, [%r3]; st.global.b32 [%rd10], %r4;"


@dataclass(frozen=True)
class Planted:
    """A sound body, and the replacement that makes it faulty."""

    kind: str
    sound: str
    piece: str
    faulty: str
    says: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def run(self, body: str, order: str) -> Outcome:
        chosen = {"threads": 64, "shared": 512} | self.settings
        return execute(body, np.arange(64 * chosen.get("blocks", 1), dtype=np.uint32), order=order, **chosen)


HALF_WARP = "setp.lt.u32 %p1, %r0, 16; @%p1 bra $OUT; {0} $OUT:"
WHOLE_WARP = "setp.lt.u32 %p1, %r0, 32; @%p1 bra $OUT; {0} $OUT:"
FIVE = "mov.b32 %r7, 5; st.shared.b32 [%r2], %r7;"  # by every thread
SECOND_WARP = "setp.eq.u32 %p1, %r0, 32;"  # its first thread
TWO_BLOCKS = {"blocks": 2}
OWN = "mov.u32 %r5, %ctaid.x; mad.lo.s32 %r5, %r5, 64, %r0; mad.wide.u32 %rd10, %r5, 4, %rd0;"
READ = "ld.global.b32 %r1, [%rd0];"
COPY = """mad.wide.u32 %rd10, %r0, 4, %rd0; shl.b32 %r1, %r0, 2; mov.b32 %r2, global_smem; add.s32 %r1, %r1, %r2;
    xor.b32 %r3, %r0, 32; shl.b32 %r3, %r3, 2; add.s32 %r3, %r3, %r2;
    st.shared.b32 [%r1], %r0; bar.sync 0; ld.shared.b32 %r6, [%r3]; bar.sync 0;
    cp.async.ca.shared.global [%r1], [%rd10], 4, 4; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
    ld.shared.b32 %r4, [%r3];"""
PLANTED = {
    "store behind the tensor": Planted(
        "out of bounds", f"{AT} st.global.b32 [%rd10], %r0;", "[%rd10]", "[%rd10 + 4]", "1 lanes; block 0 thread 63"
    ),
    "load before the tensor": Planted(
        "out of bounds", f"{AT} ld.global.b32 %r1, [%rd10];", "[%rd10]", "[%rd10 + -4]", "block 0 thread 0 loads"
    ),
    "load from a null pointer": Planted(
        "out of bounds", f"{AT} ld.global.b32 %r1, [%rd10];", AT, "mov.b64 %rd10, 0;", "lanes; block 0"
    ),
    "shared memory too small": Planted(
        "out of bounds", f"{MINE} st.shared.b32 [%r1], %r0;", "[%r1]", "[%r1 + 480]", "shared memory"
    ),
    "misaligned vector": Planted(
        "misaligned",
        f"{AT} and.b64 %rd11, %rd10, -8; ld.global.v2.b32 {{ %r1, %r2 }}, [%rd11];",
        "[%rd11]",
        "[%rd10]",
        "loads 8 bytes",
    ),
    "shared memory read before anybody wrote it": Planted(
        "unwritten", EXCHANGE, "[%r3]; st", "[%r3 + 256]; st", "of shared memory"
    ),
    "scratch memory read before anybody wrote it": Planted(
        "unwritten",
        f"{AT} st.global.b32 [%rd10], %r0; bar.sync 0; ld.global.b32 %r1, [%rd10];",
        "st.global.b32 [%rd10], %r0;",
        "",
        "reads byte",
        {"unwritten": (0,)},
    ),
    "no barrier between store and load": Planted("race", EXCHANGE, "bar.sync 0;", "", "with no barrier in between"),
    "no barrier between load and store": Planted(
        "race",
        EXCHANGE.replace("ld.shared", f"ld.shared.b32 %r5, [%r3]; bar.sync 0; {SAY} bar.sync 0; ld.shared", 1),
        f"bar.sync 0; {SAY} bar.sync 0; ld",
        f"{SAY} bar.sync 0; ld",
    ),
    "two warps store different values": Planted(
        "race", f"{MINE} st.shared.b32 [%r1], %r0;", MINE, MINE + " and.b32 %r1, %r1, -129;", "written by another warp"
    ),
    "the same value as another warp's, then a different one": Planted(
        "race",
        f"{MINE} {FIVE} bar.sync 0; {SECOND_WARP} @%p1 st.shared.b32 [%r2], %r0;",
        "bar.sync 0;",
        "",
        "written by another warp with no barrier",
    ),
    "no barrier, in global memory": Planted(
        "race",
        f"{AT} st.global.b32 [%rd10], %r0; bar.sync 0; ld.global.b32 %r1, [%rd0];",
        "bar.sync 0;",
        "",
        "byte",
    ),
    **{
        f"two warps read, then warp {warp} writes": Planted(
            "race",
            f"{MINE} {FIVE} bar.sync 0; setp.eq.u32 %p1, %r0, {32 * warp};"
            " ld.shared.b32 %r4, [%r2]; bar.sync 0; @%p1 st.shared.b32 [%r2], %r0;",
            "bar.sync 0; @%p1",
            "@%p1",
        )
        for warp in (0, 1)
    },
    "lanes of a warp store different values": Planted(
        "race",
        f"{MINE} and.b32 %r4, %r1, -4; st.shared.b32 [%r4], %r0;",
        "and.b32 %r4, %r1, -4;",
        "and.b32 %r4, %r1, -8;",
        "lanes of one warp store different values",
    ),
    "two blocks write one place": Planted(
        "programs", f"{OWN} st.global.b32 [%rd10], %r0;", OWN, AT, "accessed by another block", TWO_BLOCKS
    ),
    "a block reads what another writes": Planted(
        "programs",
        f"{OWN} st.global.b32 [%rd10], %r0; bar.sync 0; ld.global.b32 %r1, [%rd10];",
        "ld.global.b32 %r1, [%rd10];",
        "ld.global.b32 %r1, [%rd0 + 256]; ld.global.b32 %r1, [%rd0];",
        "",
        TWO_BLOCKS,
    ),
    **{
        f"two blocks read {how}, then the second writes": Planted(
            "programs",
            f"{OWN} setp.eq.u32 %p1, %r5, 64; {reads} @%p1 st.global.b32 [%rd10], %r0;",
            "[%rd10]",
            "[%rd0]",
            "accessed by another block",
            {"threads": 32} | TWO_BLOCKS,
        )
        for how, reads in {"at once": READ, "in turn": f"@!%p1 {READ} @%p1 {READ}"}.items()
    },
    "half a warp at a barrier": Planted(
        "barrier", WHOLE_WARP.format("") + " bar.sync 0;", WHOLE_WARP.format(""), HALF_WARP.format("bar.sync 0;")
    ),
    "a warp returns before a barrier": Planted(
        "barrier", WHOLE_WARP.format("") + " bar.sync 0;", "$OUT: bar.sync 0;", "bar.sync 0; $OUT:", "have returned"
    ),
    "warps at different barriers": Planted(
        "barrier",
        "setp.lt.u32 %p1, %r0, 32; @%p1 bra $A; mov.b32 %r1, 1; $A: bar.sync 0;",
        "@%p1 bra $A; mov.b32 %r1, 1; $A: bar.sync 0;",
        "@%p1 bra $A; bar.sync 0; bra $B; $A: bar.sync 0; $B:",
        "another barrier",
    ),
    "a shuffle by half a warp": Planted(
        "shuffle",
        WHOLE_WARP.format("shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;"),
        "%r0, 32",
        "%r0, 16",
        "do not execute this together",
    ),
    "a shuffle of some that reads from others": Planted(
        "shuffle",
        "mov.b32 %r6, 0xFFFF0000; " + HALF_WARP.format("shfl.sync.bfly.b32 %r1, %r0, 1, 31, %r6;"),
        "%r0, 1, 31",
        "%r0, 16, 31",
        "does not take part",
        {"threads": 32},
    ),
    "a reduction by half a warp": Planted(
        "shuffle", WHOLE_WARP.format("redux.sync.add.s32 %r1, %r0, -1;"), "%r0, 32", "%r0, 16"
    ),
    "division by zero": Planted(
        "division", "add.s32 %r1, %r0, 1; div.s32 %r2, %r0, %r1;", "div.s32 %r2, %r0, %r1", "div.s32 %r2, %r1, %r0"
    ),
    "a copy read before its wait": Planted("unwritten", COPY, "cp.async.wait_group 0;", "", "reads byte"),
    "a copy that other warps have not waited for": Planted(
        "race", COPY, "cp.async.wait_group 0; bar.sync 0;", "bar.sync 0; cp.async.wait_group 0;"
    ),
    "a copy into what others still read": Planted(
        "race", COPY, "ld.shared.b32 %r6, [%r3]; bar.sync 0;", "ld.shared.b32 %r6, [%r3];", "read by another warp"
    ),
}  # fmt: skip
LATE = ("a copy that other warps have not waited for", "no barrier between store and load")
ALSO = {name: {"unwritten"} for name in LATE}  # in some orders the reader comes before the writer


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_and_a_sound_kernel_is_not_blamed(name: str, order: str) -> None:
    planted = PLANTED[name]
    assert planted.piece in planted.sound
    sound = planted.run(planted.sound, order)
    assert sound.faults.found == []
    faults = planted.run(planted.sound.replace(planted.piece, planted.faulty, 1), order).faults
    assert planted.kind in faults.kinds
    assert faults.kinds <= {planted.kind} | ALSO.get(name, set())
    assert any(planted.says in fault.text for fault in faults.found if fault.kind == planted.kind), faults.found


@pytest.mark.parametrize("order", ORDERS)
def test_equal_values_stored_by_several_warps_are_noted_as_harmless(order: str) -> None:
    """Triton does so where several warps hold the same replicated value."""
    faults = execute(f"{MINE} st.shared.b32 [%r2], 5;".replace(", 5", ", %r7").replace("shl", "mov.b32 %r7, 5; shl", 1),
                     threads=64, shared=512, order=order).faults  # fmt: skip
    assert faults.found == []
    assert [note.kind for note in faults.notes] == ["race"]


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier_gives_wrong_values_in_an_order_that_shows_it(order: str) -> None:
    """Between the halves of the block the exchange is wrong unless all warps run in lockstep."""
    out = np.zeros(64, np.uint32)
    execute(EXCHANGE.replace("bar.sync 0;", ""), out, threads=64, shared=512, order=order)
    right = np.array_equal(out, np.arange(64) ^ 32)
    assert right == (order == "lockstep")
    execute(EXCHANGE, out, threads=64, shared=512, order=order)
    assert np.array_equal(out, np.arange(64) ^ 32)


def test_without_races_nothing_is_said_of_them() -> None:
    body = EXCHANGE.replace("bar.sync 0;", "")
    assert execute(body, np.zeros(64, np.uint32), threads=64, shared=512, races=False).faults.found == []


def test_a_kernel_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_ENDLESS", 1000)
    with pytest.raises(RuntimeError, match="does not end"):
        execute("$A: add.s32 %r1, %r1, 1; bra $A;")


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="order is 'backwards'"):
        execute("mov.b32 %r1, 0;", order="backwards")
