"""The packaged word problems as a task of lm-eval, so that `tiny` runs behind the same pipeline as an 8B model."""

from __future__ import annotations

import itertools
from typing import Any

from asrd.lab.tiny.task import LEVELS, SCORING_FROM, generate, grade, problems

PROBLEMS = 1000  # of the held-out ones, from the first on


def config_of(level: str = "hard", number: int = PROBLEMS) -> dict[str, Any]:
    """The task's configuration: so many of the held-out problems that `asrd compare` uses, in its order."""
    if level not in LEVELS:
        raise ValueError(f"level={level!r}: expected one of {', '.join(LEVELS)}")
    length = generate(0, level).response_length
    return {
        "task": "packaged",
        "dataset_path": "asrd",
        "custom_dataset": lambda **_: _dataset(level, number),
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "process_results": lambda document, results: {"exact_match": _is_right(document, results[0])},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "generation_kwargs": {"until": [], "max_gen_toks": length, "do_sample": False},
        "num_fewshot": 0,
        "metadata": {"version": 1.0},
    }


def _dataset(level: str, number: int) -> Any:
    from datasets import Dataset, DatasetDict

    found = itertools.islice(problems("test", level, SCORING_FROM), number)
    rows = [{"seed": p.seed, "level": level, "question": p.question, "answer": str(p.answer)} for p in found]
    return DatasetDict({"test": Dataset.from_list(rows)})


def _is_right(document: dict[str, Any], response: str) -> float:
    return float(grade(generate(document["seed"], document["level"]), response))
