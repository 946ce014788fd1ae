"""Small PTX kernels for tests: a body becomes a module, runs on numpy arrays, and the arrays are written back."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.kernels.ptx.decode import program
from tests.support.kernels.ptx.faults import Faults
from tests.support.kernels.ptx.machine import Outcome, run
from tests.support.kernels.ptx.memory import UNWRITTEN, WRITTEN, Space
from tests.support.kernels.ptx.races import Races
from tests.support.kernels.ptx.unit import Options

BASE, GAP = 0x7F_0000_0000, 4096
BITS = {"pred": 1, "bf16": 16}
LETTERS = {1: "p", 16: "rs", 32: "r", 64: "rd"}


def module(body: str, parameters: int, threads: int = 32) -> str:
    """PTX text of an entry with so many 64-bit parameters: p0, p1, ..., loaded into %rd0, %rd1, ... (%tid.x in %r0)."""
    declared = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    loads = "\n".join(f"ld.param.b64 %rd{i}, [p{i}];" for i in range(parameters))
    return f"""
.version 8.7
.target sm_80
.visible .entry kernel({declared})
.reqntid {threads}
{{
.reg .pred %p<40>;
.reg .b16 %rs<40>;
.reg .b32 %r<80>;
.reg .b64 %rd<80>;
{loads}
mov.u32 %r0, %tid.x;
{body}
ret;
}}
"""


def execute(
    body: str,
    *arrays: np.ndarray,
    threads: int = 32,
    blocks: int = 1,
    shared: int = 0,
    unwritten: tuple[int, ...] = (),
    **options: Any,
) -> Outcome:
    """Run a body on arrays, handed in by address and changed in place. `unwritten`: numbers of those that hold nothing
    yet."""
    code = program(module(body, len(arrays), threads))
    starts, end = [], GAP
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // GAP) * GAP + GAP
    faults, chosen, granule = Faults(), Options(**options), code.granules["global"]
    memory = Space(end, granule, BASE, 1, faults, Races(end // granule, between_blocks=True) if chosen.races else None)
    for number, (array, start) in enumerate(zip(arrays, starts, strict=True)):
        memory.data[start : start + array.nbytes] = array.view(np.uint8).ravel()
        state = UNWRITTEN if number in unwritten else WRITTEN
        memory.state[start // granule : (start + array.nbytes) // granule] = state
    outcome = run(code, [BASE + start for start in starts], (blocks, 1, 1), memory, shared, chosen)
    for array, start in zip(arrays, starts, strict=True):
        array.view(np.uint8).ravel()[:] = memory.data[start : start + array.nbytes]
    return outcome


def bits_of(kind: str) -> int:
    """Width of a PTX type."""
    return BITS[kind] if kind in BITS else int(kind.lstrip("usbf").split("x")[0]) * (2 if kind.endswith("x2") else 1)


def evaluate(instruction: str, inputs: list[str], output: str, *columns: np.ndarray, **options: Any) -> np.ndarray:
    """One instruction in every thread: {a}, {b}, {c} are registers of the types `inputs` holding the columns (raw bits;
    of a predicate 0 or 1), {d} one of the type `output`. Gives the raw bits of {d}."""
    threads = len(columns[0])
    assert threads % 32 == 0
    lines, names = [], {}
    for i, (kind, column) in enumerate(zip(inputs, columns, strict=True)):
        bits = bits_of(kind)
        wide = max(bits, 16) if bits > 1 else 32
        name = f"%{LETTERS[wide]}{20 + i}"
        assert column.itemsize * 8 == wide, (kind, column.dtype)
        lines.append(f"mad.wide.u32 %rd{10 + i}, %r0, {wide // 8}, %rd{i};")
        lines.append(f"ld.global.b{wide} {name}, [%rd{10 + i}];")
        if bits == 1:
            lines.append(f"setp.ne.b32 %p{20 + i}, {name}, 0;")
            name = f"%p{20 + i}"
        names["abc"[i]] = name
    bits = bits_of(output)
    names["d"] = f"%{LETTERS[bits]}30"
    lines.append(instruction.format(**names))
    wide = bits if bits > 1 else 32
    if bits == 1:
        lines.append("selp.b32 %r30, 1, 0, %p30;")
    lines.append(f"mad.wide.u32 %rd15, %r0, {wide // 8}, %rd{len(columns)};")
    lines.append(f"st.global.b{wide} [%rd15], %{LETTERS[wide]}30;")
    result = np.zeros(threads, f"u{wide // 8}")
    outcome = execute("\n".join(lines), *(column.copy() for column in columns), result, threads=threads, **options)
    assert outcome.faults.found == []
    return result
