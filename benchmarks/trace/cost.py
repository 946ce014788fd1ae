"""What a trace costs: `python -m benchmarks.trace.cost [--rounds N] [--batch 1 8] [--model tiny]`.

The same held-out problems are decoded in turn: by a step with its marks removed, by the step as it is, with
`return_trace=True` and with `trace=` a file. The medians of the ratios within a round are shown, in processor time, so
that the machine's load matters little. The first ratio is the cost of the unused hook, the others the cost of a trace
(aim: under 10 %).
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
from asrd.engine import batch as batches
from asrd.engine import step as steps
from asrd.lab.tiny.batch import collate
from asrd.lab.tiny.task import problems


@contextmanager
def marks_removed() -> Iterator[None]:
    """The step's functions without their marks."""
    marked = {name: getattr(steps, name) for name in ("step", "commit")}
    for name, function in marked.items():
        source, taken = re.subn(r"^ *batch\.(mark|begin)\(.*\n", "", inspect.getsource(function), flags=re.MULTILINE)
        assert taken, f"{name} has no marks"
        exec(compile(source, f"{name} without marks", "exec", flags=annotations.compiler_flag), vars(steps))
    batches.step = steps.step
    try:
        yield
    finally:
        vars(steps).update(marked)
        batches.step = marked["step"]


def cases(model: Any, tokenizer: Any, batch: int, path: Path, settings: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The ways to decode that are compared."""
    some = collate(list(itertools.islice(problems("test", "hard"), batch)))
    prompt, mask = some.prompt, some.attention_mask[:, : some.prompt.shape[1]]

    def decode(**options: Any) -> Any:
        return asrd.fast_generate(
            model, prompt, mask, max_new_tokens=some.length, tokenizer=tokenizer, **settings, **options
        )

    def bare() -> Any:
        with marks_removed():
            return decode()

    return {
        "no marks": bare,
        "off": decode,
        "return_trace": lambda: decode(return_trace=True),
        "trace=file": lambda: decode(trace=path),
    }


def measure(runs: dict[str, Callable[[], Any]], rounds: int) -> tuple[float, list[float]]:
    """Median milliseconds without a trace, and the median over the rounds of the three ratios within a round."""
    names, times = list(runs), []
    for index in tqdm(range(rounds + 1), desc="rounds", leave=False):
        found = {}
        for name in names[index % len(names) :] + names[: index % len(names)]:  # each round in another order
            started = time.process_time()
            runs[name]()
            found[name] = time.process_time() - started
        times.append(found)
    del times[0]  # warm-up
    pairs = (("off", "no marks"), ("return_trace", "off"), ("trace=file", "off"))
    ratios = [statistics.median(found[a] / found[b] for found in times) for a, b in pairs]
    return 1e3 * statistics.median(found["off"] for found in times), ratios


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
            milliseconds, ratios = measure(runs, arguments.rounds)
            cells = " | ".join(f"{ratio:.3f}" for ratio in ratios)
            print(f"| {decoder} | {batch} | {milliseconds:.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
