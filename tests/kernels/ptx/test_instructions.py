"""Every instruction computes what exact arithmetic on single numbers says, on hard values and on random ones."""

from __future__ import annotations

import ctypes
import ctypes.util
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests.kernels.ptx.assemble import bits_of, evaluate
from tests.kernels.ptx.truth import fused, fused_down, number, raw, rounded, same, signed, sum_to_zero, wrapped
from tests.support.kernels.ptx import alu
from tests.support.kernels.ptx.decode import program
from tests.support.kernels.ptx.parse import Unsupported

THREADS = 256
HARD = {
    "f16": [0, 0x8000, 1, 0x3C00, 0xBC00, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x0400, 0x03FF],
    "bf16": [0, 0x8000, 1, 0x3F80, 0xBF80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x0080],
    "f32": [0, 0x80000000, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x3F800001, 0x7F7FFFFF, 0x7F800000,
            0xFF800000, 0x7FC00000, 0x4B7FFFFF, 0x33800000, 0x3F808000, 0x3F818000, 0x3F807FFF],
    "f64": [0, 1 << 63, 1, 0x0010000000000000, 0x3FF0000000000000, 0xBFF0000000000000, 0x7FEFFFFFFFFFFFFF,
            0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0x3FF0000000000001, 0x3CA0000000000000],
    "pred": [0, 1],
}  # fmt: skip
RANDOM_SIZES = {"f32": (0x30, 0x4F), "f64": (0x3C0, 0x43F)}  # exponents of ordinary numbers, upper bits


def hard_integers(width: int) -> list[int]:
    top = 1 << (width - 1)
    return [wrapped(x, width) for x in (0, 1, 2, 3, 5, 7, 31, 32, 33, 63, 64, 255, -1, -2, -7, top, top - 1, top + 1)]


