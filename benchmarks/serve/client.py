"""A bounded load on loopback: requests at random times, each answer compared with the decode of its prompt alone."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST = 4000  # requests of one run, whatever rate is asked for


@dataclass
class Seen:
    """What a run of requests saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    wrong: int = 0  # answers that differ from the decode alone
    waits: list[float] = field(default_factory=list)  # seconds to each answer
    seconds: float = 0.0  # from the first request to the last answer

    def row(self, offered: float) -> dict[str, Any]:
        """The figures of the run."""
        waits = sorted(self.waits) or [0.0]
        at = lambda share: waits[min(int(share * len(waits)), len(waits) - 1)]  # noqa: E731
        return {
            "offered": offered,
            "requests": sum(self.statuses.values()),
            "answered": self.statuses[200],
            "refused": self.statuses[429],
            "server_errors": sum(count for status, count in self.statuses.items() if status >= 500 or status == 0),
            "wrong": self.wrong,
            "per_second": self.statuses[200] / self.seconds if self.seconds else 0.0,
            "p50": at(0.5),
            "p95": at(0.95),
        }


async def offer(port: int, rate: float, seconds: float, expected: Mapping[str, str], fields: Any) -> Seen:
    """Requests at `rate` per second for so many seconds; prompts are the keys of `expected`, answers its values."""
    rng, seen, begun, tasks = random.Random(0), Seen(), time.perf_counter(), []
    prompts, due = list(expected), 0.0
    while due < seconds and len(tasks) < MOST:
        await asyncio.sleep(max(0.0, due - (time.perf_counter() - begun)))
        prompt = rng.choice(prompts)
        tasks.append(asyncio.create_task(_ask(port, prompt, expected[prompt], fields, seen)))
        due += rng.expovariate(rate)
    await asyncio.gather(*tasks)
    seen.seconds = time.perf_counter() - begun
    return seen


async def keep_busy(port: int, clients: int, prompts: Sequence[str], expected: Mapping[str, str], fields: Any) -> Seen:
    """Each prompt once, by so many clients that send the next as soon as they have an answer."""
    seen, begun, waiting = Seen(), time.perf_counter(), iter(prompts)

    async def client() -> None:
        for prompt in waiting:
            await _ask(port, prompt, expected[prompt], fields, seen)

    await asyncio.gather(*(client() for _ in range(clients)))
    seen.seconds = time.perf_counter() - begun
    return seen


async def _ask(port: int, prompt: str, answer: str, fields: Any, seen: Seen) -> None:
    body = json.dumps({"model": "tiny", "prompt": prompt} | fields).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    begun = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        content = await reader.read()
        writer.close()
        status = int(content.split(b" ", 2)[1])
    except (OSError, IndexError, ValueError):
        status, content = 0, b""
    seen.statuses[status] += 1
    if status == 200:
        seen.waits.append(time.perf_counter() - begun)
        seen.wrong += json.loads(content.partition(b"\r\n\r\n")[2])["choices"][0]["text"] != answer
