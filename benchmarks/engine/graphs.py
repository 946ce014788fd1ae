"""How a step with a KV cache is best cut into graphs of fixed shape: `python -m benchmarks.engine.graphs`.

A row is due its whole canvas when its block changes, else a slice. Two ways to launch that as recorded graphs: two of
them, all slices and all whole canvases, the rows that are not due masked out; or in parts, slices of all rows and whole
canvases of 1, 2, 4, ... rows. Requests run through the engine on the CPU, what is due in each step is counted, and from
that what either way computes. Counts, no times: they are the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import asrd
from asrd.engine.caches import CachedBody, plan
from benchmarks.engine.loads import load

Due = tuple[list[int], int, int]  # of each row, canvas, block


@contextmanager
def counted() -> Iterator[list[Due]]:
    """What is due in every step taken within."""
    plain, found = CachedBody.due, []

    def due(self: CachedBody, *arguments: Any) -> Any:
        result = plain(self, *arguments)
        canvas = result[:, : self.parts.length]
        found.append((canvas.sum(1).tolist(), self.parts.length, self.schedule.block_length))
        return result

    CachedBody.due = due  # type: ignore[method-assign]
    try:
        yield found
    finally:
        CachedBody.due = plain  # type: ignore[method-assign]


def row(slots: int, steps: Sequence[Due]) -> dict[str, float]:
    """What each way launches and computes per step."""
    in_parts = in_two = needed = launches = refreshed = 0
    for counts, length, block in steps:
        parts = plan(counts, length, block)
        sizes = [len(counts) * part.size if part.kind == "slices" else part.size * length for part in parts]
        slices = sum(size for part, size in zip(parts, sizes, strict=True) if part.kind == "slices")
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
