"""The scheduler: requests wait for slots and are placed in batches.

First come, first served. A request takes a slot as soon as one is free and keeps it until it has ended. Canvases come
in a few sizes, so that a short request does not pay for a long one. On a GPU the sizes of a batch are powers of two,
and a batch that was left for a larger or smaller one is kept, for it holds recorded graphs. Knows no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from asrd.engine.batch import Batch, Observer
from asrd.engine.decoder import Decoder
from asrd.engine.device.gpu import is_gpu
from asrd.engine.device.graph import GraphUse
from asrd.engine.request import Request
from asrd.engine.shaping import Shaping
from asrd_kernels import COUNTERS

SMALLEST = 16  # of the sizes that prompts and answers are rounded up to
ROOM = 1.5  # a request joins a canvas that is at most this many times as long as the one that it would open
GRAPH_MEMORY = 2**30  # bytes that batches without requests may hold for the sake of their graphs, on a GPU

Key = tuple[Decoder, Shaping | None, tuple[int, int]]  # what the requests of a batch share


@dataclass
class Usage:
    """What the forward passes so far were spent on."""

    forwards: int = 0  # of a batch; all batches with requests have one a step
    rows: int = 0  # in them
    positions: int = 0  # in them: rows times canvas
    used: int = 0  # of these, positions of a request's own prompt and answer

    @property
    def wasted(self) -> float:
        """Share of the positions that are padding or lie in free rows."""
        return 1 - self.used / self.positions if self.positions else 0.0


class Scheduler:
    """`slots` is how many requests run at a time, over all batches; graph_memory: how many bytes batches without
    requests may hold, so that their graphs need not be recorded again; observers: as for `Batch`; in_place: rows stay
    where they are, for observers who know them by their number."""

    def __init__(
        self,
        slots: int,
        observers: Sequence[Observer] = (),
        graph_memory: int = GRAPH_MEMORY,
        in_place: bool = False,
    ) -> None:
        self.slots, self.observers, self.graph_memory = slots, tuple(observers), graph_memory
        self.in_place = in_place
        self.waiting: deque[Request] = deque()
        self.batches: dict[Key, Batch] = {}  # those with requests
        self.idle: dict[tuple[Key, int], Batch] = {}  # kept for their graphs, by size, the latest used last
        self.usage = Usage()
        self._longest: WeakKeyDictionary[Decoder, tuple[int, int]] = WeakKeyDictionary()  # prompt and answer so far

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return sum(len(batch.live) for batch in self.batches.values())

    @property
    def free(self) -> int:
        """How many further requests would run at once."""
        return max(self.slots - self.running - len(self.waiting), 0)

    @property
    def graphs(self) -> GraphUse:
        """The graphs that are kept, and the memory that they take."""
        batches = [*self.batches.values(), *self.idle.values()]
        graphs = [batch.graphs for batch in batches if batch.graphs is not None]
        idle = sum(batch.bytes for batch in batches if batch.graphs is not None and not batch.live)
        return GraphUse(sum(each.recorded for each in graphs), sum(each.bytes for each in graphs), idle)

    def add(self, request: Request) -> None:
        """Have it wait for a slot."""
        longest = self._longest.get(request.decoder, (1, 1))
        self._longest[request.decoder] = (max(longest[0], request.size[0]), max(longest[1], request.size[1]))
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Remove a request that waits or runs; it keeps the tokens before its first mask."""
        if request.batch is None:
            self.waiting.remove(request)
            request.counts = dict.fromkeys(COUNTERS, 0)
            return
        request.batch.remove([request])
        request.tokens = request.tokens[: [*request.tokens, request.rules.mask_id].index(request.rules.mask_id)]

    def step(self) -> list[Request]:
        """Fill free slots, then one forward pass of each batch; the requests that have ended."""
        self.admit()
        ended = []
        for (_, _, canvas), batch in self.batches.items():
            self.usage.forwards += 1
            self.usage.rows += len(batch.live)
            self.usage.positions += (len(batch.requests) if batch.fixed else len(batch.live)) * sum(canvas)
            self.usage.used += sum(sum(request.size) for request in batch.live)
            ended += batch.step()
        return ended

    def admit(self) -> None:
        """Give free slots to the requests that wait, and let go of batches that are not needed."""
        coming: dict[Key, list[Request]] = {key: [] for key in self.batches}
        for _ in range(min(len(self.waiting), self.slots - self.running)):
            request = self.waiting.popleft()
            key = (request.decoder, request.shaping, self._canvas_for(request, coming))
            coming.setdefault(key, []).append(request)
        for key, requests in coming.items():
            batch = self._batch_for(key, requests)
            if batch is not None:
                batch.fill(requests)
                self.batches[key] = batch
        room = self.graph_memory
        for kept, batch in reversed(list(self.idle.items())):
            room -= batch.bytes
            if room < 0:  # those that were used last stay
                del self.idle[kept]

    def _canvas_for(self, request: Request, coming: dict[Key, list[Request]]) -> tuple[int, int]:
        """Its own; or the smallest canvas among those in use that is not much too large, else a new one."""
        if request.canvas is not None:
            return request.canvas
        (width, length), own = request.size, new_canvas(request, self._longest[request.decoder])
        left, right = pads(request.decoder)
        fitting = [
            canvas
            for decoder, shaping, canvas in coming
            if (decoder, shaping) == (request.decoder, request.shaping)
            and (width <= canvas[0] if left else width == canvas[0])
            and (length <= canvas[1] if right else length == canvas[1])
            and sum(canvas) <= ROOM * sum(own)
            and (coming[decoder, shaping, canvas] or self.batches[decoder, shaping, canvas].live or canvas == own)
        ]
        return min(fitting, key=sum, default=own)

    def _batch_for(self, key: Key, newcomers: Sequence[Request]) -> Batch | None:
        """The batch of this key, with as many rows as it should have now; None: nobody needs it."""
        batch = self.batches.pop(key, None)
        size = self._size(batch, newcomers)
        if batch is not None and size == len(batch.requests):
            return batch
        decoder, shaping, canvas = key
        target = None
        if size:
            target = self.idle.pop((key, size), None) or Batch(decoder, size, canvas, shaping, self.observers)
        if batch is not None:
            if target is not None:
                batch.move(target)
            if batch.graphs is not None:
                self.idle[key, len(batch.requests)] = batch
        return target

    def _size(self, batch: Batch | None, newcomers: Sequence[Request]) -> int:
        """How many rows the batch gets. Where shapes are free it grows and never shrinks, for a forward pass leaves out
        free rows."""
        rows, size = len(newcomers), 0
        if batch is not None:
            rows, size = rows + len(batch.live), len(batch.requests)
        if not rows:
            return 0
        on_gpu = is_gpu(newcomers[0].decoder.table.device) if batch is None else batch.gpu is not None
        exact = not size and newcomers[0].canvas is not None
        if not on_gpu or exact or (self.in_place and rows <= size):
            return max(rows, size)
        return size_for(rows, size or 1)


def size_for(rows: int, size: int) -> int:
    """How many rows a batch of `size` should have on a GPU for this many: doubled or halved as often as it takes."""
    while size < rows:
        size *= 2
    while size > 1 and 2 * rows <= size:
        size //= 2
    return size


def pads(decoder: Decoder) -> tuple[bool, bool]:
    """May a row stand after padding, and before padding, without any difference to it?"""
    by_decoder = decoder.pads(decoder.config)
    return by_decoder[0] and decoder.adapter.pads_left, by_decoder[1] and decoder.adapter.pads_right


def new_canvas(request: Request, longest: tuple[int, int]) -> tuple[int, int]:
    """Prompt and answer positions of the canvas that a request would open: powers of two up to the longest seen, or
    where padding is not possible, its own."""
    adapter = request.decoder.adapter
    width, length = (
        min(max(SMALLEST, 1 << (size - 1).bit_length()), most) if may_pad else size
        for size, most, may_pad in zip(request.size, longest, pads(request.decoder), strict=True)
    )
    limit = None if adapter.takes_positions else adapter.context_length
    return request.size if limit is not None and width + length > limit else (width, length)  # padding counts there
