"""`python -m benchmarks.engine --out DIR [--requests 512] [--slots 1 4 16] [--threads 1 2] [--rounds 3] [--load 6]`.

Servers take turns within each round, so that a busy machine slows them alike; tables show medians over rounds and the
range of the engine's ratio to each. Writes results.json, engine.md and engine-load.png (and -dark).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import asrd
from benchmarks.engine import plots
from benchmarks.engine.loads import ANSWERS, PROMPTS, UNIFORM, Asked, load
from benchmarks.engine.serving import SERVERS, overhead

Row = dict[str, Any]
ARRIVING = ("engine", "static batches")  # servers under an offered load
PART = {"one by one": 4}  # serves every fourth request: alone, one takes the same time whatever the others are


def throughput(model: Any, arguments: argparse.Namespace) -> list[Row]:
    """Requests per second of every server, load, number of slots and threads, and the engine's own time."""
    rows: list[Row] = []
    cases = [(kind, t, s) for kind in ("mixed", "uniform") for t in arguments.threads for s in arguments.slots]
    with tqdm(total=len(cases) * arguments.rounds * len(SERVERS), unit="run", desc="throughput") as bar:
        for kind, threads, slots in cases:
            torch.set_num_threads(threads)
            requests = load(kind, arguments.requests)
            for server in SERVERS.values():  # untimed
                server(model, requests[:slots], [0.0] * slots, slots)
            seconds: dict[str, list[float]] = {name: [] for name in SERVERS}
            for _ in range(arguments.rounds):
                for name, server in SERVERS.items():
                    part = requests[:: PART.get(name, 1)]
                    took = max(server(model, part, [0.0] * len(part), slots))
                    seconds[name].append(took * len(requests) / len(part))
                    bar.update()
            own, share = overhead(model, requests, slots)
            case = {"load": kind, "threads": threads, "slots": slots, "requests": len(requests)}
            rows += [case | row_of(name, seconds, len(requests)) for name in SERVERS]
            rows[-len(SERVERS)] |= {"overhead_ms": own, "overhead": share}
    return rows


def row_of(name: str, seconds: dict[str, list[float]], count: int) -> Row:
    """A server's figures; the ratios are the engine's speed over its own, round by round."""
    ratios = [own / engine for own, engine in zip(seconds[name], seconds["engine"], strict=True)]
    return {
        "server": name,
        "requests_per_second": count / statistics.median(seconds[name]),
        "engine_faster": statistics.median(ratios),
        "engine_faster_low": min(ratios),
        "engine_faster_high": max(ratios),
        "seconds": seconds[name],
    }


def offered(model: Any, arguments: argparse.Namespace, capacity: float) -> list[Row]:
    """Throughput and latency of requests that arrive at random, at shares of what the engine can take."""
    slots, rows = max(arguments.slots), []
    torch.set_num_threads(arguments.threads[-1])
    requests = load("mixed", arguments.requests)
    rates = [capacity * (index + 1) / (arguments.load - 1) for index in range(arguments.load)]
    for rate in tqdm(rates, unit="rate", desc="offered load"):
        for name in ARRIVING:
            arrivals = poisson(rate, len(requests))
            finished = SERVERS[name](model, requests, arrivals, slots)
            rows.append({"server": name, "slots": slots, "offered": rate} | latencies(finished, arrivals))
    return rows


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    """Times of arrival at `rate` per second."""
    rng, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        times.append(now)
    return times


def latencies(finished: Sequence[float], arrivals: Sequence[float]) -> Row:
    """Answered requests per second, and seconds from arrival to answer."""
    waits = sorted(end - begin for end, begin in zip(finished, arrivals, strict=True))
    at = lambda share: waits[min(int(share * len(waits)), len(waits) - 1)]  # noqa: E731
    return {"served": len(waits) / max(finished), "p50": at(0.5), "p95": at(0.95)}


def page(rows: Sequence[Row]) -> str:
    """The throughput table."""
    lines = [
        "| load | threads | slots | server | requests/s | engine is faster by | engine's own time |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = f"{row['engine_faster']:.2f} ({row['engine_faster_low']:.2f}-{row['engine_faster_high']:.2f})"
        own = f"{row['overhead_ms']:.2f} ms a step, {row['overhead']:.1%}" if "overhead" in row else ""
        lines.append(
            f"| {row['load']} | {row['threads']} | {row['slots']} | {row['server']} |"
            f" {row['requests_per_second']:.2f} | {'' if row['server'] == 'engine' else ratio} | {own} |"
        )
    return "\n".join(lines) + "\n"


def wasted(model: Any, requests: Sequence[Asked], slots: int) -> float:
    """Share of the positions of the engine's forward passes that are padding."""
    engine = asrd.Engine(model, slots=slots)
    for asked in requests:
        engine.submit(asked.prompt, max_new_tokens=asked.length)
    for _ in engine.run():
        pass
    return engine.usage.wasted


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=512)
    options.add_argument("--slots", type=int, nargs="+", default=[1, 4, 16])
    options.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--load", type=int, default=6, help="offered loads, the last above capacity; 0: none")
    options.add_argument("--out", type=Path, required=True)
    arguments = options.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    model, _ = asrd.load("tiny")
    rows = throughput(model, arguments)
    text = page(rows)
    padding = wasted(model, load("mixed", arguments.requests), max(arguments.slots))
    text += f"\nPadding on the mixed load, {max(arguments.slots)} slots: {padding:.0%} of all positions.\n"
    results: Row = {"throughput": rows, "padding": padding, "prompts": PROMPTS, "answers": ANSWERS, "uniform": UNIFORM}
    if arguments.load > 1:
        last = [row for row in rows if row["load"] == "mixed" and row["server"] == "engine"][-1]
        results["offered"] = offered(model, arguments, last["requests_per_second"])
        note = f"tiny, {last['slots']} slots, {last['threads']} thread(s), {arguments.requests} requests, mixed load"
        plots.draw(results["offered"], arguments.out / "engine-load.png", note)
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1))
    (arguments.out / "engine.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
