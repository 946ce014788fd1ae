"""Scores exported models with the two plain decoders: `python -m asrd.tiny.evaluate FOLDER --n 1000`.

Held-out problems of one level that no point of a learning curve used. A line of JSON for every decoder.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from asrd.tiny.decode import score
from asrd.tiny.export import import_weights
from asrd.tiny.task import LEVELS, Problem, problems
from asrd.tiny.visible import visible_behaviour

FIRST_SEED = 10_000_000  # far from the seeds of training and of its curve


def held_out(count: int, level: str = "hard") -> list[Problem]:
    return list(itertools.islice(problems("test", level, FIRST_SEED), count))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m asrd.tiny.evaluate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="+", help="exported models")
    parser.add_argument("--n", type=int, default=200, help="held-out problems (default %(default)s)")
    parser.add_argument("--level", choices=list(LEVELS), default="hard")
    parser.add_argument("--decoders", default="visible,standard,0.9,0.8,0.6", help="visible, standard or thresholds")
    given = parser.parse_args()
    torch.set_num_threads(1)
    some = held_out(given.n, given.level)
    for folder, name in tqdm(list(itertools.product(given.folder, given.decoders.split(",")))):
        model = import_weights(folder)
        if name == "visible":
            figures = asdict(visible_behaviour(model, some[:256]))
        else:
            figures = asdict(score(model, some, None if name == "standard" else float(name)))
        tqdm.write(json.dumps({"model": folder.name, "level": given.level, "decoder": name, **figures}))


if __name__ == "__main__":
    main()
