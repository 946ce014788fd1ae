"""Scores exported models with the two simple decoders: `python -m asrd.lab.tiny.evaluate FOLDER --n 1000`.

The problems are held out and were not used by a learning curve. Prints a line of JSON for every decoder; `--save` also
writes scores.json beside the weights, which the tests compare with.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from asrd.lab.compare.report import wilson
from asrd.lab.diagnose.samples import packaged_sample
from asrd.lab.diagnose.visible import visible_behaviour
from asrd.lab.tiny.decode import score
from asrd.lab.tiny.export import import_weights
from asrd.lab.tiny.task import LEVELS, SCORING_FROM, Problem, held_out
from asrd.models import load


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m asrd.lab.tiny.evaluate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("folder", type=Path, nargs="+", help="exported models")
    parser.add_argument("--n", type=int, default=200, help="held-out problems (default %(default)s)")
    parser.add_argument("--level", choices=list(LEVELS), default="hard")
    parser.add_argument("--decoders", default="visible,standard,0.9,0.8,0.6", help="visible, standard or thresholds")
    parser.add_argument("--save", action="store_true", help="write scores.json into each folder")
    given = parser.parse_args()
    torch.set_num_threads(1)
    some = held_out(given.n, given.level)
    for folder in given.folder:
        kept = folder / "scores.json"
        scores: dict[str, Any] = json.loads(kept.read_text()) if given.save and kept.exists() else {}
        scores |= {"level": given.level, "first_seed": SCORING_FROM}
        for name in tqdm(given.decoders.split(","), desc=folder.name):
            label = name if name in ("visible", "standard") else f"threshold {name}"
            scores[label] = figures(folder, some, name)
            tqdm.write(json.dumps({"model": folder.name, "decoder": label, **scores[label]}))
        if given.save:
            kept.write_text(json.dumps(scores, indent=2) + "\n")


def figures(folder: Path, some: list[Problem], name: str) -> dict[str, Any]:
    """Scores of one decoder (`standard` or a threshold), with a 95 % interval of the accuracy; or of `visible`."""
    if name == "visible":
        found = visible_behaviour(load(folder)[0], [packaged_sample(problem) for problem in some[:64]])
        seen = found.overall
        shares = {"kept": seen.kept, "flipped": seen.flipped["likely"], "corrected": seen.corrected["likely"]}
        plain = {
            f"{what}{probe}": e.value
            for what, es in shares.items()
            for probe, e in zip(("", "_probe"), es, strict=True)
        }
        return plain | {"conclusion": found.conclusion}
    result = score(import_weights(folder), some, None if name == "standard" else float(name))
    return asdict(result) | {"interval": wilson(round(result.right * result.problems), result.problems)}


if __name__ == "__main__":
    main()
