"""PTX text -> `Kernel`: registers by number, instructions with decoded operands, basic blocks.

Knows the grammar of what LLVM and Triton emit for one entry point, and no instruction's meaning. A basic block ends at
a branch, at `ret`, at `bar.sync`, and before a label.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

BITS = {"pred": 1, "b16": 16, "b32": 32, "b64": 64}  # of registers


class Unsupported(Exception):
    """The text holds something that the machine does not know."""


@dataclass(frozen=True)
class Register:
    """A register by its number; `bits` is its width, 1 of a predicate."""

    number: int
    bits: int
    name: str


@dataclass(frozen=True)
class Immediate:
    """A number as written: 5, -1, 0x10, 0f3F800000 (the bits of a float32), 0d... (of a float64)."""

    text: str


@dataclass(frozen=True)
class Symbol:
    """A name: a parameter, a label, `global_smem`, or a special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Address:
    """[base + offset]."""

    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True)
class Vector:
    """{a, b, ...}; the placeholder `_` is a Symbol."""

    items: tuple[Register | Immediate | Symbol, ...]

    @property
    def registers(self) -> list[Register]:
        """The items, which must all be registers."""
        found = [item for item in self.items if isinstance(item, Register)]
        if len(found) != len(self.items):
            raise Unsupported(f"a vector of other things than registers: {self}")
        return found


Operand = Register | Immediate | Symbol | Address | Vector


@dataclass(frozen=True)
class Guard:
    """@%p or @!%p in front of an instruction."""

    register: Register
    negated: bool


@dataclass(frozen=True)
class Instruction:
    """`opcode` with all its suffixes, e.g. setp.lt.s32; `line` is that of the source, e.g. commit_triton.py:71."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: str
    text: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The opcode's parts between the dots."""
        return tuple(self.opcode.split("."))

    @property
    def name(self) -> str:
        """The first part of the opcode."""
        return self.opcode.split(".", 1)[0]

    @property
    def ends_block(self) -> bool:
        """Is it a branch, a return or a barrier of the block (known or not)?"""
        return self.name in ("bra", "ret", "exit", "bar", "barrier") and self.opcode != "bar.warp.sync"

    @property
    def is_barrier(self) -> bool:
        """Is it one of the two ways to write a barrier of the block?"""
        return self.opcode in ("bar.sync", "barrier.sync")


@dataclass
class Block:
    """Instructions that run one after another; a branch, `ret` or `bar.sync` can only be the last."""

    label: str | None
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True)
class Kernel:
    """One entry point."""

    name: str
    parameters: tuple[tuple[str, int], ...]  # name and width in bits
    threads: int  # of a block
    registers: tuple[Register, ...]
    blocks: tuple[Block, ...]
    labels: dict[str, int]  # label -> number of its block

    @property
    def barriers(self) -> list[tuple[int, str]]:
        """(block, source line) of each barrier of the block, in the order of the text."""
        ends = ((number, block.instructions[-1]) for number, block in enumerate(self.blocks) if block.instructions)
        return [(number, last.line) for number, last in ends if last.is_barrier]


_ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+\.([usfb]\d+)[^,]*?\b(\w+)\s*(?:,|$)")
_THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)")
_LOCATION = re.compile(r"\s*\.loc\s+\d+\s+(\d+)\s+\d+[^\n]*?(?://([^\n]*))?\n")
_PLACE = re.compile(r"([\w.\-]+):(\d+):\d+")
_COMMENT = re.compile(r"\s*//[^\n]*")
_LABEL = re.compile(r"\s*([$\w]+):(?!:)")
_TARGET = re.compile(r"\bbra(?:\.uni)?\s+([$\w]+)")
_BRACE = re.compile(r"\s*([{}])")
_STATEMENT = re.compile(r"\s*([^;]*?)\s*;", re.DOTALL)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_FAMILY = re.compile(r"([%\w$]+)<(\d+)>$")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_ADDRESS = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]$")
_NUMBER = re.compile(r"-?(?:0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+|\d+)U?$")


def parse(text: str) -> Kernel:
    """The kernel of a module with one entry point."""
    entry = _ENTRY.search(text)
    if entry is None:
        raise Unsupported("the text has no .visible .entry")
    threads = _THREADS.search(entry[3])
    if threads is None:
        raise Unsupported("the entry does not say its number of threads (.reqntid)")
    body = _Body(text, entry.end())
    body.read()
    parameters = tuple((name, int(kind[1:])) for kind, name in _PARAMETER.findall(entry[2]))
    labels = {block.label: number for number, block in enumerate(body.blocks) if block.label is not None}
    return Kernel(entry[1], parameters, int(threads[1]), tuple(body.registers), tuple(body.blocks), labels)


