"""Scores `tiny-sudoku` with two simple decoders: `python -m asrd.lab.sudoku.evaluate FOLDER --n 1000`.

Prints a line of JSON for every decoder; `--save` also writes scores.json beside the weights. `--write-puzzles N` makes
the file of held-out puzzles anew (needs reasoning-gym).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from asrd.lab.compare.report import wilson
from asrd.lab.sudoku.data import as_batch, generated
from asrd.lab.sudoku.puzzle import HELD_OUT, SCORING_FROM, Puzzle, held_out
from asrd.lab.tiny.decode import Score
from asrd.lab.tiny.export import import_weights
from asrd.lab.tiny.language import MASK_ID
from asrd.lab.tiny.model import TinyModel


@torch.no_grad()
def decode(model: TinyModel, puzzles: Sequence[Puzzle], threshold: float | None = None) -> tuple[Tensor, Tensor]:
    """Responses [B, G] and forward passes [B], the whole grid as one block. `threshold` None: one token per pass."""
    cells = [[list(map(int, puzzle.clues)), list(map(int, puzzle.solved))] for puzzle in puzzles]
    batch = as_batch(torch.tensor(cells))
    response = torch.full_like(batch.response, MASK_ID)
    forwards = torch.zeros(len(puzzles), dtype=torch.long)
    while (masked := response == MASK_ID).any():
        logits = model(torch.cat([batch.prompt, response], dim=1), None, last=response.shape[1])
        logits[:, :, MASK_ID] = -torch.inf
        confidence, token = logits.float().softmax(dim=-1).max(dim=-1)
        confidence = confidence.masked_fill(~masked, -1.0)
        best = torch.zeros_like(masked)
        best[torch.arange(len(best)), confidence.argmax(dim=1)] = True
        commit = best & masked if threshold is None else (best | (confidence > threshold)) & masked
        response = torch.where(commit, token, response)
        forwards += masked.any(dim=1)
    return response, forwards


def score(model: TinyModel, puzzles: Sequence[Puzzle], threshold: float | None = None, batch_size: int = 32) -> Score:
    """Share of solved puzzles and mean forward passes."""
    right = forwards = 0
    for start in range(0, len(puzzles), batch_size):
        some = puzzles[start : start + batch_size]
        responses, passes = decode(model, some, threshold)
        right += sum(puzzle.is_right(row.tolist()) for puzzle, row in zip(some, responses, strict=True))
        forwards += int(passes.sum())
    return Score(right / len(puzzles), forwards / len(puzzles), len(puzzles))


def main() -> None:
    about = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m asrd.lab.sudoku.evaluate", description=about)
    parser.add_argument("folder", type=Path, nargs="*", help="exported models")
    parser.add_argument("--n", type=int, default=200, help="held-out puzzles (default %(default)s)")
    parser.add_argument("--decoders", default="standard,0.9,0.8,0.6", help="standard or thresholds")
    parser.add_argument("--save", action="store_true", help="write scores.json into each folder")
    parser.add_argument("--write-puzzles", type=int, metavar="N", help="make the file of held-out puzzles anew")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.write_puzzles:
        lines = (f"{clues} {solution}\n" for clues, solution in generated(SCORING_FROM, given.write_puzzles))
        HELD_OUT.write_text("".join(lines), encoding="utf-8")
    for folder in given.folder:
        model, found = import_weights(folder), {}
        for name in tqdm(given.decoders.split(","), desc=folder.name):
            label = name if name == "standard" else f"threshold {name}"
            found[label] = figures(model, held_out(given.n), name)
            tqdm.write(json.dumps({"model": folder.name, "decoder": label, **found[label]}))
        if given.save:
            (folder / "scores.json").write_text(
                json.dumps({"first_seed": SCORING_FROM, **found}, indent=2) + "\n", encoding="utf-8"
            )


def figures(model: TinyModel, puzzles: Sequence[Puzzle], name: str) -> dict[str, Any]:
    """Scores of one decoder (`standard` or a threshold), with a 95 % interval of the accuracy."""
    result = score(model, puzzles, None if name == "standard" else float(name))
    return asdict(result) | {"interval": wilson(round(result.right * result.problems), result.problems)}


if __name__ == "__main__":
    main()
