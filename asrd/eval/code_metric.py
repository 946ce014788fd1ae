"""pass@k of generated programs, executed in the sandbox, in the place of the metric `code_eval` that lm-eval's code
tasks load from the Hub when they are imported.

The stock tasks stay as they are, prompts and few-shot examples included, but for the extraction of mbpp_instruct:
`in_place_of_the_hub` answers their `evaluate.load("code_eval")` with `CODE_EVAL`, which hands the programs to the
`Executor` of the running evaluation.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

from asrd.eval.generations import Generations
from asrd.eval.sandbox import Limits, Outcome, run_program

STOCK = ("lm_eval.tasks.humaneval.utils", "lm_eval.tasks.mbpp.utils")


class Executor:
    """Runs programs, each once; outcomes are kept in a file (None: in memory only)."""

    def __init__(self, path: Path | None = None, limits: Limits = Limits()) -> None:
        self.outcomes, self.limits = Generations(path), limits

    def run(self, candidate: str, test: str) -> Outcome:
        """A candidate followed by its test."""
        program = f"{candidate}\n{test}"
        key = hashlib.sha256(f"{self.limits}{program}".encode()).hexdigest()
        if key not in self.outcomes:
            self.outcomes.add({"key": key, **asdict(run_program(program, self.limits))})
        found = self.outcomes[key]
        return Outcome(found["passed"], found["reason"], tuple(found["protections"]))


_executor: ContextVar[Executor | None] = ContextVar("executor", default=None)


@contextmanager
def executing(executor: Executor) -> Iterator[None]:
    """Code tasks that are scored inside run their programs with this executor."""
    before = _executor.set(executor)
    try:
        yield
    finally:
        _executor.reset(before)


class CodeEval:
    """The interface of the Hub's `code_eval`, as far as lm-eval uses it."""

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,)
    ) -> tuple[dict[str, float], dict[int, list[Outcome]]]:
        """pass@k over the problems, and the outcomes of each problem's candidates."""
        executor = _executor.get()
        if executor is None:
            raise ValueError("generated programs are executed with --allow-code-execution only")
        ran = {
            number: [executor.run(candidate, test) for candidate in candidates]
            for number, (test, candidates) in enumerate(zip(references, predictions, strict=True))
        }
        counts = [(len(found), sum(outcome.passed for outcome in found)) for found in ran.values()]
        return {f"pass@{j}": sum(pass_at(n, c, j) for n, c in counts) / len(counts) for j in k}, ran


CODE_EVAL = CodeEval()


def pass_at(n: int, correct: int, k: int) -> float:
    """The probability that one of k candidates, drawn from n of which so many are correct, is correct."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def extract_program(text: str) -> str:
    """The program in an answer that continues an opened ```python block: the first whole block that the answer opens
    itself, else everything before the first fence.

    lm-eval's own expression for mbpp_instruct takes the `def` with which such an answer begins for the language of the
    block, and fails the answer.
    """
    opened = re.search(r"```(?:python|py)\s*\n(.*?)(?:```|\Z)", text, re.DOTALL)
    return opened[1] if opened else text.split("```")[0]


def extract_programs(responses: Sequence[Sequence[str]], documents: Any) -> list[list[str]]:
    """As a filter of lm-eval: the programs of each document's answers."""
    return [[extract_program(text) for text in texts] for texts in responses]


@contextmanager
def in_place_of_the_hub() -> Iterator[None]:
    """Tasks that are loaded inside get `CODE_EVAL`; any other metric is loaded as ever."""
    import evaluate

    stock = evaluate.load

    def answer(name: str, *rest: Any, **options: Any) -> Any:
        return CODE_EVAL if name == "code_eval" else stock(name, *rest, **options)

    for module in STOCK:
        sys.modules.pop(module, None)  # it may hold a metric of its own
    with patch.object(evaluate, "load", answer), executing(_Trial()):
        yield


class _Trial(Executor):
    """Answers the trial run of the stock modules, which they make when they are imported."""

    def run(self, candidate: str, test: str) -> Outcome:
        return Outcome(False, "not run")
