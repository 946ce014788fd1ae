"""One batch of decodes against the truth that the task's generator knows.

A token is wrong if no valid solution that shares the earlier wording has it in that place (`task.token_errors`); a
revocation is right if the token it took back was wrong at that moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from asrd.engine.observers.events import EventObserver, StepEvents
from asrd.lab.tiny.language import EOS_ID, MASK_ID
from asrd.lab.tiny.task import Problem, grade, token_errors

LONG_SPAN = 15  # tokens; the paper's


@dataclass
class Verdict:
    """What is known of one decoded problem; counts of tokens unless it says otherwise."""

    right: bool = False  # the final answer
    length: int = 0  # up to and including the first end-of-text
    errors: int = 0  # wrong ones in the result
    long_errors: int = 0  # those in runs of at least LONG_SPAN
    checked_wrong: int = 0  # verified while wrong
    revoked: int = 0
    revoked_wrong: int = 0  # taken back and indeed wrong
    edited: int = 0  # replaced in place
    edited_wrong: int = 0  # replaced while wrong
    anchors: int = 0  # promoted
    anchors_wrong: int = 0  # promoted and wrong in the result


class Judge:
    """Watches a batch of problems being decoded: `fast_generate(observers=[judge.observer])`, then `verdicts`."""

    def __init__(self, problems: Sequence[Problem], early_stop: bool = True) -> None:
        self.problems = problems
        self.observer = EventObserver(MASK_ID, (EOS_ID,) if early_stop else (), self._see)
        self._verdicts = [Verdict() for _ in problems]
        self._promoted: list[set[int]] = [set() for _ in problems]

    def _see(self, events: StepEvents) -> None:
        for row, verdict in enumerate(self._verdicts):
            self._promoted[row] |= set(events.promoted[row].nonzero().flatten().tolist())
            checked = events.checked[row].nonzero().flatten().tolist()
            if not checked:
                continue
            wrong = token_errors(self.problems[row], events.before[row].tolist())
            revoked, edited = events.revoked[row].tolist(), events.replaced[row].tolist()
            verdict.checked_wrong += sum(wrong[p] for p in checked)
            verdict.revoked += sum(revoked)
            verdict.revoked_wrong += sum(wrong[p] for p in checked if revoked[p])
            verdict.edited += sum(edited[p] for p in checked)
            verdict.edited_wrong += sum(wrong[p] for p in checked if edited[p])

    def verdicts(self, responses: Tensor) -> list[Verdict]:
        """The verdicts on the finished responses [B, G]."""
        for verdict, problem, promoted, tokens in zip(
            self._verdicts, self.problems, self._promoted, responses.tolist(), strict=True
        ):
            wrong = token_errors(problem, tokens)
            verdict.right = grade(problem, tokens)
            verdict.length = tokens.index(EOS_ID) + 1 if EOS_ID in tokens else len(tokens)
            verdict.errors = sum(wrong[: verdict.length])
            verdict.long_errors = long_errors(wrong[: verdict.length])
            verdict.anchors = len(promoted)
            verdict.anchors_wrong = sum(wrong[p] for p in promoted)
        return self._verdicts


def long_errors(wrong: Sequence[bool], at_least: int = LONG_SPAN) -> int:
    """How many of the wrong tokens belong to an unbroken run of at least so many."""
    total = run = 0
    for is_wrong in [*wrong, False]:
        if is_wrong:
            run += 1
            continue
        total += run if run >= at_least else 0
        run = 0
    return total
