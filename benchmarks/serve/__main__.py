"""`python -m benchmarks.serve --out DIR [--seconds 60] [--shares 0.1 0.5 0.9 1 1.5 2] [--slots 16]`.

Measures the bare engine and `asrd serve`, a process of its own, both kept busy, in turns; then offers the server shares
of the larger of the two rates. Every answer is compared with `fast_generate` on its prompt alone. Writes results.json,
serve.md and serve-load.png (and -dark).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import asrd
from asrd.lab.tiny.task import held_out
from asrd.memory import keep_freed_memory
from benchmarks.serve import plots
from benchmarks.serve.client import Client
from benchmarks.serve.process import Server, server

TOKENS = 48
STREAM = {"stream": True}
Row = dict[str, Any]


class Bare:
    """The engine without a server, all slots busy."""

    def __init__(self, prompts: Sequence[str], slots: int) -> None:
        keep_freed_memory()  # as the server does
        self.model, self.tokenizer = asrd.load("tiny")
        self.prompts, self.slots = prompts, slots

    def expected(self) -> dict[str, str]:
        """The text of each prompt, decoded alone."""
        found = {}
        for prompt in self.prompts:
            ids = torch.tensor([self.tokenizer(prompt)["input_ids"]])
            out: Any = asrd.fast_generate(self.model, ids, max_new_tokens=TOKENS)
            found[prompt] = self.tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True)
        return found

    def run(self, count: int) -> Row:
        """So many requests, all submitted at once."""
        engine = asrd.Engine(self.model, self.tokenizer, self.slots, max_new_tokens=TOKENS, chat=False)
        begun, used = time.perf_counter(), time.process_time()
        for index in range(count):
            engine.submit(self.prompts[index % len(self.prompts)])
        done = sum(1 for _ in engine.run())
        return {"per_second": done / (time.perf_counter() - begun), "cpu": (time.process_time() - used) / done}


def kept_busy(running: Server, client: Client, slots: int, count: int) -> Row:
    """The server with twice as many clients as slots that never pause."""
    prompts, used = list(client.expected), running.cpu
    many = [prompts[index % len(prompts)] for index in range(count)]
    row = asyncio.run(client.keep_busy(2 * slots, many)).row
    return row | {"cpu": (running.cpu - used) / max(row["answered"], 1)}


def middle(rounds: Sequence[Row]) -> Row:
    """The median of several rounds; counts are summed."""
    sums = {name: sum(row[name] for row in rounds) for name in ("requests", "wrong", "errors") if name in rounds[0]}
    return {name: statistics.median(row[name] for row in rounds) for name in rounds[0]} | sums


def in_turns(bare: Bare, running: Server, plain: Client, stream: Client, rounds: int, count: int) -> dict[str, Row]:
    """Engine, server and streaming server, each once a round; a first round is not counted."""
    found: dict[str, list[Row]] = {"engine": [], "server": [], "streaming": []}
    for number in range(rounds + 1):
        total = count if number else 2 * bare.slots
        now = {
            "engine": bare.run(total),
            "server": kept_busy(running, plain, bare.slots, total),
            "streaming": kept_busy(running, stream, bare.slots, total),
        }
        if number:
            print("  ".join(f"{name} {row['per_second']:.2f}/s" for name, row in now.items()), flush=True)
            for name, row in now.items():
                found[name].append(row)
    return {name: middle(rows) for name, rows in found.items()}


def page(result: dict[str, Any]) -> str:
    """The tables."""
    lines = ["| kept busy | requests/s | of the bare engine | processor per request | wrong | errors |"]
    lines += ["|---|---|---|---|---|---|"]
    names = {"engine": "bare engine", "server": "server", "streaming": "server, streamed"}
    for name, about in names.items():
        row, share = result[name], result[name]["per_second"] / result["engine"]["per_second"]
        counts = f"{row['wrong']} of {row['requests']} | {row['errors']}" if "wrong" in row else " | "
        lines.append(f"| {about} | {row['per_second']:.2f} | {share:.0%} | {1e3 * row['cpu']:.0f} ms | {counts} |")
    lines += ["", "| offered load | requests/s offered | answered/s | median | p95 | wrong | errors | 429 | memory |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for row in result["offered"]:
        figures = f"{row['offered']:.1f} | {row['per_second']:.1f} | {row['p50']:.2f} s | {row['p95']:.2f} s"
        counts = f"{row['wrong']} of {row['answered']} | {row['errors']} | {row['refused']} | {row['memory']:.0f} MB"
        lines.append(f"| {row['share']:.0%} | {figures} | {counts} |")
    return "\n".join(lines) + "\n"


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    bare = Bare([problem.question for problem in held_out(arguments.prompts)], arguments.slots)
    texts = bare.expected()
    with server(arguments.slots) as running:
        plain, stream = (Client(running.port, texts, {"max_tokens": TOKENS} | more) for more in ({}, STREAM))
        result: dict[str, Any] = in_turns(bare, running, plain, stream, arguments.rounds, arguments.requests)
        capacity = max(result[name]["per_second"] for name in ("engine", "server"))
        result |= {"capacity": capacity, "offered": []}
        for share in arguments.shares:
            begun, rate = running.now, share * capacity
            row = asyncio.run(plain.offer(rate, arguments.seconds)).row
            row |= {"share": share, "offered": rate, "memory": running.largest(begun)}
            result["offered"].append(row)
            print(row, flush=True)
        result["memory"] = running.memory
    return result


def main(argv: list[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__.splitlines()[2])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each offered load")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 1.5, 2.0])
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="of engine and server, each kept busy")
    parser.add_argument("--requests", type=int, default=160, help="of a round")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    result = measure(arguments)
    result["note"] = (
        f"tiny, {arguments.slots} slots, {TOKENS} tokens at most, one thread, {arguments.seconds:g} s a point; 100 % is"
        f" {result['capacity']:.1f} requests/s, what engine or server did when kept busy"
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    (arguments.out / "serve.md").write_text(page(result), encoding="utf-8")
    plots.draw(result, arguments.out / "serve-load.png")
    print(page(result))


if __name__ == "__main__":
    main()
