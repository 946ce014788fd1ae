"""`CompletionMonitor`: tells the host which rows are done or have unreadable logits, without stalling a GPU.

Each step leaves one number per row. On a CPU it is read at once. On a GPU it is copied to pinned
memory and read while the next step runs. A done row is a fixed point and its step counter stands still, so the forward
pass that is in flight by then changes nothing.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from asrd.engine.device.gpu import Gpu, Work


class CompletionMonitor:
    """Status of a decode: `DecodeState.report`, written by every step, read by the host in `poll`, at once or, with a
    gpu, a step late."""

    def __init__(self, report: Tensor, gpu: Gpu | None = None) -> None:
        self.written, self.gpu = report, gpu
        self.buffers = [gpu.pinned(self.written) for _ in range(2)] if gpu else []  # double buffer
        self.in_flight: deque[tuple[Work, Tensor]] = deque()

    def poll(self) -> bool:
        """Are all rows known to be done? Raises if the logits of a wanted position could not be read."""
        if self.gpu is None:
            return _read(self.written)
        buffers = self.buffers[0]
        self.buffers.reverse()
        self.in_flight.append((self.gpu.send(self.written, buffers), buffers))
        return len(self.in_flight) > 1 and self._read_oldest()

    def drain(self) -> None:
        """Read the reports that are still in flight; the last steps may have been unreadable, too."""
        while self.in_flight:
            self._read_oldest()

    def _read_oldest(self) -> bool:
        wait, buffers = self.in_flight.popleft()
        wait()
        return _read(buffers)


def _read(report: Tensor) -> bool:
    rows = report.tolist()
    unreadable = [row for row, number in enumerate(rows) if number & 2]
    if unreadable:
        row, step = unreadable[0], rows[unreadable[0]] // 4
        raise ValueError(
            f"the model's logits for row {row} of the batch are NaN, +inf or nothing but -inf at forward pass {step}:"
            " check its weights and dtype (float16 overflows easily; try bfloat16 or float32)"
        )
    return all(number & 1 for number in rows)
