"""`CompletionMonitor`: tells the host which rows are done or have unreadable logits, without stalling a GPU.

After each step the device writes one number per row. On a CPU it is read at once. On a GPU it is copied to pinned
memory and read while the next step runs. A done row is a fixed point and its step counter stands still, so the forward
pass that is in flight by then changes nothing.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from asrd.engine.device.gpu import Gpu, Work
from asrd_kernels import DecodeState, VocabStats


class CompletionMonitor:
    """Status of a decode: written by the device in `report`, read by the host in `poll`, at once or a step late.

    state and stats [B, N] are those that every step changes in place; with a gpu, reading is late.
    """

    def __init__(self, state: DecodeState, stats: VocabStats, gpu: Gpu | None = None) -> None:
        self.state, self.stats, self.gpu = state, stats, gpu
        self.written = torch.zeros_like(state.step)
        self.buffers = [gpu.pinned(self.written) for _ in range(2)] if gpu else []  # double buffer
        self.in_flight: deque[tuple[Work, Tensor]] = deque()

    def report(self) -> None:
        """On the device, for each row: 4 x its forward passes, + 2 if a wanted position is unreadable, + 1 if done."""
        torch.add(self.state.done, self.state.step, alpha=4, out=self.written)
        self.written.add_(self.stats.bad.any(1), alpha=2)

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
