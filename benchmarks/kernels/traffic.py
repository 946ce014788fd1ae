"""Bytes that the kernels of LLaDA-8B's step move, and how they grow.

Run by cost.py in a process of its own (TRITON_INTERPRET=1); writes JSON to the file named on the command line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from tests.support.kernels.cases import Case, commit_case, embed_case, stats_case
from tests.support.kernels.traffic import measure

BF16 = torch.bfloat16
LLADA = {"prompt": 256, "length": 256, "dim": 4096, "vocab": 126464, "block": 32}  # the paper's 8B model and canvas


@dataclass(frozen=True)
class Point:
    """One case on an axis of growth; axis "reference" is LLaDA-8B's own step."""

    axis: str
    value: int
    make: Callable[[], Case]


def points(quick: bool = False) -> Iterator[Point]:
    """The reference step, then growth with canvas length, vocabulary, batch and capacity. `quick`: smaller, fewer."""
    embed = lambda **k: embed_case(**{"batch": 1, "prompt": 256, "length": 256, "dim": 4096, "dtype": BF16} | k)  # noqa: E731
    reference = 2 if quick else 2 * LLADA["block"]
    yield Point("reference", 0, lambda: embed(anchors=16))
    yield Point("reference", 0, lambda: stats_case(reference, LLADA["vocab"], BF16, unwanted=reference // 2))
    yield Point("reference", 0, lambda: commit_case(1, 256, 256))
    for capacity in (4, 32) if quick else (4, 8, 16, 32):
        yield Point("capacity", capacity, lambda m=capacity: embed(capacity=m, anchors=m))
    if quick:
        return
    for total in (128, 256, 512, 1024):
        yield Point("L", total, lambda n=total: embed(prompt=n // 2, length=n // 2, anchors=16))
        yield Point("L", total, lambda n=total: commit_case(1, n // 2, n // 2))
    for batch in (1, 2, 4, 8):
        small = {"prompt": 32, "length": 96, "anchors": 16}
        yield Point("B", batch, lambda b=batch, s=small: embed(batch=b, **s))
        yield Point("B", batch, lambda b=batch: stats_case(4 * b, 32000, BF16))
        yield Point("B", batch, lambda b=batch: commit_case(b, 32, 96))
    for vocab in (32000, 64000, 126464, 151936):
        yield Point("V", vocab, lambda v=vocab: stats_case(4, v, BF16))


def main() -> None:
    """Measure every point and write the list."""
    target, quick = Path(sys.argv[1]), "--quick" in sys.argv[2:]
    results = [
        {"axis": point.axis, "value": point.value, **measure(point.make())}
        for point in tqdm(list(points(quick)), desc="counting bytes", leave=False)
    ]
    target.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
