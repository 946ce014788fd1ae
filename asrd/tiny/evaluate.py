"""Scores exported models with the two plain decoders: `python -m asrd.tiny.evaluate FOLDER --n 1000`.

Held-out problems of one level that no point of a learning curve used. A line of JSON for every decoder; `--save`
puts them into scores.json beside the weights, where the tests look up how good a packaged model is said to be.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from asrd.compare.report import wilson
from asrd.tiny.decode import score
from asrd.tiny.export import import_weights
from asrd.tiny.model import TinyModel
from asrd.tiny.task import LEVELS, SCORING_FROM, Problem, held_out
from asrd.tiny.visible import visible_behaviour


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m asrd.tiny.evaluate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="+", help="exported models")
    parser.add_argument("--n", type=int, default=200, help="held-out problems (default %(default)s)")
    parser.add_argument("--level", choices=list(LEVELS), default="hard")
    parser.add_argument("--decoders", default="visible,standard,0.9,0.8,0.6", help="visible, standard or thresholds")
    parser.add_argument("--save", action="store_true", help="write scores.json into each folder")
    given = parser.parse_args()
    torch.set_num_threads(1)
    some = held_out(given.n, given.level)
    for folder in given.folder:
        scores: dict[str, Any] = {"level": given.level, "first_seed": SCORING_FROM}
        for name in tqdm(given.decoders.split(","), desc=folder.name):
            label = name if name in ("visible", "standard") else f"threshold {name}"
            scores[label] = figures(import_weights(folder), some, name)
            tqdm.write(json.dumps({"model": folder.name, "decoder": label, **scores[label]}))
        if given.save:
            (folder / "scores.json").write_text(json.dumps(scores, indent=2) + "\n")


def figures(model: TinyModel, some: list[Problem], name: str) -> dict[str, Any]:
    """Of one decoder (`standard` or a threshold), with a 95 % interval of the share of right answers."""
    if name == "visible":
        return asdict(visible_behaviour(model, some[:256]))
    result = score(model, some, None if name == "standard" else float(name))
    return asdict(result) | {"interval": wilson(round(result.right * result.problems), result.problems)}


if __name__ == "__main__":
    main()
