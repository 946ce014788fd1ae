"""How a step with a KV cache is best cut into graphs of fixed shape: `python -m benchmarks.engine.graphs`.

A row is due its whole canvas when its block changes, else a slice. Two ways to launch that as recorded graphs: two of
them, all slices and all whole canvases, the rows that are not due masked out; or in parts, slices of all rows and whole
canvases of 1, 2, 4, ... rows. Requests run through the engine on the CPU with the shapes of a GPU, what is due in each
step is counted, and from that what either way computes. Counts, no times: they are the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import asrd
from asrd.engine.caches import CanvasCache
from asrd.engine.caches.canvas import CanvasPart
from asrd.engine.device.gpu import fixed_shapes
from benchmarks.engine.loads import load

Due = tuple[list[int], list[CanvasPart], int]  # of each row, the forwards, canvas


@contextmanager
def counted() -> Iterator[list[Due]]:
    """What is due in every step taken within, and how it is computed."""
    plain, found = CanvasCache.plan, []

    def plan(self: CanvasCache, *arguments: Any) -> list[CanvasPart]:
        parts = plain(self, *arguments)
        found.append((self.counts[0].tolist(), parts, self.length))
        return parts

    CanvasCache.plan = plan  # type: ignore[method-assign]
    try:
        with fixed_shapes():
            yield found
    finally:
        CanvasCache.plan = plain  # type: ignore[method-assign]


def row(slots: int, steps: Sequence[Due]) -> dict[str, float]:
    """What each way launches and computes per step."""
    in_parts = in_two = needed = launches = refreshed = 0
    for counts, parts, length in steps:
        sizes = [part.size * part.width for part in parts]
        slices = sum(size for part, size in zip(parts, sizes, strict=True) if part.width < length)
        due = length in counts
        in_parts, launches, refreshed = in_parts + sum(sizes), launches + len(parts), refreshed + due
        in_two += slices + due * len(counts) * length
        needed += sum(counts)
    number = len(steps)
    return {
        "slots": slots, "refreshed": refreshed / number, "launches": launches / number, "needed": needed / number,
        "parts": in_parts / number, "two": in_two / number,
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Count and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=64)
    options.add_argument("--slots", type=int, nargs="+", default=[1, 4, 16])
    arguments = options.parse_args(argv)
    model, _ = asrd.load("tiny")
    print(
        "| slots | steps in which a row is refreshed | positions due | in parts | forwards in parts | in two graphs |"
    )
    print("|---|---|---|---|---|---|")
    for slots in arguments.slots:
        with counted() as steps:
            requests = [{"prompt": r.prompt, "max_new_tokens": r.length} for r in load("mixed", arguments.requests)]
            for _ in asrd.generate_many(model, requests, slots=slots, kv_cache="dual"):
                pass
        found = row(slots, steps)
        print(
            f"| {slots} | {found['refreshed']:.0%} | {found['needed']:.0f} | {found['parts']:.0f} |"
            f" {found['launches']:.1f} | {found['two']:.0f} ({found['two'] / found['parts']:.1f} times) |"
        )


if __name__ == "__main__":
    main()
