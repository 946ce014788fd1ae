"""`Inspector`: an observer that sees inside a step, and `StepClock`, the one that times its parts.

Knows when a step begins and which parts it has. The loop calls it; each inspector decides what to do with it.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from asrd.engine.decoder import Decoder
from asrd_kernels import DecodeState, VocabStats

PARTS = ("embed", "forward", "head", "statistics", "commit")  # of a step, in their order


class Inspector:
    """An observer for `fast_generate(observers=[...])` that is also told when a step begins and when each part of it
    is over. Nothing it is shown may be changed. A decode with an inspector runs every part from the host, never as a
    captured graph; without one it costs nothing.
    """

    def begin(self, decoder: Decoder, state: DecodeState) -> None:
        """A step begins with this state."""

    def mark(self, part: str, stats: VocabStats | None = None) -> None:
        """This one of `PARTS` is over; after "statistics", these are they."""

    def __call__(self, state: DecodeState) -> None:
        """The step is over."""


class StepClock(Inspector):
    """How long each part of each step took. On CUDA by events of the stream, read afterwards."""

    def __init__(self) -> None:
        self._marks: list[list[Any]] = []
        self._on_cuda = False

    def begin(self, decoder: Decoder, state: DecodeState) -> None:
        """Start the clock of a step."""
        self._on_cuda = state.tokens.is_cuda
        self._marks.append([self._now()])

    def mark(self, part: str, stats: VocabStats | None = None) -> None:
        """Note the time."""
        self._marks[-1].append(self._now())

    def take(self) -> list[tuple[float, ...]]:
        """Milliseconds of each step since the last call, by `PARTS`; forgets them."""
        marks, self._marks = self._marks, []
        if self._on_cuda:
            torch.cuda.synchronize()
            return [tuple(a.elapsed_time(b) for a, b in pairwise(m)) for m in marks]
        return [tuple(1e3 * (b - a) for a, b in pairwise(m)) for m in marks]

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
