"""A bounded load on loopback: each answer is compared with the decode of its prompt alone."""

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
    no_hint: int = 0  # refusals (429) that do not say when to come back
    waits: list[float] = field(default_factory=list)  # seconds to each answer
    seconds: float = 0.0  # from the first request to the last answer

    @property
    def row(self) -> dict[str, Any]:
        """The figures of the run."""
        waits = sorted(self.waits) or [0.0]
        at = lambda share: waits[min(int(share * len(waits)), len(waits) - 1)]  # noqa: E731
        other = sum(count for status, count in self.statuses.items() if status not in (200, 429))
        return {
            "requests": sum(self.statuses.values()),
            "answered": self.statuses[200],
            "refused": self.statuses[429],
            "errors": other + self.no_hint,  # 5xx, broken connections, anything that is not as designed
            "wrong": self.wrong,
            "per_second": self.statuses[200] / self.seconds if self.seconds else 0.0,
            "p50": at(0.5),
            "p95": at(0.95),
        }


@dataclass(frozen=True)
class Client:
    """Asks the server at `port`; prompts are the keys of `expected`, right answers its values.

    fields: of every request besides model and prompt
    """

    port: int
    expected: Mapping[str, str]
    fields: Mapping[str, Any]

    async def offer(self, rate: float, seconds: float) -> Seen:
        """Requests at random times, `rate` per second, for so many seconds."""
        rng, seen, begun, tasks = random.Random(0), Seen(), time.perf_counter(), []
        prompts, due = list(self.expected), 0.0
        while due < seconds and len(tasks) < MOST:
            await asyncio.sleep(max(0.0, due - (time.perf_counter() - begun)))
            tasks.append(asyncio.create_task(self._ask(rng.choice(prompts), seen)))
            due += rng.expovariate(rate)
        await asyncio.gather(*tasks)
        seen.seconds = time.perf_counter() - begun
        return seen

    async def keep_busy(self, clients: int, prompts: Sequence[str]) -> Seen:
        """Each prompt once, by so many clients that send the next as soon as they have an answer."""
        seen, begun, waiting = Seen(), time.perf_counter(), iter(prompts)

        async def client() -> None:
            for prompt in waiting:
                await self._ask(prompt, seen)

        await asyncio.gather(*(client() for _ in range(clients)))
        seen.seconds = time.perf_counter() - begun
        return seen

    async def _ask(self, prompt: str, seen: Seen) -> None:
        body = json.dumps({"model": "tiny", "prompt": prompt, **self.fields}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        begun = time.perf_counter()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            content = await reader.read()
            writer.close()
            status = int(content.split(b" ", 2)[1])
        except (OSError, IndexError, ValueError):
            status, content = 0, b""
        seen.statuses[status] += 1
        headers, _, answer = content.partition(b"\r\n\r\n")
        seen.no_hint += status == 429 and b"\r\nretry-after: " not in headers.lower()
        if status == 200:
            seen.waits.append(time.perf_counter() - begun)
            seen.wrong += text_of(answer, bool(self.fields.get("stream"))) != self.expected[prompt]


def text_of(answer: bytes, streamed: bool) -> str | None:
    """The text of an answer, joined if it was streamed; None if it is not whole."""
    if not streamed:
        return str(json.loads(answer)["choices"][0]["text"])
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
    if events[-1:] != [b"[DONE]"]:
        return None
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
