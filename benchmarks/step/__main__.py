"""Time of a step by part: `python -m benchmarks.step [--shapes 2M 8B] [--threads N] [--out FILE.json]`.

The parts run in turn, so that the machine's load slows all of them equally; the table shows medians and their ratio to
the forward pass beside the paper's own ratios on an A100 (7.6 ms and 10.8 ms of 74.1 ms).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.step.parts import PARTS, SHAPES, Shape, Step

BOUNDS = {
    "2M": (0.098, 0.146),
    "2M-deep": (0.098, 0.146),
    "8B": (0.01, 0.01),
}  # embed + commit, and all parts other than forward and LM head


def measure(shape: Shape, rounds: int) -> dict[str, float]:
    """Median milliseconds of each part over `rounds` steps."""
    step = Step(shape)
    parts = step.parts()
    times: dict[str, list[float]] = {name: [] for name in PARTS}
    for index in tqdm(range(rounds), desc="steps", leave=False):
        if index % 25 == 0:
            step.reset()
        for name, run in parts.items():
            started = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - started) * 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    medians["forward"] *= shape.scale
    return medians


def main() -> None:
    """Measure, print, save."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--shapes", nargs="+", choices=SHAPES, default=["2M", "2M-deep"])
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument(
        "--rounds", type=int, default=400, help="steps of the 2M shapes to time (default: 400; of 8B always 5)"
    )
    options.add_argument("--out", type=Path, default=None)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {}
    print(f"median milliseconds of one step, batch 1, {arguments.threads} thread(s), torch {torch.__version__}\n")
    print("| shape | " + " | ".join(PARTS) + " | embed + commit | all but forward and head |")
    print("|---" * (len(PARTS) + 3) + "|")
    for name in arguments.shapes:
        medians = measure(SHAPES[name], 5 if name == "8B" else arguments.rounds)
        edit = (medians["embed"] + medians["commit"]) / medians["forward"]
        rest = edit + medians["statistics"] / medians["forward"]
        low, high = BOUNDS[name]
        cells = [f"{medians[part]:.3f}" for part in PARTS]
        cells += [f"{edit:.2%} (aim {low:.1%})", f"{rest:.2%} (aim {high:.1%})"]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        results[name] = {"milliseconds": medians, "embed_and_commit": edit, "all_but_forward_and_head": rest}
    if arguments.out:
        arguments.out.write_text(json.dumps({"threads": arguments.threads, "shapes": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
