"""What a kernel did that it must not do: collected while it runs, one line a fault, so that all are listed."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.support.kernels.ptx.parse import Instruction

_MOST = 20  # of a launch


class KernelFault(AssertionError):
    """The faults of a launch, one line each."""


@dataclass(frozen=True)
class Fault:
    """`kind` in one or two words: out of bounds, misaligned, unwritten, race, programs, barrier, shuffle, division."""

    kind: str
    line: str  # of the Triton source
    text: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.line}: {self.text}"


@dataclass
class Faults:
    """The faults of one launch, each kind once an instruction; `notes` are harmless: equal values stored by several
    warps with no barrier in between."""

    found: list[Fault] = field(default_factory=list)
    notes: list[Fault] = field(default_factory=list)
    _seen: set[tuple[str, int]] = field(default_factory=set)

    def add(self, kind: str, step: Instruction, text: str, *, harmless: bool = False) -> None:
        """Note a fault of an instruction."""
        key = (kind + (" harmless" if harmless else ""), id(step))
        target = self.notes if harmless else self.found
        if key not in self._seen and len(target) < _MOST:
            self._seen.add(key)
            target.append(Fault(kind, step.line, f"{text} ({step.text})"))

    @property
    def kinds(self) -> set[str]:
        """The kinds of all faults."""
        return {fault.kind for fault in self.found}
