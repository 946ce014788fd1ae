"""`python -m benchmarks.serve --out DIR [--seconds 60] [--shares 0.1 0.5 0.9 1 1.5 2] [--slots 16]`.

Measures the bare engine, starts `asrd serve` as a process of its own, keeps it busy, then offers it shares of what the
engine can do. Every answer is compared with `fast_generate` on its prompt alone. Writes results.json, serve.md and
serve-load.png (and -dark).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

import asrd
from asrd.lab.tiny.task import held_out
from benchmarks.serve import plots
from benchmarks.serve.client import keep_busy, offer

TOKENS = 48
FIELDS = {"max_tokens": TOKENS}


def expected(prompts: Sequence[str]) -> dict[str, str]:
    """The text of each prompt, decoded alone."""
    model, tokenizer = asrd.load("tiny")
    found = {}
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        out = asrd.fast_generate(model, ids, max_new_tokens=TOKENS)
        found[prompt] = tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True)  # type: ignore[index]
    return found


def bare_engine(prompts: Sequence[str], slots: int, count: int) -> tuple[float, float]:
    """Requests per second, and processor seconds per request, of the engine alone, all slots busy."""
    model, tokenizer = asrd.load("tiny")
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    for round_ in range(2):  # the first is not timed
        engine = asrd.Engine(model, tokenizer, slots, max_new_tokens=TOKENS)
        begun, used = time.perf_counter(), time.process_time()
        total = 2 * slots if round_ == 0 else count
        done = sum(1 for _ in engine.run(ids[index % len(ids)] for index in range(total)))
    return done / (time.perf_counter() - begun), (time.process_time() - used) / done


@contextmanager
def server(slots: int) -> Iterator[tuple[int, psutil.Process]]:
    """`asrd serve` as a process; its port, and the process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "asrd", "serve", "--port", str(port), "--slots", str(slots)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def page(result: dict[str, Any]) -> str:
    """The table."""
    lines = [
        f"Bare engine {result['engine']:.1f} requests/s, {1e3 * result['engine_cpu']:.0f} ms of processor each; server"
        f" kept busy {result['busy']['per_second']:.1f} requests/s, {1e3 * result['busy']['cpu']:.0f} ms each.",
        "",
        "| offered load | requests/s offered | answered/s | p50 | p95 | 429 | 5xx | wrong | memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["offered"]:
        figures = f"{row['offered']:.1f} | {row['per_second']:.1f} | {row['p50']:.2f} s | {row['p95']:.2f} s"
        counts = f"{row['refused']} | {row['server_errors']} | {row['wrong']} | {row['memory']:.0f} MB"
        lines.append(f"| {row['share']:.0%} | {figures} | {counts} |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.splitlines()[2])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each offered load")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.5, 0.9, 1.0, 1.5, 2.0])
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=32)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    prompts = [problem.question for problem in held_out(arguments.prompts)]
    texts = expected(prompts)
    count = max(4 * arguments.slots, min(600, int(arguments.seconds * 8)))
    engine, engine_cpu = bare_engine(prompts, arguments.slots, count)
    print(f"bare engine: {engine:.1f} requests/s, {1e3 * engine_cpu:.0f} ms of processor each", flush=True)
    rows = []
    with server(arguments.slots) as (port, process):
        asyncio.run(keep_busy(port, arguments.slots, prompts, texts, FIELDS))  # not timed
        many = [prompts[index % len(prompts)] for index in range(count)]
        used = sum(process.cpu_times()[:2])
        busy = asyncio.run(keep_busy(port, 2 * arguments.slots, many, texts, FIELDS)).row(0.0)
        busy["cpu"] = (sum(process.cpu_times()[:2]) - used) / max(busy["answered"], 1)
        print(f"server kept busy: {busy}", flush=True)
        for share in arguments.shares:
            seen = asyncio.run(offer(port, share * engine, arguments.seconds, texts, FIELDS))
            rows.append(seen.row(share * engine) | {"share": share, "memory": process.memory_info().rss / 1e6})
            print(rows[-1], flush=True)
    result = {
        "engine": engine,
        "engine_cpu": engine_cpu,
        "busy": busy,
        "offered": rows,
        "seconds": arguments.seconds,
        "slots": arguments.slots,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    (arguments.out / "serve.md").write_text(page(result), encoding="utf-8")
    note = (
        f"tiny, {arguments.slots} slots, one thread, {arguments.seconds:g} s each; bare engine {engine:.1f} requests/s"
    )
    plots.draw(rows, engine, arguments.out / "serve-load.png", note)
    print(page(result))


if __name__ == "__main__":
    main()
