"""`Batch`: rows that decode together, on one canvas and by one decoder; each is a request's or free.

Rows never influence each other, so any of them can leave when it has ended, and another can take its place between two
steps. On a GPU shapes are fixed, a step is recorded in parts, and what became of it is read while the next one runs: a
done row is a fixed point, so the pass under way changes nothing. Knows no queue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from asrd.engine.caches import BlockCache, CanvasCache
from asrd.engine.decoder import Decoder
from asrd.engine.device.gpu import Work, shapes_on
from asrd.engine.device.graph import Graphs, new_graphs
from asrd.engine.observers.inspector import Inspector
from asrd.engine.request import Request
from asrd.engine.scores import TokenScores, new_scores
from asrd.engine.shaping import Shaping
from asrd.engine.step import step
from asrd_kernels import COUNTERS, DecodeState, Rules, VocabStats, close, new_state

log = logging.getLogger("asrd")

Observer = Callable[[DecodeState, tuple[Request | None, ...]], None]


class Batch:
    """`size` rows on a canvas of `canvas` prompt and generated positions.

    observers   see the state after each commit, and whose row each is (None: it is free); a row took part in the commit
                if its `step` advanced. inspectors also see what happens within a step. Neither may change anything.
    """

    def __init__(
        self,
        decoder: Decoder,
        size: int,
        canvas: tuple[int, int],
        shaping: Shaping | None = None,
        observers: Sequence[Observer] = (),
        inspectors: Sequence[Inspector] = (),
    ) -> None:
        self.decoder, self.canvas, self.shaping = decoder, canvas, shaping
        self.observers, self.inspectors = list(observers), list(inspectors)
        self.requests: list[Request | None] = [None] * size
        self.fixed, self.gpu = shapes_on(decoder.table.device)
        self.state = self._rows(self.requests)
        cache = CanvasCache if decoder.adapter.block_length is None else BlockCache
        self.cache: CanvasCache | BlockCache = cache(decoder, self.state, self.fixed)
        self.in_flight: deque[tuple[Work, Tensor, list[Request | None]]] = deque()

    def _rows(self, requests: Sequence[Request | None]) -> DecodeState:
        """The rows of these requests before their first step."""
        table, kind = self.decoder.table, torch.promote_types(self.decoder.table.dtype, torch.float32)
        state = laid_out(requests, self.canvas, self.decoder.rules, kind).map(lambda value: value.to(table.device))
        state.own = self.decoder.rows(state)
        state.scores = new_scores(state) if self.decoder.config.logprobs else None
        return state

    @cached_property
    def graphs(self) -> Graphs | None:
        """The recorded parts of a step; None: operations are launched one by one."""
        return new_graphs(self)

    def run(self, name: Hashable, work: Work) -> None:
        """Do a part of a step; on a GPU, if it has a name and has been done a few times, as a graph."""
        if self.graphs is None or name is None:
            work()
        else:
            self.graphs.run((name, self.state.padded), work)

    def step(self) -> list[Request]:
        """One forward pass of every row; the requests that are known to have ended, whose rows are free now."""
        step(self)
        over = set()
        for request in self.live:
            request.passes += 1
            if request.passes >= self.decoder.max_steps(request.length):
                over.add(request)
        watched = bool(self.observers or self.inspectors)
        left = self._leave(self._ended(wait=watched or bool(over)) | over)
        for request in over:
            if request.rules.mask_id in request.tokens and not request.unreadable_at:
                log.warning(
                    "%s left %d masks after %d steps: it must commit at least one a step, or have another max_steps",
                    type(self.decoder).__name__, request.tokens.count(request.rules.mask_id), request.passes,
                )  # fmt: skip
        return left

    # --- who watches ---

    def begin(self) -> None:
        """A step begins."""
        for inspector in self.inspectors:
            inspector.begin(self.decoder, self.state)

    def mark(self, part: str, stats: VocabStats | None = None) -> None:
        """A part of the step is over."""
        for inspector in self.inspectors:
            inspector.mark(part, stats)

    def show(self) -> None:
        """Show the state after a commit to those who watch."""
        for observer in self.observers:
            observer(self.state, tuple(self.requests))
        if self.inspectors and not bool(self.state.bad.any()):
            for inspector in self.inspectors:
                inspector(self.state)

    def stop_texts(self) -> None:
        """After a commit: end the rows whose `Stop` says so."""
        stops = [(request, request.stop) for request in self.live if request.stop is not None and request.kept is None]
        if not stops:
            return
        state, stopped = self.state, torch.zeros_like(self.state.done)
        here = self._index([request.slot for request, _ in stops])
        numbers = torch.cat([state.bad[here, None], state.settled[here, None], state.generated[here]], dim=1).tolist()
        for (request, stop), (bad, settled, *tokens) in zip(stops, numbers, strict=True):
            if not bad and (kept := stop(tokens[:settled])) is not None:
                after = (state.positions >= kept) & ~state.given[request.slot]
                state.generated[request.slot].masked_fill_(after, state.rules.pad_id)
                stopped[request.slot] = True
        close(state, stopped)

    # --- what the host reads ---

    def read(self, values: Tensor) -> list[Any]:
        """Copy to the host and wait."""
        arrive, copy = self._send(values)
        arrive()
        return copy.tolist()

    def _send(self, values: Tensor) -> tuple[Work, Tensor]:
        """A copy for the host; calling the first waits for its arrival."""
        if self.gpu is None:
            return lambda: None, values
        copy = self.gpu.pinned(values)
        return self.gpu.send(values, copy), copy

    def _ended(self, wait: bool) -> set[Request]:
        """The requests that have ended by the reports that are there: on a GPU that of the step before; wait: all."""
        self.in_flight.append((*self._send(self.state.done), list(self.requests)))
        found = set()
        while len(self.in_flight) > (0 if wait or self.gpu is None else 1):
            arrive, done, owners = self.in_flight.popleft()
            arrive()
            for request, over in zip(owners, done.tolist(), strict=True):
                if over and request is not None and request.batch is self:  # it may have left since
                    found.add(request)
        return found

    def report(self, requests: Sequence[Request]) -> None:
        """Copy counters and tokens into requests that run here."""
        state, here = self.state, self._index([request.slot for request in requests])
        numbers = torch.stack([*(getattr(state, name) for name in COUNTERS), state.bad.long()], dim=1)[here]
        for request, (*counts, bad), tokens in zip(
            requests, numbers.tolist(), state.generated[here].tolist(), strict=True
        ):
            request.counts = dict(zip(COUNTERS, counts, strict=True))
            request.unreadable_at = request.counts["step"] if bad else 0
            request.tokens = tokens[: request.asked]
            if state.scores is not None:
                kept = (getattr(state.scores, name) for name in TokenScores._fields)
                request.scores = TokenScores(*(values[request.slot, : request.asked].cpu() for values in kept))

    # --- rows come and go ---

    @property
    def live(self) -> list[Request]:
        """The requests that run here, in the order of their rows."""
        return [request for request in self.requests if request is not None]

    @property
    def free(self) -> list[int]:
        """Free rows."""
        return [slot for slot, request in enumerate(self.requests) if request is None]

    @property
    def bytes(self) -> int:
        """Device memory that it holds: state, K/V and recorded graphs."""
        own = sum(tensor.nbytes for tensor in self.state.tensors().values())
        return own + self.cache.bytes + (self.graphs.bytes if self.graphs else 0)

    def fill(self, requests: Sequence[Request]) -> None:
        """Give each request a free row, in place."""
        if not requests:
            return
        fresh, slots = self._rows(requests), self.free[: len(requests)]
        here = self._index(slots)
        self.state.put(here, fresh, self._index(range(len(slots))))
        self.cache.clear(here)
        self.state.padded |= fresh.padded
        for request, slot in zip(requests, slots, strict=True):
            self._take(slot, request)

    def move(self, target: Batch) -> Batch:
        """All requests go on in an empty batch of another size; this one is empty then."""
        live = self.live
        rows, slots = self._index([request.slot for request in live]), self._index(range(len(live)))
        target.state.put(slots, self.state, rows)
        target.cache.put(slots, self.cache, rows)  # type: ignore[arg-type]
        target.state.padded |= self.state.padded
        for slot, request in enumerate(live):
            self.requests[request.slot] = None
            target._take(slot, request)
        close(self.state, torch.ones_like(self.state.done))
        target.in_flight.extend(self.in_flight)
        self.in_flight.clear()
        return target

    def remove(self, requests: Sequence[Request]) -> None:
        """End these requests as far as they have come."""
        if requests:
            self.report(requests)
            here, rows = self._index([request.slot for request in requests]), torch.zeros_like(self.state.done)
            close(self.state, rows.index_fill_(0, here, True))
            for request in requests:
                self.requests[request.slot], request.batch = None, None

    def _leave(self, ended: set[Request]) -> list[Request]:
        left = [request for request in self.live if request in ended]
        self.remove(left)
        return left

    def _take(self, slot: int, request: Request) -> None:
        self.requests[slot], request.batch, request.slot = request, self, slot

    def _index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(list(slots), dtype=torch.int64, device=self.decoder.table.device)


def laid_out(
    requests: Sequence[Request | None], canvas: tuple[int, int], rules: Rules, dtype: torch.dtype
) -> DecodeState:
    """Requests as rows before their first step, on the CPU; None: a free row."""
    width, length = canvas
    prompt = torch.full((len(requests), width), rules.pad_id)
    text = torch.full((len(requests), length), rules.mask_id)
    allowed = torch.zeros(len(requests), length, dtype=torch.int64)
    numbers = torch.zeros(5, len(requests), dtype=torch.int64)
    for row, request in enumerate(requests):
        if request is not None:
            prompt[row, width - len(request.prompt) :] = request.prompt
            text[row, : request.length] = request.text
            if request.allowed is not None:
                allowed[row, : request.length] = request.allowed
            counts = (request.length, len(request.prompt), request.asked, request.row_id, request.seed)
            numbers[:, row] = torch.tensor(counts)
    rows = dict(zip(("lengths", "starts", "asked", "row_ids", "seeds"), numbers, strict=True))
    return new_state(prompt, length, rules, dtype, text=text, allowed=allowed, **rows)
