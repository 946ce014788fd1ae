"""`CompletionMonitor`: tells the host which rows are done or have unreadable logits, without stalling a GPU.

Each step leaves one number per row. On a CPU it is read at once. On a GPU it is copied to pinned
memory and read while the next step runs. A done row is a fixed point and its step counter stands still, so the forward
pass that is in flight by then changes nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from torch import Tensor

from asrd.engine.device.gpu import Gpu, Work


class Report(NamedTuple):
    """What one step reported."""

    tags: tuple[Any, ...]  # whose rows they were
    numbers: list[int]  # for each row 4 x its forward passes, + 2 if a wanted position is unreadable, + 1 if done


class CompletionMonitor:
    """Status of a batch: `DecodeState.report`, written by every step, read by the host in `poll`, at once or, with a
    gpu, a step late."""

    def __init__(self, report: Tensor, gpu: Gpu | None = None) -> None:
        self.written, self.gpu = report, gpu
        self.buffers = [gpu.pinned(self.written) for _ in range(2)] if gpu else []  # double buffer
        self.in_flight: deque[tuple[Work, Tensor, tuple[Any, ...]]] = deque()

    def poll(self, tags: tuple[Any, ...]) -> list[Report]:
        """The reports that are there: that of the step just taken, by rows with these tags, or of the one before."""
        if self.gpu is None:
            return [Report(tags, self.written.tolist())]
        buffer = self.buffers[0]
        self.buffers.reverse()
        self.in_flight.append((self.gpu.send(self.written, buffer), buffer, tags))
        return [self._read_oldest()] if len(self.in_flight) > 1 else []

    def drain(self) -> list[Report]:
        """The reports that are still in flight; the last steps may have been unreadable, too."""
        return [self._read_oldest() for _ in range(len(self.in_flight))]

    def _read_oldest(self) -> Report:
        wait, buffer, tags = self.in_flight.popleft()
        wait()
        return Report(tags, buffer.tolist())


def unreadable(what: str, step: int) -> ValueError:
    """The error that says so."""
    return ValueError(
        f"the model's logits for {what} are NaN, +inf or nothing but -inf at forward pass {step}:"
        " check its weights and dtype (float16 overflows easily; try bfloat16 or float32)"
    )
