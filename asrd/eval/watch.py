"""What an engine's decodes cost and did, request by request: seconds, anchors, flip-flops."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from asrd.engine.observers.events import EventObserver, Moment, StepEvents, moment_of
from asrd.engine.observers.flip_flops import FlipFlops
from asrd.many import Handle
from asrd_kernels import DecodeState


@dataclass
class Seen:
    """One request. `anchors` are the positions that were promoted, in order; None: not watched."""

    seconds: float = 0.0
    anchors: list[int] | None = None
    flip_flops: FlipFlops = field(default_factory=FlipFlops)
    observer: EventObserver | None = None


class Watch:
    """An observer of an `Engine`. A step's seconds, its own time left out, are shared equally by those in it.

    events: also watch what happens to every token. That copies each step's state to the host, which on a GPU makes it
    wait: for wall-clock figures leave it out.
    """

    def __init__(self, mask_id: int, eos_ids: Sequence[int], events: bool) -> None:
        self.mask_id, self.eos_ids, self.events = mask_id, tuple(eos_ids), events
        self.seen: dict[int, Seen] = {}
        self.since = time.perf_counter()

    def __call__(self, state: DecodeState, handles: tuple[Handle | None, ...]) -> None:
        running = [(slot, handle.index) for slot, handle in enumerate(handles) if handle is not None]
        share = (time.perf_counter() - self.since) / max(1, len(running))
        moment = moment_of(state) if self.events else None
        for slot, index in running:
            if index not in self.seen:
                self.seen[index] = self._new()
            seen = self.seen[index]
            seen.seconds += share
            if moment is not None and seen.observer is not None:
                seen.observer.see(Moment(*(values[slot : slot + 1] for values in moment)))
        self.resume()

    def resume(self) -> None:
        """Time counts from now on."""
        self.since = time.perf_counter()

    def _new(self) -> Seen:
        if not self.events:
            return Seen()
        anchors: list[int] = []
        seen = Seen(anchors=anchors)

        def handle(events: StepEvents) -> None:
            anchors.extend(events.promoted[0].nonzero().flatten().tolist())
            seen.flip_flops.see(events)

        seen.observer = EventObserver(self.mask_id, self.eos_ids, handle)
        return seen
