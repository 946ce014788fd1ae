"""Training data: reasoning-gym's puzzles, each shown under another symmetry of Sudoku every time, with masks.

A symmetry renames the digits, reorders the rows within bands and the bands, likewise the columns, and may transpose.
It keeps a puzzle's solution unique, so a few thousand puzzles are enough.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from asrd.lab.sudoku.puzzle import CELLS, ID, SIDE
from asrd.lab.tiny.language import ASSISTANT, EOS_ID, MASK_ID, USER

ROW = SIDE + 1  # a row's cells and its line break
LENGTH = SIDE * ROW  # of a response; the last line break is the end of text
P_ALL = 0.3  # share of the samples in which clues and line breaks may be masked, too
SMALLEST_RATIO = 0.05


@dataclass(frozen=True)
class Batch:
    """Puzzles as tensors: all prompts have the same length."""

    prompt: Tensor  # [B, P]
    response: Tensor  # [B, G]
    blank: Tensor  # [B, G] bool: a cell that is not a clue


def generated(first_seed: int, count: int) -> Iterator[tuple[str, str]]:
    """Clues and solutions of reasoning-gym's puzzles, 30 to 50 blanks (its defaults), 81 digits each."""
    for entry in dataset(first_seed, count) if count else ():
        made = entry["metadata"]
        yield _digits(made["puzzle"]), _digits(made["solution"])


def dataset(first_seed: int, count: int) -> Any:
    """The task "sudoku" of reasoning-gym: puzzle n has the seed first_seed + n."""
    return importlib.import_module("reasoning_gym").create_dataset("sudoku", seed=first_seed, size=count)


def _digits(board: list[list[int]]) -> str:
    return "".join(str(cell) for row in board for cell in row)


def load_or_generate(path: Path, count: int) -> Tensor:
    """[count, 2, 81] int64, clues and solutions, from the file; those that it lacks are made and added to it."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if lines and len(lines[-1]) < 2 * CELLS + 1:  # cut short by an interruption
        lines.pop()
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        for clues, solution in generated(len(lines), max(count - len(lines), 0)):
            file.write(f"{clues} {solution}\n")
    lines = path.read_text(encoding="utf-8").splitlines()[:count]
    return torch.tensor([[list(map(int, cells)) for cells in line.split()] for line in lines])


def symmetry(rng: Generator) -> tuple[Tensor, Tensor]:
    """A random order of the cells [81] and new names of the digits [10]; blanks stay blanks."""
    order = _lines(rng)[:, None] * SIDE + _lines(rng)
    if torch.rand((), generator=rng) < 0.5:
        order = order.T
    return order.flatten(), torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(SIDE, generator=rng)])


def _lines(rng: Generator) -> Tensor:
    """An order of the nine rows or columns that keeps bands together."""
    bands = torch.randperm(3, generator=rng)
    return torch.cat([3 * band + torch.randperm(3, generator=rng) for band in bands])


def draw_batch(puzzles: Tensor, size: int, rng: Generator) -> Batch:
    """Puzzles drawn at random, each under a symmetry of its own."""
    chosen = puzzles[torch.randint(len(puzzles), (size,), generator=rng)]
    shown = []
    for puzzle in chosen:
        order, names = symmetry(rng)
        shown.append(names[puzzle[:, order]])
    return as_batch(torch.stack(shown))


def as_batch(puzzles: Tensor) -> Batch:
    """[B, 2, 81] as prompts and responses."""
    count = len(puzzles)
    clues, solution = (_tokens(puzzles[:, which]) for which in (0, 1))
    ends = [torch.full((count, 1), ID[word]) for word in (USER, ASSISTANT)]
    blank = torch.zeros(count, SIDE, ROW, dtype=torch.bool)
    blank[:, :, :SIDE] = (puzzles[:, 0] == 0).view(count, SIDE, SIDE)
    solution[:, -1] = EOS_ID
    return Batch(torch.cat([ends[0], clues[:, :-1], ends[1]], dim=1), solution, blank.view(count, LENGTH))


def _tokens(cells: Tensor) -> Tensor:
    """[B, 81] digits as token ids [B, 90]: a line break behind every row."""
    found = torch.full((len(cells), SIDE, ROW), ID["\n"])
    found[:, :, :SIDE] = torch.where(cells == 0, ID["_"], cells + (ID["1"] - 1)).view(-1, SIDE, SIDE)
    return found.view(len(cells), LENGTH)


def draw_masks(batch: Batch, rng: Generator) -> Tensor:
    """[B, G] the response with masks: a share t of the blanks, t stratified over the batch, at least one; in some of
    the samples likewise of clues and line breaks, as at the start of a decode."""
    b, g = batch.response.shape
    ratio = ((torch.randperm(b, generator=rng) + torch.rand(b, generator=rng)) / b)[:, None].clamp_min(SMALLEST_RATIO)
    score = torch.rand(b, g, generator=rng)
    everything = torch.rand(b, 1, generator=rng) < P_ALL
    masked = (score < ratio) & (batch.blank | everything)
    masked[torch.arange(b), score.masked_fill(~batch.blank, 2.0).argmin(dim=1)] = True
    return batch.response.masked_fill(masked, MASK_ID)
