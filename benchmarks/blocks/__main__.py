"""Decoders on a block-diffusion model, in one run: `python -m benchmarks.blocks [--model tiny-block] [--problems 32]`.

The first table decodes held-out problems of the packaged task, one at a time, the contenders in turn, so that the
machine's load slows all of them equally: right answers, forward passes, positions computed, and the median time of a
problem. "as written" stores a finished block in a forward of its own (SDAR), or keeps no cache at all (LLaDA2.0).
The second lets one decoder write longer and longer texts: time of a forward pass over the blocks that are finished.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import asrd
from asrd.engine.caches import BlockCache
from asrd.lab.tiny.batch import prompt_ids
from asrd.lab.tiny.task import Problem, grade, held_out

CONTENDERS: dict[str, dict[str, Any]] = {
    "native, no cache (LLaDA2.0 as written)": {"decoder": "native", "strategy": "dynamic", "recompute": True},
    "native, store apart (SDAR as written)": {"decoder": "native", "strategy": "dynamic", "boundary": "apart"},
    "native, store merged": {"decoder": "native", "strategy": "dynamic"},
    "native joint (LLaDA2.1)": {"decoder": "native", "strategy": "joint"},
    "threshold": {"decoder": "threshold"},
    "factor 1": {"decoder": "factor", "factor": 1.0},
    "factor 2": {"decoder": "factor", "factor": 2.0},
    "loo 2, apart": {"decoder": "loo", "factor": 2.0, "boundary": "apart"},
    "loo 2, fused": {"decoder": "loo", "factor": 2.0},
    "asrd, apart": {"decoder": "asrd", "strategy": "dynamic", "boundary": "apart"},
    "asrd, store merged": {"decoder": "asrd", "strategy": "dynamic", "boundary": "merged"},
    "asrd, fused": {"decoder": "asrd", "strategy": "dynamic"},
    "asrd on joint, fused": {"decoder": "asrd", "strategy": "joint"},
}


@contextmanager
def recomputing(wanted: bool) -> Iterator[None]:
    """Forget all stored K/V before each forward: every block up to the open one is computed anew."""
    prepare = BlockCache.prepare

    def forgetful(cache: BlockCache, *arguments: Any) -> None:
        cache.stored.blocks.zero_()
        cache.stored.tokens.fill_(-1)
        prepare(cache, *arguments)

    if wanted:
        BlockCache.prepare = forgetful  # type: ignore[method-assign]
    try:
        yield
    finally:
        BlockCache.prepare = prepare  # type: ignore[method-assign]


def run(model: Any, ids: torch.Tensor, length: int, settings: dict[str, Any]) -> tuple[Any, float]:
    """A decode, and its seconds."""
    chosen = {name: value for name, value in settings.items() if name != "recompute"}
    with recomputing(bool(settings.get("recompute"))):
        began = time.perf_counter()
        out = asrd.fast_generate(model, ids, max_new_tokens=length, return_dict_in_generate=True, **chosen)
        return out, time.perf_counter() - began


def compare(model: Any, problems: list[Problem], threshold: float) -> list[dict[str, Any]]:
    """Every contender on every problem."""
    found: dict[str, list[tuple[bool, int, int, int, float]]] = {name: [] for name in CONTENDERS}
    for problem in tqdm(problems, desc="problems", leave=False):
        ids = torch.tensor([prompt_ids(problem)])
        for name, settings in CONTENDERS.items():
            chosen = settings if "factor" in settings else settings | {"threshold": threshold}
            out, seconds = run(model, ids, problem.response_length, chosen)
            right = grade(problem, out.sequences[0, ids.shape[1] :].tolist())
            row = (right, int(out.forwards), int(out.steps), int(out.computed), seconds)
            found[name].append(row)
    table = []
    for name, rows in found.items():
        right, forwards, steps, computed, seconds = zip(*rows, strict=True)
        mean = [sum(values) / len(rows) for values in (forwards, steps, computed)]
        row = {"decoder": name, "right": sum(right), "forwards": mean[0], "steps": mean[1], "computed": mean[2]}
        table.append(row | {"ms": 1e3 * statistics.median(seconds)})
    return table


def growth(model: Any, blocks: list[int], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of a forward pass of the open block with so many finished ones, with the cache and without."""
    size, ids = model.config.asrd_block_length, torch.full((1, 1), 5)
    found: dict[tuple[int, bool], list[float]] = {(count, full): [] for count in blocks for full in (False, True)}
    longest = max(blocks) + 1
    for _ in range(rounds):
        for full in (False, True):
            times: list[float] = []
            settings = {"decoder": "native", "strategy": "static", "early_stop": False, "recompute": full}
            watch = [lambda _, times=times: times.append(time.perf_counter())]
            run(model, ids, longest * size - 1, settings | {"observers": watch})
            for count in blocks:  # one token a step: the second half of a block's steps, none of which stores
                steps = range(count * size + size // 2, (count + 1) * size - 2)
                found[count, full] += [times[i + 1] - times[i] for i in steps]
    median = {key: 1e3 * statistics.median(values) for key, values in found.items()}
    return [{"finished": count, "cache": median[count, False], "none": median[count, True]} for count in blocks]


def main() -> None:
    """Measure, print, save."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="tiny-block")
    options.add_argument("--problems", type=int, default=32)
    options.add_argument("--first", type=int, default=4000, help="number of the first held-out problem")
    options.add_argument("--threshold", type=float, default=0.9)
    options.add_argument("--blocks", type=int, nargs="*", default=[1, 3, 7, 14])
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--out", type=Path, default=None)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    model, _ = asrd.load(arguments.model, dtype="float32")
    problems = held_out(arguments.problems, first=arguments.first)
    table = compare(model, problems, arguments.threshold)
    print(f"{len(problems)} problems, threshold {arguments.threshold}, batch 1, {arguments.threads} thread(s)\n")
    print("| decoder | right | forward passes | steps | positions computed | ms a problem |\n|---|---|---|---|---|---|")
    for row in table:
        numbers = f"{row['forwards']:.1f} | {row['steps']:.1f} | {row['computed']:.0f} | {row['ms']:.0f}"
        print(f"| {row['decoder']} | {row['right']} | {numbers} |")
    lines = growth(model, arguments.blocks, arguments.rounds)
    print("\n| finished blocks | ms a forward pass, exact cache | without |\n|---|---|---|")
    for line in lines:
        print(f"| {line['finished']} | {line['cache']:.2f} | {line['none']:.2f} |")
    if arguments.out:
        arguments.out.write_text(json.dumps({"decoders": table, "growth": lines}, indent=2) + "\n")


if __name__ == "__main__":
    main()
