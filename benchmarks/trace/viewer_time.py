"""How long a large trace takes to open: `python -m benchmarks.trace.viewer_time [--length 1024] [--steps 600]`.

A synthetic trace of that size, with all roles, is checked, written as a page, and opened in headless Chromium from
disk. The time is from the start of the navigation to the first complete frame, as measured by the page.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    raise SystemExit("this needs playwright, and a chromium: pip install '.[test]' in the clone") from None

from asrd.engine.observers.inspector import PARTS
from asrd.trace import Trace
from asrd.viewer import page

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
MASK, PAD, EOS, WORDS = 0, 1, 2, range(3, 400)


def large_trace(length: int, steps: int, block: int = 32, seed: int = 0) -> Trace:
    """A trace in which tokens are drafted, checked, revoked and promoted, block by block."""
    draw = random.Random(seed)
    header = {
        "asrd_trace": 1, "version": "0", "model": "made up", "decoder": "asrd", "settings": {"threshold": 0.7},
        "prompt": [[draw.choice(WORDS) for _ in range(60)]], "padding": [0], "length": length, "block_length": block,
        "capacity": 16, "mask": MASK, "pad": PAD, "eos": [EOS], "forwards_per_step": 1, "parts": list(PARTS),
        "texts": {str(token): f" word{token}" for token in (MASK, PAD, EOS, *WORDS)},
    }  # fmt: skip
    records: list[dict[str, Any]] = [header]
    tokens, pending, cache, counts = [MASK] * length, set[int](), list[int](), [0, 0, 0]
    for step in range(1, steps + 1):
        masks = [p for p in range(length) if tokens[p] == MASK]
        active = [p for p in masks if p // block == masks[0] // block]
        at = sorted({*active, *pending})
        left = steps - step
        revoke = sorted(p for p in pending if left and draw.random() < 0.2)
        keep = sorted(pending - set(revoke))
        pace = round(len(masks) / (left + 1)) + draw.choice((-1, 0, 1, 3))
        number = min(len(active), max(0, pace), len(masks) - left)
        draft = sorted(draw.sample(active, number)) if left else masks
        anchor = sorted(p for p in draft if draw.random() < 0.15)
        ids = [draw.choice(WORDS) for _ in draft]
        cache = [*cache, *anchor][-16:]
        pending = {p for p in draft if p not in anchor} if left else set()
        for place, token in zip(draft, ids, strict=True):
            tokens[place] = token
        for place in revoke:
            tokens[place] = MASK
        counts = [counts[0] + len(draft), counts[1] + len(revoke), counts[2] + len(anchor)]
        row = {
            "row": 0, "block": masks[0] // block, "counts": counts, "at": at,
            "top1": [draw.choice(WORDS) for _ in at], "confidence": [round(draw.random(), 4) for _ in at],
            "entropy": [round(3 * draw.random(), 4) for _ in at], "draft": [draft, ids], "revoke": revoke, "keep": keep,
            "pend": sorted(pending), "anchor": anchor, "cache": cache, "done": not left,
        }  # fmt: skip
        records.append({"step": step, "ms": [0.4, 30.0, 0.5, 0.3, 0.8], "rows": [row]})
    return Trace([*records, {"end": steps, "tokens": [tokens]}])


def first_render(browser: Any, path: Path) -> tuple[float, float]:
    """Milliseconds until the first frame, and of a jump to another step."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto(path.as_uri())
    while not (
        marks := tab.evaluate("performance.getEntriesByName('asrd-first-render').map((mark) => mark.startTime)")
    ):
        time.sleep(0.05)
    moved = tab.evaluate("(() => { const t = performance.now(); viewer.seek(300); return performance.now() - t; })()")
    tab.close()
    return marks[0], moved


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--length", type=int, default=1024)
    options.add_argument("--steps", type=int, default=600)
    options.add_argument("--rounds", type=int, default=5)
    arguments = options.parse_args()
    trace = large_trace(arguments.length, arguments.steps)
    trace.check()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        path = Path(folder) / "large.html"
        started = time.perf_counter()
        path.write_text(page([trace, trace]), encoding="utf-8")
        written = time.perf_counter() - started
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        found = [first_render(browser, path) for _ in range(arguments.rounds)]
        size = path.stat().st_size / 1e6
    opened, moved = (statistics.median(values) for values in zip(*found, strict=True))
    print(f"two traces of {arguments.length} tokens and {arguments.steps} steps beside each other, {size:.1f} MB,")
    print(f"written in {written:.2f} s; median of {arguments.rounds}: first render after {opened:.0f} ms,", end=" ")
    print(f"a jump by half the trace takes {moved:.0f} ms (worst first render {max(f[0] for f in found):.0f} ms)")


if __name__ == "__main__":
    main()
