"""A kernel's instructions as steps: which module knows which instruction, guards, and how a basic block ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.kernels.ptx import access, alu, matrix, warp, wgmma
from benchmarks.kernels.ptx.parse import Block, Guard, Instruction, Kernel, Symbol, Unsupported, parse
from benchmarks.kernels.ptx.unit import LEFT, TYPES, Mask, Reader, Step, Unit, reader

NUMBERED: dict[str, Callable[[Instruction, int], Step]] = {
    "ld": access.load, "st": access.store, "cp": access.asynchronous_copy, "shfl": warp.shuffle,
    "redux": warp.reduction, "ldmatrix": matrix.matrix_access, "stmatrix": matrix.matrix_access,
    "mma": matrix.multiply, "wgmma": wgmma.decode,
}  # fmt: skip
_NOTHING = ("fence",)  # orders what is ordered here anyway


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
    instructions, last = block.instructions, block.instructions[-1] if block.instructions else None
    following, branch, taken, negated, barrier = number + 1, 0, None, False, None
    if last is not None and last.name in ("bra", "ret", "exit", "bar"):
        if last.opcode in ("bra", "bra.uni"):
            branch = _target(kernel, last)
            if last.guard is not None:
                taken, negated = reader(last.guard.register, TYPES["pred"]), last.guard.negated
            else:
                following = branch
        elif last.name in ("ret", "exit"):
            following = LEFT
        elif last.opcode in ("bar.sync", "barrier.sync") and _all_threads(last):
            barrier = last if keep_barrier else None
        elif last.opcode != "bar.warp.sync":
            raise Unsupported(last.text)
    ended = last is not None and last.name in ("bra", "ret", "exit", "bar") and last.opcode != "bar.warp.sync"
    inner = instructions[:-1] if ended else instructions
    steps = tuple(decode(step, first + i) for i, step in enumerate(inner) if step.name not in _NOTHING)
    return Code(steps, Counter(step.name for step in instructions), following, branch, taken, negated, barrier)


def _all_threads(step: Instruction) -> bool:
    return len(step.operands) == 1 and getattr(step.operands[0], "text", None) == "0"


def _target(kernel: Kernel, step: Instruction) -> int:
    (label,) = step.operands
    if not isinstance(label, Symbol) or label.name not in kernel.labels:
        raise Unsupported(step.text)
    return kernel.labels[label.name]


def decode(step: Instruction, number: int) -> Step:
    """An instruction as a step; `number` is its place in the kernel's text."""
    if step.opcode == "bar.warp.sync":
        plain = warp.synchronise(step, number)
    elif step.name in alu.DECODE:
        plain = alu.DECODE[step.name](step)
    elif step.name in NUMBERED:
        plain = NUMBERED[step.name](step, number)
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
