"""Sudoku puzzles in the text of reasoning-gym's task "sudoku": prompt, response and grade.

    2 8 _ 1 9 _ _ 5 7          2 8 4 1 9 3 6 5 7
    _ 1 _ 8 _ 6 3 _ 4    ->    9 1 7 8 5 6 3 2 4
    ...                        ...

A response is the whole grid, clues included: 81 digits, 8 line breaks and the end of text, decoded as one block, since
no order of the cells is the right one. A puzzle has one solution, so every token of a response is right or wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from asrd.lab.tiny.language import EOS, SPECIAL

SIDE, CELLS = 9, 81
BLANK, LINE = "_", "\n"
VOCABULARY = (*SPECIAL, LINE, BLANK, *map(str, range(1, SIDE + 1)))  # a word's place is its token id
ID = {word: index for index, word in enumerate(VOCABULARY)}
LEVEL = "9x9"
SCORING_FROM = 10_000_000  # reasoning-gym seeds of the held-out puzzles; training uses seeds from 0
HELD_OUT = Path(__file__).parent / "held_out.txt"
COUNT = 1064  # held-out puzzles: a thousand for scores, 64 for learning curves


@dataclass(frozen=True)
class Puzzle:
    """clues and solved: 81 digits, row by row; 0 is a blank."""

    seed: int
    clues: str
    solved: str
    level: str = LEVEL

    @property
    def question(self) -> str:
        """The grid with blanks, in reasoning-gym's form."""
        return grid(self.clues)

    @property
    def solution(self) -> str:
        """The solved grid."""
        return grid(self.solved)

    @property
    def answer(self) -> str:
        """The solved grid, on lines of its own."""
        return LINE + self.solution

    @property
    def response(self) -> tuple[str, ...]:
        """The words of the solved grid and the end of text."""
        return (*words(self.solved), EOS)

    @property
    def response_length(self) -> int:
        """Tokens to generate."""
        return len(self.response)

    @property
    def block_length(self) -> int:
        """One block: any cell may come first."""
        return self.response_length

    @property
    def question_ids(self) -> list[int]:
        return [ID[word] for word in words(self.clues)]

    @property
    def response_ids(self) -> list[int]:
        return [ID[word] for word in self.response]

    @property
    def free(self) -> list[bool]:
        """Nowhere are several words right."""
        return [False] * self.response_length

    def is_right(self, response: str | Sequence[int]) -> bool:
        """Whether the response (text or token ids, without the prompt) is the solved grid, which reasoning-gym scores
        1.0; spaces around lines do not matter."""
        if not isinstance(response, str):
            response = as_text(response)
        return LINE.join(" ".join(line.split()) for line in response.split(LINE)) == self.solution

    def wrong_tokens(self, response: Sequence[int]) -> list[bool]:
        """For each token id of the response: True if the solution has another one there."""
        return [int(token) != right for token, right in zip(response, self.response_ids, strict=True)]


def grid(cells: str) -> str:
    """81 digits as nine lines; blanks are underscores."""
    rows = (cells[start : start + SIDE] for start in range(0, CELLS, SIDE))
    return LINE.join(" ".join(BLANK if cell == "0" else cell for cell in row) for row in rows)


def words(cells: str) -> list[str]:
    """81 digits as the words of the grid: cells, and a line break between rows."""
    return [word for line in grid(cells).split(LINE) for word in (*line.split(), LINE)][:-1]


def as_text(tokens: Sequence[int]) -> str:
    """Token ids up to the end of text as reasoning-gym's text."""
    found = [VOCABULARY[int(token)] for token in tokens]
    found = found[: found.index(EOS)] if EOS in found else found
    return " ".join(found).replace(f" {LINE} ", LINE)


@cache
def _puzzles() -> tuple[Puzzle, ...]:
    lines = HELD_OUT.read_text(encoding="utf-8").splitlines()
    return tuple(Puzzle(SCORING_FROM + n, *line.split()) for n, line in enumerate(lines))


def held_out(count: int, level: str = LEVEL, first: int = 0) -> list[Puzzle]:
    """`count` of the puzzles on which decoders and models are scored, from number `first` on."""
    if level != LEVEL:
        raise ValueError(f"level={level!r}: Sudoku has one level, {LEVEL!r}")
    found = _puzzles()
    if first + count > len(found):
        raise ValueError(f"puzzles {first} to {first + count - 1}: there are {len(found)} held-out puzzles")
    return list(found[first : first + count])
