"""Every decoder, with and without cache, against LLaDA's own loop: `python -m benchmarks.head_to_head --out DIR`.

In one run on one machine:
  accuracy  accuracy and forward passes of each setting on held-out problems of `tiny`
  tiny      tokens per second of the settings worth timing, at batch 1 and 16
  length    tokens per second on a wide model of random weights, at lengths 128 to 1024
  batch     the same at batch 1, 4 and 16
  parts     time of a step by part
Contenders run in turn, round after round; speeds are medians, ratios are taken within a round. Measurements are kept in
DIR, and the same command resumes where it stopped; use a new DIR to measure again. Tables, plots and conclusions are
made from them at the end. Accuracy may be measured first, on a busy machine (--only accuracy); everything else needs an
idle one. --short measures few settings. --quick tests the benchmark; its results mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import asrd
from asrd.lab.tiny.provenance import git_commit
from benchmarks.head_to_head import on_tiny as on_tiny
from benchmarks.head_to_head import page as page
from benchmarks.head_to_head.on_wide import Case, Contender, Wide, time_case

STAGES = ("accuracy", "tiny", "length", "batch", "parts")
LENGTHS = (Case(1, 128), Case(1, 256), Case(1, 512, rounds=2), Case(1, 1024, steps=8, rounds=2))
BATCHES = (Case(4, 256, steps=8, rounds=2), Case(16, 256, steps=4, rounds=2))  # and batch 1 is among the lengths
TINY_PARTS = Case(1, 128, steps=32, rounds=9)  # on one thread: a second does not help so small a model, and adds noise
GROWTH = {  # plotted over length and batch; the table at length 256 has all
    (None, None), ("standard", None), ("standard", "dual"), ("threshold", None), ("threshold", "dual"),
    ("asrd", None), ("asrd", "prefix"), ("asrd", "dual"), ("wino", None), ("saber", None),
}  # fmt: skip


class Store:
    """Measurements in one file; a measurement that is there is not made again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, name: str, about: Any, work: Callable[[], Any]) -> Any:
        """The measurement of this name; made again if `about`, what it depends on, has changed."""
        about = json.loads(json.dumps(about, default=vars))
        kept = self.content.get(name)
        if kept is None or kept["about"] != about:
            started, load = time.time(), os.getloadavg()[0]
            found = json.loads(json.dumps(work()))
            seconds = time.time() - started
            self.content[name] = {"about": about, "found": found, "seconds": seconds, "load_before": load}
            self.path.write_text(json.dumps(self.content) + "\n")
            print(f"{name}: {seconds:.0f} s", file=sys.stderr)
        return self.content[name]["found"]