class _Body:
    """Reads an entry's body, from behind its opening brace to the closing one."""

    def __init__(self, text: str, start: int) -> None:
        self.text, self.at = text, start
        self.registers: list[Register] = []
        self.scopes: list[dict[str, Register]] = [{}]
        self.blocks: list[Block] = [Block(None)]
        self.targets = set(_TARGET.findall(text))
        self.line = "?"

    def read(self) -> None:
        """Statement by statement."""
        while self.scopes:
            if found := self._match(_LOCATION):
                places = _PLACE.findall(found[2] or "")
                self.line = ":".join(places[-1]) if places else f"line {found[1]}"  # the outermost of inlined calls
            elif self._match(_COMMENT):
                continue
            elif found := self._match(_BRACE):
                if found[1] == "{":
                    self.scopes.append({})
                else:
                    self.scopes.pop()
            elif found := self._match(_LABEL):
                if found[1] in self.targets:  # others mark places for a debugger
                    self._begin(found[1])
            elif found := self._match(_STATEMENT):
                self._statement(re.sub(r"//[^\n]*", "", found[1]).strip())
            else:
                raise Unsupported(f"cannot read {self.text[self.at : self.at + 80]!r}")

    def _begin(self, label: str) -> None:
        """A block with a label; one that is still empty and has none becomes it."""
        if self.blocks[-1].instructions or self.blocks[-1].label is not None:
            self.blocks.append(Block(None))
        self.blocks[-1].label = label

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def _statement(self, text: str) -> None:
        if declared := _REGISTERS.match(text):
            self._declare(declared[1], declared[2])
        elif text.startswith("."):
            if not text.startswith(".pragma"):
                raise Unsupported(f"directive {text!r}")
        elif text:
            found = _INSTRUCTION.match(text)
            if found is None:
                raise Unsupported(f"cannot read {text!r}")
            self._instruction(text, *found.groups())

    def _declare(self, kind: str, names: str) -> None:
        bits = BITS.get("pred" if kind == "pred" else f"b{kind[1:]}")  # how they are read is up to the instruction
        if bits is None:
            raise Unsupported(f"registers of type {kind}")
        for name in (part.strip() for part in names.split(",")):
            family = _FAMILY.match(name)
            members = [f"{family[1]}{i}" for i in range(int(family[2]))] if family else [name]
            for member in members:
                self.scopes[-1][member] = Register(len(self.registers), bits, member)
                self.registers.append(self.scopes[-1][member])

    def _instruction(self, text: str, negated: str | None, guard: str | None, opcode: str, rest: str) -> None:
        on = None
        if guard is not None:
            on = Guard(self._register(guard), negated == "!")
        operands = tuple(self._operand(part) for part in _split(rest))
        step = Instruction(opcode, operands, on, self.line, " ".join(text.split()))
        if step.ends_block and step.name != "bra" and on is not None:
            raise Unsupported(f"{step.text!r} under a guard")
        self.blocks[-1].instructions.append(step)
        if step.ends_block:
            self.blocks.append(Block(None))

    def _register(self, name: str) -> Register:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise Unsupported(f"register {name} was not declared")

    def _operand(self, text: str) -> Operand:
        if text.startswith("{"):
            items = tuple(self._simple(part) for part in _split(text[1:-1]))
            return Vector(items)
        if text.startswith("["):
            found = _ADDRESS.match(text)
            if found is None:
                raise Unsupported(f"address {text!r}")
            return Address(self._simple(found[1]), int(found[2] or "0", 0))
        return self._simple(text)

    def _simple(self, text: str) -> Register | Immediate | Symbol:
        if _NUMBER.match(text):
            return Immediate(text.rstrip("U"))
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if text.startswith("%") and "." not in text and text[1:] not in ("laneid", "warpid"):
            raise Unsupported(f"register {text} was not declared")
        return Symbol(text)


def _split(text: str) -> list[str]:
    """Operands, split at the commas outside braces; d|p counts as two."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char in "{[") - (char in "}]")
        if char in ",|" and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [part for part in (*parts, text[start:].strip()) if part]
