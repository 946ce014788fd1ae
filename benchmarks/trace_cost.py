"""What a trace costs: `python benchmarks/trace_cost.py [--rounds N] [--batch 1 8] [--model tiny]`.

The same held-out problems are decoded over and over in turn: by the loop with its marks taken out, by the loop as it
is, with `return_trace=True` and with `trace=` a file. What counts is the ratio of the medians, in processor time, so
that a busy machine matters little. The first ratio is what the hook costs when nobody looks, the others what a trace
costs (aim: under 10 %).
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import asrd
from asrd import loop
from asrd.tiny.batch import collate
from asrd.tiny.task import problems


@contextmanager
def marks_taken_out() -> Iterator[None]:
    """The loop's step without its marks."""
    marked = loop.step
    source, taken = re.subn(r"^ *run\.mark\(.*\n", "", inspect.getsource(marked), flags=re.MULTILINE)
    assert taken, "step has no marks"
    space: dict[str, Any] = {}
    exec(compile(source, "step without marks", "exec"), vars(loop), space)
    loop.step = space["step"]
    try:
        yield
    finally:
        loop.step = marked


def cases(model: Any, tokenizer: Any, batch: int, path: Path, settings: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The ways to decode that are compared."""
    some = collate(list(itertools.islice(problems("test", "hard"), batch)))
    prompt, mask = some.prompt, some.attention_mask[:, : some.prompt.shape[1]]

    def decode(**options: Any) -> Any:
        return asrd.fast_generate(
            model, prompt, mask, max_new_tokens=some.length, tokenizer=tokenizer, **settings, **options
        )

    def bare() -> Any:
        with marks_taken_out():
            return decode()

    return {
        "no marks": bare,
        "off": decode,
        "return_trace": lambda: decode(return_trace=True),
        "trace=file": lambda: decode(trace=path),
    }


def measure(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median processor seconds of each, in turn, each round in another order."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for index in tqdm(range(rounds + 1), desc="rounds", leave=False):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            started = time.process_time()
            runs[name]()
            if index:  # the first round warms up
                times[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="tiny")
    options.add_argument("--decoders", nargs="+", default=["asrd", "standard", "saber"])
    options.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    options.add_argument("--rounds", type=int, default=15)
    arguments = options.parse_args()
    model, tokenizer = asrd.load(arguments.model)
    print(f"{arguments.model}, {torch.get_num_threads()} thread(s), medians of {arguments.rounds} decodes, in turn\n")
    print("| decoder | batch | CPU ms off | off / no marks | return_trace / off | trace=file / off |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for decoder, batch in itertools.product(arguments.decoders, arguments.batch):
            runs = cases(model, tokenizer, batch, Path(folder) / "trace.jsonl", {"decoder": decoder})
            found = measure(runs, arguments.rounds)
            ratios = [
                found["off"] / found["no marks"],
                *(found[n] / found["off"] for n in ("return_trace", "trace=file")),
            ]
            cells = " | ".join(f"{ratio:.3f}" for ratio in ratios)
            print(f"| {decoder} | {batch} | {1e3 * found['off']:.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
