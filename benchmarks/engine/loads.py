"""The requests: questions of the packaged task, cut to a length, and how many tokens each may have as an answer."""

from __future__ import annotations

import random
from dataclasses import dataclass

from asrd.lab.tiny.batch import prompt_ids
from asrd.lab.tiny.task import held_out

PROMPTS, ANSWERS = (16, 64), (16, 96)  # tokens, from and to
UNIFORM = (40, 64)


@dataclass(frozen=True)
class Asked:
    """One request."""

    prompt: list[int]
    length: int


def load(kind: str, count: int, seed: int = 0) -> list[Asked]:
    """`count` requests: "mixed" has lengths drawn evenly from the ranges above, "uniform" one length."""
    rng = random.Random(f"{kind} {seed}")
    asked = []
    for problem in held_out(count):
        width, length = UNIFORM if kind == "uniform" else (rng.randint(*PROMPTS), rng.randint(*ANSWERS))
        question = prompt_ids(problem)
        asked.append(Asked((question * (1 + width // len(question)))[-width:], length))
    return asked
