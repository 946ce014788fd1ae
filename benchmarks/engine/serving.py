"""Who serves requests: the engine, static padded batches in the order of arrival, or one decode after the other.

Each server takes requests with their times of arrival (all 0: a closed queue) and says when each was answered. A static
batch is as long as its longest prompt and answer; what a shorter request did not ask for is cut off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import asrd
from asrd.engine import batch as batches
from asrd.engine.device.gpu import fixed_shapes
from benchmarks.engine.loads import Asked

Server = Callable[[Any, Sequence[Asked], Sequence[float], int], list[float]]


def by_engine(model: Any, load: Sequence[Asked], arrivals: Sequence[float], slots: int) -> list[float]:
    """Requests are submitted as they arrive; seconds from the start to each one's result."""
    engine = asrd.Engine(model, slots=slots)
    finished, started, submitted = [0.0] * len(load), time.perf_counter(), 0
    while submitted < len(load) or engine.pending:
        now = time.perf_counter() - started
        while submitted < len(load) and arrivals[submitted] <= now:
            engine.submit(load[submitted].prompt, max_new_tokens=load[submitted].length)
            submitted += 1
        if not engine.pending:
            time.sleep(max(0.0, arrivals[submitted] - now))
            continue
        for result in engine.step():
            assert result.error is None
            finished[result.index] = time.perf_counter() - started
    return finished


def by_batches(
    model: Any, load: Sequence[Asked], arrivals: Sequence[float], slots: int, all_rows: bool = False
) -> list[float]:
    """Whatever has arrived, at most `slots` of it, is a batch; the next one begins when it is over."""
    shapes = fixed_shapes if all_rows else nullcontext  # fixed ones have all rows to the end
    finished, started = [0.0] * len(load), time.perf_counter()
    begin = 0
    while begin < len(load):
        now = time.perf_counter() - started
        if arrivals[begin] > now:
            time.sleep(arrivals[begin] - now)
            continue
        end = begin
        while end < len(load) and end - begin < slots and arrivals[end] <= now:
            end += 1
        some = load[begin:end]
        width, pad = max(len(asked.prompt) for asked in some), model.config.pad_token_id
        ids = torch.tensor([[pad] * (width - len(asked.prompt)) + asked.prompt for asked in some])
        mask = torch.tensor([[0] * (width - len(asked.prompt)) + [1] * len(asked.prompt) for asked in some])
        longest = max(asked.length for asked in some)
        with shapes():
            asrd.fast_generate(model, ids, mask, max_new_tokens=longest)
        finished[begin:end] = [time.perf_counter() - started] * (end - begin)
        begin = end
    return finished


def with_all_rows(model: Any, load: Sequence[Asked], arrivals: Sequence[float], slots: int) -> list[float]:
    """Static batches in which rows that are done are computed until the last one is."""
    return by_batches(model, load, arrivals, slots, all_rows=True)


def one_by_one(model: Any, load: Sequence[Asked], arrivals: Sequence[float], slots: int) -> list[float]:
    """Each request alone."""
    return by_batches(model, load, arrivals, slots=1)


SERVERS: dict[str, Server] = {
    "engine": by_engine,
    "static batches": by_batches,
    "static, done rows stay": with_all_rows,
    "one by one": one_by_one,
}


@dataclass
class StepTime:
    """Seconds within steps (embed, forward, statistics, commit), and how many there were."""

    seconds: float = 0.0
    steps: int = 0


@contextmanager
def timed_steps() -> Iterator[StepTime]:
    """Times the steps of all batches that are made within."""
    plain, found = batches.step, StepTime()

    def timed(*arguments: Any) -> None:
        started = time.perf_counter()
        plain(*arguments)
        found.seconds += time.perf_counter() - started
        found.steps += 1

    batches.step = timed
    try:
        yield found
    finally:
        batches.step = plain


def overhead(model: Any, load: Sequence[Asked], slots: int) -> tuple[float, float]:
    """The engine's own time: milliseconds per step, and as a share of the time within steps."""
    started = time.perf_counter()
    with timed_steps() as inside:
        by_engine(model, load, [0.0] * len(load), slots)
    outside = time.perf_counter() - started - inside.seconds
    return 1e3 * outside / inside.steps, outside / inside.seconds
