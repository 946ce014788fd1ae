"""Proof of the scoring: a model that "generates" the published solutions must be right on every problem.

`check_scoring` runs a task three times without any model: with the published solutions, with plainly wrong answers, and
with every third answer wrong. Prompts, stop strings, extraction, execution and metrics are those of a real run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asrd.engine.stopping import text_before
from asrd.eval.code_metric import Executor
from asrd.eval.generations import Generations
from asrd.eval.run import Cell, Scored, run_cell
from asrd.eval.sandbox import Limits
from asrd.eval.tasks import Loaded
from asrd.lab.compare.plan import RunSpec
from asrd.lab.tiny.task import generate

Document = dict[str, Any]
NQ_STOPS = ("\n", ".", ",")  # of lm-eval's nq_open: no answer with a full stop or comma can be given


def _gsm8k_cot(document: Document) -> str:
    steps, _, answer = document["answer"].partition("####")
    return f" {steps.strip()} The answer is {answer.strip()}."


def _math(document: Document) -> str:
    """The solution, and its boxed answer once more in the form of the few-shot examples."""
    from lm_eval.tasks.minerva_math.utils import last_boxed_only_string, remove_boxed

    final = remove_boxed(last_boxed_only_string(document["solution"]))
    return f" {document['solution']}\nFinal Answer: The final answer is ${final}$. I hope it is correct."


def _nq_open(document: Document) -> str:
    """The first accepted answer that lm-eval's stop strings do not cut, else the first."""
    whole = [answer for answer in document["answer"] if text_before(answer, NQ_STOPS) == answer]
    return f" {(whole or document['answer'])[0]}"


SOLUTIONS: dict[str, Callable[[Document], str]] = {  # in the form that the task's prompt asks for
    "gsm8k": lambda d: f" {d['answer']}",
    "gsm8k_cot": _gsm8k_cot,
    "gsm8k_cot_zeroshot": _gsm8k_cot,
    "minerva_math500": _math,
    "humaneval": lambda d: d["canonical_solution"],
    "humaneval_instruct": lambda d: f"{d['canonical_solution']}\n```",
    "mbpp": lambda d: f"{d['code']}\n[DONE]",
    "mbpp_instruct": lambda d: f"{d['code']}\n```",
    "nq_open": _nq_open,
    "cnn_dailymail": lambda d: d["highlights"],
    "packaged": lambda d: generate(d["seed"], d["level"]).solution,
}
NAMES = ("task_id", "unique_id", "seed")  # fields that name a problem


def wrong_answer(task: str, document: Document) -> str:
    """Plainly wrong, in the same form."""
    if task.startswith("gsm8k"):
        number = re.sub(r"[^0-9-]", "", document["answer"].split("####")[-1])
        return f" The answer is {int(number) + 1}.\n#### {int(number) + 1}"
    if task == "minerva_math500":
        return " Final Answer: The final answer is $\\text{a green elephant}$. I hope it is correct."
    if task.startswith(("humaneval", "mbpp")):
        return (
            "    raise NotImplementedError\n```" if task.startswith("humaneval") else "raise NotImplementedError\n```"
        )
    return "the answer is nobody at all"


@dataclass(frozen=True)
class ScoringCheck:
    """How a task's scoring judges answers that are known."""

    task: str
    n: int
    right: float  # score of the published solutions
    wrong: float  # of wrong answers
    mixed: float  # of every third wrong
    expected: float  # of the mixture, from the two runs before
    failing: dict[str, str]  # published solutions that are not judged right, with the reason


def check_scoring(loaded: Loaded, limit: int | None = None, limits: Limits | None = None) -> ScoringCheck:
    """Judge the published solutions of a task."""
    if loaded.name not in SOLUTIONS:
        raise ValueError(f"--tasks {loaded.name}: its published solutions are known for {', '.join(SOLUTIONS)} only")

    executor = Executor(limits=limits) if loaded.code and limits is not None else None

    def run(answer: Callable[[int, Document], str]) -> Scored:
        cell = Cell(loaded.name, RunSpec("standard"))
        return run_cell(lambda **_: replay_model(answer), loaded, cell, None, limit, executor)

    def is_wrong(number: int) -> bool:
        return number % 3 == 2

    solution = SOLUTIONS[loaded.name]
    right = run(lambda _, document: solution(document))
    wrong = run(lambda _, document: wrong_answer(loaded.name, document))
    mixed = run(lambda n, d: wrong_answer(loaded.name, d) if is_wrong(n) else solution(d))
    documents = loaded.task.eval_docs
    failing = {
        _name(documents[record["document"]], record["document"]): record["reason"]
        or f"extracted {record['extracted']!r}"
        for record in right.records
        if record["score"] < 1
    }
    pairs = zip(right.records, wrong.records, strict=True)
    expected = [(w if is_wrong(r["document"]) else r)["score"] for r, w in pairs]
    n = len(right.records)
    return ScoringCheck(
        loaded.name, n, _mean(right), _mean(wrong), _mean(mixed), sum(expected) / n, failing
    )  # fmt: skip


def _mean(scored: Scored) -> float:
    return sum(record["score"] for record in scored.records) / len(scored.records)


def _name(document: Document, number: int) -> str:
    return next((str(document[name]) for name in NAMES if name in document), f"number {number}")


def replay_model(answer: Callable[[int, Document], str]) -> Any:
    """A model of lm-eval that gives these answers, cut at the task's stop strings as a generated text is."""
    from lm_eval.api.model import LM

    class Replay(LM):
        generations = Generations(None)

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            return [text_before(answer(r.doc_id, r.doc), r.args[1].get("until") or []) for r in requests]

        def loglikelihood(self, requests: Any) -> Any:
            raise NotImplementedError("a replay has no likelihoods")

        loglikelihood_rolling = loglikelihood

    return Replay()
