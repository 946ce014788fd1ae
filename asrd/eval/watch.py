"""What happened to the tokens of each text: anchors and flip-flops."""

from __future__ import annotations

import time
from collections.abc import Sequence

from asrd.engine.observers.events import EventObserver, Moment, StepEvents, moment_of
from asrd.engine.observers.flip_flops import FlipFlops
from asrd.engine.request import Request
from asrd_kernels import DecodeState


class Seen:
    """One request. `anchors` are the positions that were promoted, in order."""

    def __init__(self, mask_id: int, eos_ids: Sequence[int]) -> None:
        self.anchors: list[int] = []
        self.flip_flops = FlipFlops()
        self.observer = EventObserver(mask_id, eos_ids, self._handle)

    def _handle(self, events: StepEvents) -> None:
        self.anchors.extend(events.promoted[0].nonzero().flatten().tolist())
        self.flip_flops.see(events)


class Watch:
    """An observer of an `Engine`. It copies each step's state to the host, which makes a GPU wait."""

    def __init__(self, mask_id: int, eos_ids: Sequence[int]) -> None:
        self.mask_id, self.eos_ids = mask_id, tuple(eos_ids)
        self.seen: dict[int, Seen] = {}
        self.seconds = 0.0  # that watching has taken so far

    def __call__(self, state: DecodeState, handles: tuple[Request | None, ...]) -> None:
        began = time.perf_counter()
        moment = moment_of(state)
        for slot, handle in enumerate(handles):
            if handle is None:
                continue
            seen = self.seen.setdefault(handle.index, Seen(self.mask_id, self.eos_ids))
            own = Moment(*(values[slot : slot + 1] for values in moment))
            if handle.kept is not None and seen.observer.step:  # padding behind a stop string is no event
                own.tokens[:, handle.kept :] = seen.observer.before.tokens[:, handle.kept :]
            seen.observer.see(own)
        self.seconds += time.perf_counter() - began
