"""Grades a batch of decodes against the solutions that the task's generator knows.

A token is wrong if no valid solution with the same earlier wording has it at that position (`Problem.wrong_tokens`); a
revocation is right if the revoked token was wrong at that step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from asrd.engine.observers.events import EventObserver, StepEvents
from asrd.engine.observers.flip_flops import FlipFlops
from asrd.lab.tasks import Problem
from asrd.lab.tiny.language import EOS_ID, MASK_ID

LONG_SPAN = 15  # tokens; the paper's


@dataclass
class Grade:
    """The grade of one decoded problem: counts of tokens, and whether the final answer is right."""

    right: bool = False  # the final answer
    length: int = 0  # up to and including the first end-of-text
    errors: int = 0  # wrong tokens in the result
    long_errors: int = 0  # wrong tokens in runs of at least LONG_SPAN
    checked_wrong: int = 0  # verified while wrong
    revoked: int = 0
    revoked_wrong: int = 0  # revoked while wrong
    edited: int = 0  # replaced in place
    edited_wrong: int = 0  # replaced in place while wrong
    anchors: int = 0  # promoted
    anchors_wrong: int = 0  # promoted and wrong in the result
    flip_flops: int = 0  # revoked, and the next draft there is the same token


class Grader:
    """Observes the decode of a batch of problems, `fast_generate(observers=[grader.observer])`; then `grades`."""

    def __init__(self, problems: Sequence[Problem], early_stop: bool = True) -> None:
        self.problems = problems
        self.observer = EventObserver(MASK_ID, (EOS_ID,) if early_stop else (), self._observe)
        self._grades = [Grade() for _ in problems]
        self._promoted: list[set[int]] = [set() for _ in problems]
        self._flip_flops = [FlipFlops(row) for row in range(len(problems))]

    def _observe(self, events: StepEvents) -> None:
        for row, found in enumerate(self._grades):
            self._flip_flops[row].see(events)
            found.flip_flops = self._flip_flops[row].count
            self._promoted[row] |= set(events.promoted[row].nonzero().flatten().tolist())
            checked = events.checked[row].nonzero().flatten().tolist()
            if not checked:
                continue
            wrong = self.problems[row].wrong_tokens(events.before[row].tolist())
            revoked, edited = events.revoked[row].tolist(), events.replaced[row].tolist()
            found.checked_wrong += sum(wrong[p] for p in checked)
            found.revoked += sum(revoked)
            found.revoked_wrong += sum(wrong[p] for p in checked if revoked[p])
            found.edited += sum(edited[p] for p in checked)
            found.edited_wrong += sum(wrong[p] for p in checked if edited[p])

    def grades(self, responses: Tensor) -> list[Grade]:
        """The grades of the finished responses [B, G]."""
        for found, problem, promoted, tokens in zip(
            self._grades, self.problems, self._promoted, responses.tolist(), strict=True
        ):
            wrong = problem.wrong_tokens(tokens)
            found.right = problem.is_right(tokens)
            found.length = tokens.index(EOS_ID) + 1 if EOS_ID in tokens else len(tokens)
            found.errors = sum(wrong[: found.length])
            found.long_errors = long_errors(wrong[: found.length])
            found.anchors = len(promoted)
            found.anchors_wrong = sum(wrong[p] for p in promoted if p < len(wrong))
        return self._grades


def long_errors(wrong: Sequence[bool], at_least: int = LONG_SPAN) -> int:
    """How many of the wrong tokens are in an unbroken run of wrong tokens of at least that length."""
    total = run = 0
    for is_wrong in [*wrong, False]:
        if is_wrong:
            run += 1
            continue
        total += run if run >= at_least else 0
        run = 0
    return total