def main(words: list[str] | None = None) -> None:
    """Measure what is missing, then write and print the results."""
    arguments = parse(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(arguments.threads)
    store = Store(arguments.out / "measured.json")
    quick, stages = arguments.quick, arguments.only or STAGES
    plan, n = (on_tiny.QUICK, 4) if quick else (on_tiny.SHORT if arguments.short else on_tiny.FULL, arguments.n)
    folder = arguments.out / "accuracy"
    workers = 1 if quick else arguments.workers
    work = partial(on_tiny.accuracy, plan, n, folder, workers)
    entries = store.get("accuracy", [plan, n, on_tiny.weights()], work)
    chosen = entries if arguments.short else on_tiny.worth_timing(entries)
    rows: list[dict[str, Any]] = []
    reruns: list[str] = []
    if "tiny" in stages:
        for batch, threads, rounds in tiny_cases(quick, arguments.threads):
            work = partial(on_tiny.time_settings, chosen, batch, threads, rounds, plain_steps=6 if quick else None)
            name = f"tiny, batch {batch}, {threads} thread(s)"
            rows += page.tiny_rows(chosen, store.get(name, [chosen, batch, threads, rounds], work), batch, threads)
            if arguments.short:
                continue
            reruns.append(rerun_fastest(store, chosen, rows, batch, threads, 2 if quick else 32 if batch == 1 else 12))
        torch.set_num_threads(arguments.threads)
    rows += wide_rows(store, arguments, contenders(chosen))
    about = machine() | {"command": shlex.join(["python", *sys.argv]), "threads": arguments.threads, "quick": quick}
    about["loads"] = {name: round(kept["load_before"], 2) for name, kept in store.content.items()}
    about["seconds"] = {name: round(kept["seconds"]) for name, kept in store.content.items()}
    print(page.save(arguments.out, about, entries, rows, reruns), end="")


def parse(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="folder for measurements and results")
    options.add_argument("--only", nargs="+", choices=STAGES, help="these parts (accuracy is needed by all)")
    options.add_argument("--n", type=int, default=112, help="problems for the accuracy (default: %(default)s)")
    options.add_argument("--threads", type=int, default=os.cpu_count(), help="of every timed run (default: all cores)")
    options.add_argument("--workers", type=int, default=os.cpu_count(), help="processes for the accuracy, not timed")
    options.add_argument("--short", action="store_true", help="few settings, with the dual cache; all are timed")
    options.add_argument("--quick", action="store_true", help="test run: small models, few steps, meaningless results")
    arguments = options.parse_args(words)
    for name in ("n", "threads", "workers"):
        if getattr(arguments, name) < 1:
            options.error(f"--{name} {getattr(arguments, name)}: expected at least 1")
    return arguments


def tiny_cases(quick: bool, threads: int) -> list[tuple[int, int, int]]:
    """Batch, threads and rounds. At batch 1 so small a model may be faster with one thread, so both are measured."""
    if quick:
        return [(1, threads, 1), (2, threads, 1)]
    single = [(1, number, 12) for number in dict.fromkeys((1, threads))]
    return [*single, (on_tiny.BATCH, threads, 3)]


def rerun_fastest(
    store: Store, chosen: list[dict[str, Any]], rows: list[dict[str, Any]], batch: int, threads: int, rounds: int
) -> str:
    """The two fastest of `tiny` again, over more rounds: which is faster, in a sentence."""
    two = page.two_fastest(chosen, rows, batch, threads)
    if len(two) < 2:
        return ""
    name = f"two fastest, batch {batch}, {threads} thread(s)"
    work = partial(on_tiny.time_settings, two, batch, threads, rounds, plain=False)
    return page.rerun_sentence(two, store.get(name, [two, batch, threads, rounds], work), batch, threads)


def contenders(chosen: list[dict[str, Any]]) -> list[Contender]:
    """For the wide model: LLaDA's loop, and each decoder and cache at its forward passes per block on `tiny`.

    Caches are refreshed when the block changes, as in Fast-dLLM; dual ones also as often as `tiny` needed it.
    """
    found = [Contender(None, {}), Contender("standard", {})]
    found += [Contender("standard", {"kv_cache": cache}) for cache in ("prefix", "dual")]
    seen = {("standard", None), ("standard", "prefix"), ("standard", "dual")}
    for entry in chosen:
        kind, settings = (entry["decoder"], entry["cache"]), dict(entry["settings"])
        refresh = settings.pop("kv_refresh", None)
        if kind in seen:
            continue
        seen.add(kind)
        found.append(Contender(entry["decoder"], settings, entry["forwards_per_block"]))
        if refresh is not None and entry["cache"] == "dual":
            found.append(Contender(entry["decoder"], entry["settings"], entry["forwards_per_block"]))
    return found


def wide_rows(store: Store, arguments: argparse.Namespace, everyone: list[Contender]) -> list[dict[str, Any]]:
    """Rows of the cases on random weights, and of the parts."""
    quick, stages, threads = arguments.quick, arguments.only or STAGES, arguments.threads
    size = Wide(hidden=32, ffn=64, layers=1, heads=2, vocab=500) if quick else Wide()
    few = [each for each in everyone if (each.decoder, each.cache) in GROWTH and "kv_refresh" not in each.settings]
    cases = [case for stage, some in (("length", LENGTHS), ("batch", BATCHES)) if stage in stages for case in some]
    if quick:
        cases = [Case(case.batch, case.length // 2, steps=1, rounds=1) for case in (LENGTHS[1], BATCHES[0])]
    main_case = cases[0] if quick else LENGTHS[1]
    if "parts" in stages and main_case not in cases:
        cases.append(main_case)
    rows: list[dict[str, Any]] = []
    model = size.build() if cases else None
    for case in cases:
        some = everyone if case == main_case else few
        work = partial(time_case, model, some, case)
        found = store.get(f"wide, batch {case.batch}, length {case.length}", [size, some, case, threads], work)
        rows += page.wide_rows("wide", some, found, case, threads)
    if "parts" in stages and not quick:
        torch.set_num_threads(1)
        work = partial(time_case, asrd.load("tiny")[0], everyone, TINY_PARTS)
        found = store.get("parts, tiny", [everyone, TINY_PARTS, on_tiny.weights()], work)
        rows += page.wide_rows("tiny, fixed passes", everyone, found, TINY_PARTS, threads=1)
    return rows


def machine() -> dict[str, Any]:
    """Hardware and versions."""
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": git_commit()["commit"],
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


if __name__ == "__main__":
    main()
