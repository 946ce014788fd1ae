"""A kernel's instructions as steps: which module knows which instruction, guards, and how a basic block ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from tests.support.kernels.ptx import access, alu, matrix, warp, wgmma
from tests.support.kernels.ptx.parse import Block, Guard, Instruction, Kernel, Symbol, Unsupported, parse
from tests.support.kernels.ptx.unit import LEFT, TYPES, Mask, Reader, Step, Unit, reader

COMPUTES: dict[str, Callable[[Instruction], Step]] = {
    **alu.DECODE, "shfl": warp.shuffle, "redux": warp.reduction, "bar": warp.synchronise, "mma": matrix.multiply,
}  # fmt: skip
ACCESSES: dict[str, Callable[[Instruction, int], Step]] = {
    "ld": access.load, "st": access.store, "cp": access.asynchronous_copy, "ldmatrix": matrix.matrix_access,
    "stmatrix": matrix.matrix_access, "wgmma": wgmma.decode,
}  # fmt: skip
_NOTHING = ("fence",)  # orders what is ordered here anyway; a missing one is not noticed


@dataclass(frozen=True)
class Code:
    """A basic block: its steps, then where its threads go."""

    steps: tuple[Step, ...]
    instructions: Counter[str]  # by the opcode's first part
    next: int  # block behind it; LEFT of `ret`
    branch: int  # block to which the threads go where `taken`
    taken: Reader | None  # predicate of a conditional branch
    negated: bool
    barrier: Instruction | None  # the block ends with this bar.sync


@dataclass(frozen=True)
class Program:
    """A decoded kernel. `granules`: bytes of global and shared memory that are watched as one."""

    kernel: Kernel
    code: tuple[Code, ...]
    granules: dict[str, int]


@lru_cache(maxsize=64)
def program(text: str, without_barrier: int | None = None) -> Program:
    """Decode PTX text; of a mutant, without its bar.sync number so-and-so."""
    kernel = parse(text)
    dropped = None if without_barrier is None else kernel.barriers[without_barrier][0]
    steps = [step for block in kernel.blocks for step in block.instructions]
    first, code = 0, []
    for number, block in enumerate(kernel.blocks):
        code.append(_block(kernel, number, block, first, keep_barrier=number != dropped))
        first += len(block.instructions)
    return Program(kernel, tuple(code), access.granules(steps))


def _block(kernel: Kernel, number: int, block: Block, first: int, *, keep_barrier: bool) -> Code:
    inner, end = block.instructions, None
    if inner and inner[-1].ends_block:
        inner, end = inner[:-1], inner[-1]
    steps = tuple(decode(step, first + i) for i, step in enumerate(inner) if step.name not in _NOTHING)
    following, branch, taken, negated, barrier = number + 1, 0, None, False, None
    if end is None:
        pass
    elif end.opcode in ("bra", "bra.uni") and end.guard is None:
        following = _target(kernel, end)
    elif end.opcode in ("bra", "bra.uni") and end.guard is not None:
        branch, taken, negated = _target(kernel, end), reader(end.guard.register, TYPES["pred"]), end.guard.negated
    elif end.name in ("ret", "exit"):
        following = LEFT
    elif end.is_barrier and _all_threads(end):
        barrier = end if keep_barrier else None
    else:
        raise Unsupported(end.text)
    counted = Counter(step.name for step in block.instructions)
    return Code(steps, counted, following, branch, taken, negated, barrier)


def _all_threads(step: Instruction) -> bool:
    return len(step.operands) == 1 and getattr(step.operands[0], "text", None) == "0"


def _target(kernel: Kernel, step: Instruction) -> int:
    (label,) = step.operands
    if not isinstance(label, Symbol) or label.name not in kernel.labels:
        raise Unsupported(step.text)
    return kernel.labels[label.name]


def decode(step: Instruction, number: int) -> Step:
    """An instruction as a step; `number` is its place in the kernel's text, by which accesses are known."""
    if step.name in COMPUTES:
        plain = COMPUTES[step.name](step)
    elif step.name in ACCESSES:
        plain = ACCESSES[step.name](step, number)
    else:
        raise Unsupported(step.text)
    return plain if step.guard is None else _guarded(plain, step.guard)


def _guarded(plain: Step, guard: Guard) -> Step:
    predicate, negated = reader(guard.register, TYPES["pred"]), guard.negated

    def guarded(unit: Unit, mask: Mask) -> None:
        on = predicate(unit)
        on = ~on if negated else on
        if on.all():
            plain(unit, mask)
            return
        on = unit.whole(on)
        on = on if mask is None else on & mask
        if on.any():
            plain(unit, on)

    return guarded
