"""`Lookout`: how the host learns that all rows are done, or that logits could not be read, without holding a GPU up.

After each step the device writes a report of four numbers. On a CPU it is read at once. On a GPU it is copied to pinned
memory while the host queues the next step, and read then. A done row is a fixed point and its step counter stands
still, so the forward pass that is under way by that time changes nothing.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from asrd.gpu import Gpu, Work
from asrd_kernels import DecodeState, VocabStats


class Lookout:
    """Reports on a decode: written by the device in `report`, read by the host in `look`, at once or a step late.

    state and stats [B, N] are those that every step changes in place; with a gpu, reading is late.
    """

    def __init__(self, state: DecodeState, stats: VocabStats, gpu: Gpu | None = None) -> None:
        self.state, self.stats, self.gpu = state, stats, gpu
        self.written = torch.zeros(4, dtype=torch.int64, device=state.done.device)
        self.rooms = [gpu.pinned(self.written) for _ in range(2)] if gpu else []  # one is read, one on its way
        self.under_way: deque[tuple[Work, Tensor]] = deque()

    def report(self) -> None:
        """On the device: are all rows done, is a wanted position unreadable, in which row first and at which pass."""
        unreadable, row = self.stats.bad.any(1).view(torch.uint8).max(0, keepdim=True)
        done = self.state.done.all()[None]
        torch.cat([done.long(), unreadable.long(), row, self.state.step.gather(0, row)], out=self.written)

    def look(self) -> bool:
        """Are all rows known to be done? Raises if the logits of a wanted position could not be read."""
        if self.gpu is None:
            return _read(self.written)
        room = self.rooms[0]
        self.rooms.reverse()
        self.under_way.append((self.gpu.send(self.written, room), room))
        return len(self.under_way) > 1 and self._read_oldest()

    def look_back(self) -> None:
        """Read what is still on its way; the last steps may have been unreadable, too."""
        while self.under_way:
            self._read_oldest()

    def _read_oldest(self) -> bool:
        wait, room = self.under_way.popleft()
        wait()
        return _read(room)


def _read(report: Tensor) -> bool:
    done, unreadable, row, step = report.tolist()
    if unreadable:
        raise ValueError(
            f"the model's logits for row {row} of the batch are NaN, +inf or nothing but -inf at forward pass {step}:"
            " check its weights and dtype (float16 overflows easily; try bfloat16 or float32)"
        )
    return bool(done)