def columns(kinds: list[str], seed: int = 0) -> list[np.ndarray]:
    """Raw bits: hard values against each other, then random ones, of floats half of ordinary size."""
    draw = np.random.default_rng(seed)
    made = []
    for place, kind in enumerate(kinds):
        width = bits_of(kind)
        store = max(width, 16) if width > 1 else 32
        hard = HARD.get(kind) or hard_integers(width)
        values = draw.integers(0, 2 ** min(width, 63), THREADS).astype(object) * (2 if width == 64 else 1)
        if kind in RANDOM_SIZES:
            low, high = RANDOM_SIZES[kind]
            shift = 24 if kind == "f32" else 52
            for i in range(0, THREADS, 2):
                values[i] = wrapped(int(values[i]), shift) | (int(draw.integers(low, high)) << shift)
        period = len(hard) ** place
        for i in range(min(THREADS * 3 // 4, len(hard) ** len(kinds))):
            values[i] = hard[i // period % len(hard)]
        made.append(np.array([wrapped(int(v), width) for v in values], dtype=f"u{store // 8}"))
    return made


@dataclass(frozen=True)
class Case:
    """An instruction, and what it should give: a function of Python numbers."""

    instruction: str
    inputs: tuple[str, ...]
    output: str
    truth: Callable[..., Any]

    @property
    def opcode(self) -> str:
        return self.instruction.split()[0]

    def read(self, bits: int, kind: str) -> Any:
        if kind in HARD and kind != "pred":
            return number(bits, kind)
        return signed(bits, bits_of(kind)) if kind.startswith("s") else bits

    def wanted(self, given: list[np.ndarray]) -> list[int]:
        results = []
        for values in zip(*given, strict=True):
            result = self.truth(*(self.read(int(v), kind) for v, kind in zip(values, self.inputs, strict=True)))
            if self.output in HARD and self.output != "pred":
                result = raw(result, self.output)
            results.append(wrapped(int(result), max(bits_of(self.output), 1)))
        return results

    def check(self, seed: int = 0) -> None:
        given = columns(list(self.inputs), seed)
        found = evaluate(self.instruction, list(self.inputs), self.output, *given)
        fine = same(found, self.wanted(given), self.output)
        worst = int(np.flatnonzero(~fine)[0]) if not fine.all() else 0
        assert fine.all(), (
            f"{self.opcode} of {[hex(int(c[worst])) for c in given]} is {int(found[worst]):#x},"
            f" not {self.wanted(given)[worst]:#x}"
        )


def single(operation: Callable[..., float], kind: str) -> Callable[..., float]:
    """An operation on floats, rounded once: in double precision, then to the format, which is the same (of float32,
    and of +, -, * and / only)."""

    def once(*args: float) -> float:
        with np.errstate(all="ignore"):
            result = operation(*(np.float64(a) for a in args))
            return float(np.float32(result)) if kind == "f32" else float(result)

    return once


def quotient(a: int, b: int) -> int:
    return 0 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def smaller(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return min((a, b), key=lambda x: (x, math.copysign(1, x)))


def larger(a: float, b: float) -> float:
    return -smaller(-a, -b)


def flush(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x


def permuted(a: int, b: int, selector: int) -> int:
    """prmt, byte by byte."""
    both, chosen = a.to_bytes(4, "little") + b.to_bytes(4, "little"), []
    for place in range(4):
        digit = selector >> 4 * place & 15
        byte = both[digit % 8]
        chosen.append(byte if digit < 8 else 255 if byte > 127 else 0)
    return int.from_bytes(bytes(chosen), "little")


def field(value: int, start: int, length: int, width: int, is_signed: bool) -> int:
    """bfe, bit by bit."""
    start, length = start & 255, min(length & 255, width)
    sign = (value >> min(start + length - 1, width - 1)) & 1 if is_signed and length > 0 else 0
    bits = [(value >> (start + i)) & 1 if i < length and start + i < width else sign for i in range(width)]
    bits = [bits[i] if i < length and start + i < width else sign for i in range(width)]
    return sum(bit << i for i, bit in enumerate(bits))


ORDERED = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def apart(a: float, b: float) -> bool:
    """Is one of them a NaN?"""
    return math.isnan(a) or math.isnan(b)


def integer_cases() -> list[Case]:
    cases = []
    simple = {"add": operator.add, "sub": operator.sub, "mul.lo": operator.mul, "min": min, "max": max}
    for kind in ("s16", "s32", "u32", "s64", "u64"):
        width = bits_of(kind)
        for name, truth in simple.items():
            cases.append(Case(f"{name}.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), kind, truth))
        for how, compare in ORDERED.items():
            cases.append(Case(f"setp.{how}.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), "pred", compare))
        shift = lambda a, n, w=width: a >> min(n, 2 * w)  # noqa: E731
        cases.append(Case(f"shr.{kind} {{d}}, {{a}}, {{b}};", (kind, "u32"), kind, shift))
        cases.append(Case(f"mad.lo.{kind} {{d}}, {{a}}, {{b}}, {{c}};", (kind,) * 3, kind, lambda a, b, c: a * b + c))
    for kind in ("s32", "u32"):
        wide = kind[0] + "64"
        cases += [
            Case(f"mul.hi.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), kind, lambda a, b: (a * b) >> 32),
            Case(f"mul.wide.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), wide, operator.mul),
            Case(f"mad.wide.{kind} {{d}}, {{a}}, {{b}}, {{c}};", (kind, kind, wide), wide, lambda a, b, c: a * b + c),
            Case(
                f"bfe.{kind} {{d}}, {{a}}, {{b}}, {{c}};", ("u32",) * 3, "u32",
                lambda a, b, c, s=kind == "s32": field(a, b, c, 32, s),
            ),
        ]  # fmt: skip
    for kind in ("b16", "b32", "b64", "pred"):
        logic = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
        cases += [Case(f"{n}.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), kind, truth) for n, truth in logic.items()]
        negated = (lambda a: 1 - a) if kind == "pred" else operator.invert
        cases.append(Case(f"not.{kind} {{d}}, {{a}};", (kind,), kind, negated))
        if kind != "pred":
            shifted = lambda a, n, w=bits_of(kind): a << n if n < w else 0  # noqa: E731
            cases.append(Case(f"shl.{kind} {{d}}, {{a}}, {{b}};", (kind, "u32"), kind, shifted))
            choose = lambda a, b, p: a if p else b  # noqa: E731
            cases.append(Case(f"selp.{kind} {{d}}, {{a}}, {{b}}, {{c}};", (kind, kind, "pred"), kind, choose))
            cases.append(Case(f"mov.{kind} {{d}}, {{a}};", (kind,), kind, lambda a: a))
    for kind in ("b32", "b64"):
        cases.append(Case(f"popc.{kind} {{d}}, {{a}};", (kind,), "u32", int.bit_count))
    cases.append(Case("prmt.b32 {d}, {a}, {b}, {c};", ("u32",) * 3, "u32", permuted))
    cases.append(Case("neg.s32 {d}, {a};", ("s32",), "s32", operator.neg))
    cases.append(Case("abs.s32 {d}, {a};", ("s32",), "s32", abs))
    cases.append(Case("setp.eq.b64 {d}, {a}, {b};", ("b64", "b64"), "pred", operator.eq))
    for low, high in (("lo", "lt"), ("hi", "gt"), ("ls", "le"), ("hs", "ge")):
        cases.append(Case(f"setp.{low}.u32 {{d}}, {{a}}, {{b}};", ("u32", "u32"), "pred", ORDERED[high]))
    return cases


def float_cases() -> list[Case]:
    cases = []
    simple = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
    for kind in ("f32", "f64"):
        for name, operation in simple.items():
            cases.append(Case(f"{name}.rn.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), kind, single(operation, kind)))
        exact = lambda a, b, c, k=kind: fused(a, b, c, k)  # noqa: E731
        cases.append(Case(f"fma.rn.{kind} {{d}}, {{a}}, {{b}}, {{c}};", (kind,) * 3, kind, exact))
        cases.append(Case(f"min.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), kind, smaller))
        cases.append(Case(f"max.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), kind, larger))
        cases.append(Case(f"neg.{kind} {{d}}, {{a}};", (kind,), kind, operator.neg))
        cases.append(Case(f"abs.{kind} {{d}}, {{a}};", (kind,), kind, abs))
        cases.append(
            Case(f"selp.{kind} {{d}}, {{a}}, {{b}}, {{c}};", (kind, kind, "pred"), kind, lambda a, b, p: a if p else b)
        )
        for how, compare in ORDERED.items():
            ordered = lambda a, b, c=compare: not apart(a, b) and c(a, b)  # noqa: E731
            unordered = lambda a, b, c=compare: apart(a, b) or c(a, b)  # noqa: E731
            cases.append(Case(f"setp.{how}.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), "pred", ordered))
            cases.append(Case(f"setp.{how}u.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), "pred", unordered))
        cases.append(Case(f"setp.nan.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), "pred", apart))
        cases.append(Case(f"setp.num.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), "pred", lambda a, b: not apart(a, b)))
    both = lambda a, b: not apart(a, b)  # noqa: E731
    cases.append(Case("setp.num.bf16 {d}, {a}, {b};", ("bf16", "bf16"), "pred", both))
    three = ("f32",) * 3
    cases.append(Case("max.f32 {d}, {a}, {b}, {c};", three, "f32", lambda a, b, c: larger(larger(a, b), c)))
    cases.append(Case("min.f32 {d}, {a}, {b}, {c};", three, "f32", lambda a, b, c: smaller(smaller(a, b), c)))
    flushed = lambda a, b, c: flush(fused(flush(a), flush(b), flush(c), "f32"))  # noqa: E731
    cases.append(Case("fma.rn.ftz.f32 {d}, {a}, {b}, {c};", three, "f32", flushed))
    cases.append(Case("fma.rm.f32 {d}, {a}, {b}, {c};", three, "f32", fused_down))
    flushed_down = lambda a, b, c: flush(fused_down(flush(a), flush(b), flush(c)))  # noqa: E731
    cases.append(Case("fma.rm.ftz.f32 {d}, {a}, {b}, {c};", three, "f32", flushed_down))
    cases.append(Case("add.rz.f32 {d}, {a}, {b};", ("f32", "f32"), "f32", sum_to_zero))
    flushed_sum = lambda a, b: flush(sum_to_zero(flush(a), flush(b)))  # noqa: E731
    cases.append(Case("add.rz.ftz.f32 {d}, {a}, {b};", ("f32", "f32"), "f32", flushed_sum))
    clamp = lambda a: min(a, 1.0) if a > 0 else 0.0  # noqa: E731
    cases.append(Case("cvt.sat.f32.f32 {d}, {a};", ("f32",), "f32", clamp))
    cases.append(Case("cvt.ftz.sat.f32.f32 {d}, {a};", ("f32",), "f32", lambda a: clamp(flush(a))))
    cases.append(Case("abs.ftz.f32 {d}, {a};", ("f32",), "f32", lambda a: flush(abs(a))))
    for narrow in ("bf16", "f16"):
        cases.append(Case(f"add.rn.f32.{narrow} {{d}}, {{a}}, {{b}};", (narrow, "f32"), "f32", single(np.add, "f32")))
        cases.append(
            Case(f"sub.rn.f32.{narrow} {{d}}, {{a}}, {{b}};", (narrow, "f32"), "f32", single(np.subtract, "f32"))
        )
    return cases


def rounded_to(kind: str) -> Callable[[float], float]:
    return lambda x: rounded(Fraction(x), kind) if math.isfinite(x) and x != 0 else x


def clamped(kind: str, how: Callable[[float], int]) -> Callable[[float], int]:
    width = bits_of(kind)
    low, high = (-(1 << width - 1), (1 << width - 1) - 1) if kind[0] == "s" else (0, (1 << width) - 1)

    def convert(x: float) -> int:
        if math.isnan(x):
            return 0
        return (high if x > 0 else low) if math.isinf(x) else max(low, min(high, how(x)))

    return convert


def conversion_cases() -> list[Case]:
    cases = []
    for target, source in (
        ("s64", "s32"),
        ("u64", "u32"),
        ("u32", "u64"),
        ("u32", "u16"),
        ("s32", "s16"),
        ("u16", "u32"),
    ):
        cases.append(Case(f"cvt.{target}.{source} {{d}}, {{a}};", (source,), target, lambda a: a))
    for target, source in (
        ("f32", "s32"),
        ("f32", "u32"),
        ("f64", "u32"),
        ("f64", "s32"),
        ("f32", "s64"),
        ("f32", "u64"),
    ):
        whole = lambda a, k=target: rounded(Fraction(a), k)  # noqa: E731
        cases.append(Case(f"cvt.rn.{target}.{source} {{d}}, {{a}};", (source,), target, whole))
    for target, source in (("bf16", "f32"), ("f16", "f32"), ("f32", "f64")):
        cases.append(Case(f"cvt.rn.{target}.{source} {{d}}, {{a}};", (source,), target, rounded_to(target)))
    for target, source in (("f32", "bf16"), ("f32", "f16"), ("f64", "f32")):
        cases.append(Case(f"cvt.{target}.{source} {{d}}, {{a}};", (source,), target, lambda a: a))
    for how, function in (("rzi", math.trunc), ("rni", round), ("rmi", math.floor), ("rpi", math.ceil)):
        for target in ("s32", "u32"):
            truth = clamped(target, function)
            cases.append(Case(f"cvt.{how}.{target}.f32 {{d}}, {{a}};", ("f32",), target, truth))
    for kind in ("bf16", "f16"):
        near = rounded_to(kind)
        pair = lambda a, b, k=kind, r=near: (raw(r(a), k) << 16) | raw(r(b), k)  # noqa: E731
        cases.append(Case(f"cvt.rn.{kind}x2.f32 {{d}}, {{a}}, {{b}};", ("f32", "f32"), "b32", pair))
    return cases


CASES = [*integer_cases(), *float_cases(), *conversion_cases()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.opcode}-{len(case.inputs)}")
def test_an_instruction_computes_what_exact_arithmetic_says(case: Case) -> None:
    if "x2.f32" in case.opcode:  # a NaN among the halves has bits of its own
        given = [column[~np.isnan(column.view(np.float32))] for column in columns(list(case.inputs))]
        size = min(map(len, given)) // 32 * 32
        given = [column[:size] for column in given]
        found = evaluate(case.instruction, list(case.inputs), case.output, *given)
        assert found.tolist() == case.wanted(given)
    else:
        case.check()


def fails(cases: list[Case]) -> bool:
    for case in cases:
        try:
            case.check()
        except (AssertionError, TypeError, ValueError, Unsupported):
            return True
    return False


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (table, name)
        for table in ("INTEGER", "PREDICATE", "FLOAT", "FUSED", "DIRECTED", "SATURATED", "COMPARE", "_ROUND")
        for name in getattr(alu, table)
        if name not in ("div", "rem")
    ],
)
def test_a_wrong_instruction_in_the_machine_fails_a_test(
    table: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry of the tables in turn: the function of its neighbour, or one that is off in the last bit."""
    right = getattr(alu, table)[name]

    def off(*args: np.ndarray) -> np.ndarray:
        result = np.array(right(*args))
        result[::17] = ~result[::17] if result.dtype == bool else np.flip(result, 0)[::17] + result.dtype.type(1)
        return result

    monkeypatch.setitem(getattr(alu, table), name, off)
    program.cache_clear()
    relevant = [case for case in CASES if name in case.opcode and (table != "FUSED" or case.opcode.startswith("fma"))]
    found = fails(relevant)
    program.cache_clear()
    assert found, f"nothing noticed a wrong {name} of {table}"


@pytest.mark.parametrize("kind", ["s32", "u32", "s64"])
def test_division_truncates(kind: str) -> None:
    given = columns([kind, kind])
    given[1][given[1] == 0] = 7
    top = given[0] == given[0].dtype.type(1 << (bits_of(kind) - 1))
    given[1][top & (given[1] == np.iinfo(given[1].dtype).max)] = 3  # overflows, whatever that gives
    for name, truth in (("div", quotient), ("rem", lambda a, b: a - quotient(a, b) * b)):
        case = Case(f"{name}.{kind} {{d}}, {{a}}, {{b}};", (kind, kind), kind, truth)
        found = evaluate(case.instruction, [kind, kind], kind, *given)
        assert found.tolist() == case.wanted(given)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_fma_is_the_c_librarys(kind: str) -> None:
    """Also where the product almost cancels the summand, so that one rounding and two differ, and of every size."""
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    function = library.fmaf if kind == "f32" else library.fma
    real = ctypes.c_float if kind == "f32" else ctypes.c_double
    function.restype, function.argtypes = real, [real] * 3
    dtype, draw = ("f4", "u4") if kind == "f32" else ("f8", "u8"), np.random.default_rng(3)
    a, b = (draw.standard_normal(512).astype(dtype[0]) for _ in "ab")
    with np.errstate(all="ignore"):
        c = np.where(
            np.arange(512) % 2 == 0, -(a * b), draw.standard_normal(512).astype(dtype[0]) * a.dtype.type(2**-20)
        )
        twice = a * b + c.astype(dtype[0])
        most = np.finfo(dtype[0]).maxexp
        a, b, c = (np.concatenate([x, np.ldexp(x, draw.integers(-most, most, 512))]) for x in (a, b, c))
    a[-64:], c[-32:] = np.finfo(dtype[0]).max, np.inf  # products that overflow; beside an infinity they do not
    a, b, c = (x.astype(dtype[0]) for x in (a, b, c))
    instruction = f"fma.rn.{kind} {{d}}, {{a}}, {{b}}, {{c}};"
    found = evaluate(instruction, [kind] * 3, kind, *(x.view(dtype[1]) for x in (a, b, c)))
    wanted = np.array([function(*map(float, xyz)) for xyz in zip(a, b, c, strict=True)], dtype[0])
    assert np.array_equal(found, wanted.view(dtype[1]))
    assert (wanted[:512] != twice).any(), "the inputs tell a fused product from a rounded one"


def test_two_float32_in_one_register_are_computed_apart() -> None:
    draw = np.random.default_rng(5)
    a, b, c = (draw.standard_normal((64, 2)).astype(np.float32) for _ in "abc")
    columns64 = [np.ascontiguousarray(x).view(np.uint64)[:, 0] for x in (a, b, c)]
    for name, wanted in (("add", a + b), ("sub", a - b), ("mul", a * b)):
        found = evaluate(f"{name}.rn.f32x2 {{d}}, {{a}}, {{b}};", ["b64", "b64"], "b64", *columns64[:2])
        assert np.array_equal(found.view(np.float32).reshape(-1, 2), wanted), name
    found = evaluate("fma.rn.f32x2 {d}, {a}, {b}, {c};", ["b64"] * 3, "b64", *columns64)
    exact = [[fused(*map(float, xyz), "f32") for xyz in zip(*rows, strict=True)] for rows in zip(a, b, c, strict=True)]
    assert np.array_equal(found.view(np.float32).reshape(-1, 2), np.array(exact, np.float32))


def test_ex2_is_near_and_its_planned_error_is_a_function_of_its_input() -> None:
    x = np.concatenate([np.linspace(-160, 130, 250), [0, -0.0, np.inf, -np.inf, np.nan, 1]]).astype(np.float32)
    found = evaluate("ex2.approx.f32 {d}, {a};", ["f32"], "f32", x.view(np.uint32)).view(np.float32)
    wanted = np.array([math.pow(2.0, v) for v in x.astype(float)])
    with np.errstate(over="ignore"):
        assert np.array_equal(found, wanted.astype(np.float32), equal_nan=True)
    twice = np.tile(x[:128], 2)
    off = evaluate("ex2.approx.f32 {d}, {a};", ["f32"], "f32", twice.view(np.uint32), ex2_ulps=2).view(np.float32)
    assert np.array_equal(off[:128], off[128:])
    distance = np.abs(off[:128].view(np.int32).astype(int) - found[:128].view(np.int32).astype(int))
    assert 0 < distance.max() <= 2


def test_rcp_has_the_upper_half_of_the_reciprocal() -> None:
    given = columns(["f64"], seed=2)[0]
    found = evaluate("rcp.approx.ftz.f64 {d}, {a};", ["f64"], "f64", given)
    assert (found[~np.isnan(found.view(np.float64))] & 0xFFFFFFFF == 0).all()
    x, y = given.view(np.float64), found.view(np.float64)
    plain = np.isfinite(x) & (np.abs(x) > 1e-300) & (np.abs(x) < 1e300)
    assert (np.abs(y[plain] * x[plain] - 1) < 2.0**-18).all()
    assert np.isnan(y[np.isnan(x)]).all()
    assert np.isinf(y[np.abs(x) < 2.0**-1022]).all()


def test_packing_puts_the_first_part_into_the_low_bits() -> None:
    low, high = np.arange(64, dtype=np.uint32), np.arange(64, dtype=np.uint32) * 3 + 1
    packed = evaluate("mov.b64 {d}, {{ {a}, {b} }};", ["b32", "b32"], "b64", low, high)
    assert np.array_equal(packed, low + (high.astype(np.uint64) << np.uint64(32)))
    assert np.array_equal(evaluate("mov.b64 {{ {d}, _ }}, {a};", ["b64"], "b32", packed), low)
    assert np.array_equal(evaluate("mov.b64 {{ _, {d} }}, {a};", ["b64"], "b32", packed), high)
    scoped = "{{ .reg .b32 tmp; mov.b64 {{ tmp, {d} }}, {a}; }}"
    assert np.array_equal(evaluate(scoped, ["b64"], "b32", packed), high)


def test_immediates_are_bit_patterns_and_wrap() -> None:
    a = np.zeros(32, np.uint32)
    assert (evaluate("mov.b32 {d}, 0f3F800000;", ["b32"], "b32", a) == 0x3F800000).all()
    assert (evaluate("add.rn.f32 {d}, {a}, 0f40000000;", ["f32"], "f32", a).view(np.float32) == 2).all()
    assert (evaluate("add.s32 {d}, {a}, -1;", ["s32"], "s32", a) == 0xFFFFFFFF).all()
    assert (evaluate("mov.b16 {d}, -128;", ["b32"], "b16", a) == 0xFF80).all()
    assert (evaluate("mov.b64 {d}, 0d3FF0000000000000;", ["b32"], "b64", a).view(np.float64) == 1).all()


@pytest.mark.parametrize(
    "instruction",
    [
        "sin.approx.f32 {d}, {a};",
        "add.rm.f32 {d}, {a}, {a};",
        "mul.rz.f32 {d}, {a}, {a};",
        "fma.rz.f32 {d}, {a}, {a}, {a};",
        "add.rz.sat.f32 {d}, {a}, {a};",
        "cvt.sat.f16.f32 {d}, {a};",
        "cvt.rzi.sat.s32.f32 {d}, {a};",
        "div.approx.f32 {d}, {a}, {a};",
        "cvt.rn.satfinite.bf16x2.f32 {d}, {a}, {a};",
        "setp.lt.and.f32 {d}, {a}, {a};",
        "atom.global.add.u32 {d}, [%rd0], {a};",
        "cvt.s32.f32 {d}, {a};",
        "bar.sync 1;",
        ".reg .b8 byte;",
        ".reg .b128 wide;",
    ],
)
def test_what_is_unknown_is_refused_and_never_guessed(instruction: str) -> None:
    with pytest.raises(Unsupported):
        evaluate(instruction, ["f32"], "f32", np.zeros(32, np.uint32))
