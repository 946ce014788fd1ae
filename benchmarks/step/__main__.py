"""Time of a step by part: `python -m benchmarks.step [--shapes 2M 8B] [--base FOLDER] [--out FILE.json]`.

Decoders and parts take turns, so that the machine's load slows all of them equally; the table shows medians and their
ratio to the forward pass. With --base another checkout of this repository is measured in the same run, turn by turn,
by its own `parts`, which must have these parts.
The paper's own step on an A100 has 7.6 ms (embed + commit) and 10.8 ms (all but forward and LM head) of 74.1 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.step.parts import DECODERS, PARTS, SHAPES

HERE = Path(__file__).resolve().parent
TURNS = 3  # processes of each checkout and shape

Times = dict[str, dict[str, list[float]]]


def measure_in(root: Path, shape: str, given: argparse.Namespace) -> Times:
    """The times of one process with the `asrd` of a checkout."""
    rounds = 5 if shape == "8B" else given.rounds // TURNS
    words = ["--shape", shape, "--threads", str(given.threads), "--rounds", str(rounds), "--decoders", *given.decoders]
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "step" / "parts.py"), *words],
        env=os.environ | {"PYTHONPATH": str(root)}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print, save."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=["2M", "2M-deep"])
    options.add_argument("--decoders", nargs="+", default=list(DECODERS))
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument(
        "--rounds", type=int, default=400, help="steps of the 2M shapes to time (default: 400; of 8B always 5)"
    )
    options.add_argument("--base", type=Path, default=None, help="another checkout, to be measured beside this one")
    options.add_argument("--out", type=Path, default=None)
    given = options.parse_args()
    roots = {"before": given.base} if given.base else {}
    roots["here"] = HERE.parents[1]
    times: dict[tuple[str, str, str, str], list[float]] = {}
    for turn, shape in tqdm([(turn, shape) for turn in range(TURNS) for shape in given.shapes], leave=False):
        if shape == "8B" and turn:
            continue
        for version, root in roots.items():
            for decoder, parts in measure_in(root, shape, given).items():
                for part, values in parts.items():
                    times.setdefault((shape, decoder, version, part), []).extend(values)
    medians = {key: statistics.median(values) for key, values in times.items()}
    print(f"median milliseconds of one step, batch 1, {given.threads} thread(s), torch {torch.__version__}\n")
    print("| shape | decoder | version | " + " | ".join(PARTS) + " | embed + commit | all but forward and LM head |")
    print("|---" * (len(PARTS) + 5) + "|")
    results = []
    for shape, decoder, version in dict.fromkeys(key[:3] for key in medians):
        parts = {part: medians[shape, decoder, version, part] for part in PARTS}
        edit = (parts["embed"] + parts["commit"]) / parts["forward"]
        rest = (sum(parts.values()) - parts["forward"] - parts["head"]) / parts["forward"]
        cells = [shape, decoder, version, *(f"{parts[part]:.3f}" for part in PARTS), f"{edit:.1%}", f"{rest:.1%}"]
        print("| " + " | ".join(cells) + " |", flush=True)
        results.append({"shape": shape, "decoder": decoder, "version": version, "milliseconds": parts, "rest": rest})
    if given.out:
        given.out.write_text(json.dumps({"threads": given.threads, "steps": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
