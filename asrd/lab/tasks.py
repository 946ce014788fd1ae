"""The packaged tasks, and which of them a model was trained on: its tokenizer tells."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from asrd.lab.sudoku import puzzle as sudoku
from asrd.lab.tiny import task as words
from asrd.lab.tiny.language import ID as WORD_IDS

Problem = words.Problem | sudoku.Puzzle


@dataclass(frozen=True)
class Task:
    """A task: its levels, the last being the usual one, and its problems.

    held_out(count, level, first): those on which models and decoders are scored; shown(level, seed): those of a demo.
    """

    name: str
    ids: dict[str, int]  # of the words of its tokenizer
    levels: tuple[str, ...]
    held_out: Callable[[int, str, int], Sequence[Problem]]
    shown: Callable[[str, int], Any]

    def level(self, wanted: str | None) -> str:
        """The level, the usual one if none is given."""
        if wanted is not None and wanted not in self.levels:
            levels = " or ".join(self.levels)
            raise ValueError(f"--level {wanted}: expected {levels}, the levels of the task of this model")
        return self.levels[-1] if wanted is None else wanted


def _some_words(level: str, seed: int) -> Any:
    return words.problems("test", level, 100_000 * seed)


def _some_puzzles(level: str, seed: int) -> Any:
    every = sudoku.held_out(sudoku.COUNT, level)
    return itertools.islice(itertools.cycle(every), seed, None)


TASKS = (
    Task("word problems", dict(WORD_IDS), tuple(words.LEVELS), words.held_out, _some_words),
    Task("Sudoku", dict(sudoku.ID), (sudoku.LEVEL,), sudoku.held_out, _some_puzzles),
)
LEVELS = tuple(level for task in TASKS for level in task.levels)


def find_task(tokenizer: Any) -> Task | None:
    """The packaged task of a tokenizer; None if it is of another model."""
    vocabulary = tokenizer.get_vocab() if tokenizer is not None else None
    return next((task for task in TASKS if task.ids == vocabulary), None)


def length_and_blocks(problem: Problem, model: Any) -> dict[str, Any]:
    """Settings for decoding a problem; a block-diffusion model has blocks of its own."""
    blocks = {"block_length": problem.block_length} if getattr(model.config, "asrd_block_length", None) is None else {}
    return {"max_new_tokens": problem.response_length} | blocks
