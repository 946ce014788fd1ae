"""`Batch`: rows that decode together, each in a slot of its own, and `decode`, which runs a batch to its end.

One canvas, one decoder, one set of settings. Rows never influence each other, so any of them can leave when it has
ended, and another can take its slot between two steps. Knows no queue and no prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from asrd.engine.caches import BlockBody
from asrd.engine.decoder import Decoder
from asrd.engine.device.block_step import BlockStep
from asrd.engine.device.cached_step import CachedStep
from asrd.engine.device.completion import CompletionMonitor, Report, unreadable
from asrd.engine.device.gpu import Work
from asrd.engine.device.graph import Graphs, new_graphs
from asrd.engine.loop import Observer, Run, mark_all, step
from asrd.engine.observers.inspector import Inspector
from asrd.engine.request import Request
from asrd.engine.rows import RowDims, copy_rows, row_dims, tensors
from asrd.engine.scores import TokenScores
from asrd.engine.stopping import Stop
from asrd_kernels import new_stats


@dataclass(frozen=True)
class Ended:
    """A row that has ended: whose it is, where it is, after how many forward passes, and whether it could be read."""

    tag: Any
    slot: int
    steps: int
    readable: bool = True


@dataclass(frozen=True)
class Rows:
    """What n rows have become, on the device."""

    tokens: Tensor  # [n, P + G] int64
    step: Tensor  # [n] int64, forward passes
    counts: Tensor  # [4, n] int64: commits, revocations, promotions, edits
    computed: Tensor  # [n] int64, positions computed in the forward passes
    forwards: Tensor  # [n] int64, how many these were: the steps, but on block-diffusion models
    scores: TokenScores | None = None  # [n, G] each, where they were asked for


class Batch:
    """Slots with rows in them.

    tags       whose row each slot holds; None: the slot is free
    limits     after how many forward passes each row ends in any case; None: those of rows as long as the canvas
    observers  see the state after each step, inspectors also what happens within it; they must not change it
    strict     a row whose logits cannot be read raises; else it ends as not readable
    stops      what may end each row besides its EOS and its length; they read the tokens in each step
    every_step observers see each step by itself, also where a block-diffusion model does two in one forward pass

    On a GPU the host looks at each step while the next one is under way. With observers, who read the state by nature,
    or a cache without graphs, which reads in each step, it looks at once.
    """

    def __init__(
        self,
        run: Run,
        decoder: Decoder,
        tags: Sequence[Any],
        limits: Sequence[int] | None = None,
        observers: Sequence[Observer] = (),
        strict: bool = False,
        stops: Sequence[Stop | None] | None = None,
        every_step: bool = True,
    ) -> None:
        inspectors = [observer for observer in observers if isinstance(observer, Inspector)]
        self.run = replace(run, mark=mark_all(inspectors)) if inspectors else run
        if observers and every_step and isinstance(run.cache, BlockBody):
            run.cache.watched = True
        self.decoder, self.tags, self.strict = decoder, list(tags), strict
        self.observers, self.inspectors, self.every_step = tuple(observers), inspectors, every_step
        self.limits = list(limits or [decoder.max_steps(run.request.length)] * len(self.tags))
        self.ages = [0] * len(self.tags)  # forward passes of each row so far
        self.stops = list(stops or [None] * len(self.tags))
        self.buffers = new_stats(decoder.state, decoder.extra_rows)
        self.dims: RowDims | None = None

    @cached_property
    def graphs(self) -> Graphs | None:
        """The recorded steps of this batch; None: operations are launched one by one."""
        return new_graphs(self.run, self.decoder, self.observers)

    @cached_property
    def monitor(self) -> CompletionMonitor:
        """How the host learns what became of a step."""
        at_once = self.observers or (self.run.cache is not None and self.graphs is None)
        return CompletionMonitor(self.decoder.state.report, None if at_once else self.run.gpu)

    @cached_property
    def advance(self) -> Work:
        """What does one step."""
        whole = partial(step, self.run, self.decoder, self.buffers)
        if self.graphs is None:
            return whole
        if self.run.cache is None:
            return partial(self.graphs.run, "step", whole)
        if isinstance(self.run.cache, BlockBody):
            return BlockStep(self.graphs, self.run, self.decoder, self.buffers)
        return CachedStep(self.graphs, self.run, self.decoder, self.buffers)

    @property
    def live(self) -> list[int]:
        """The slots that hold a row."""
        return [slot for slot, tag in enumerate(self.tags) if tag is not None]

    @property
    def free(self) -> list[int]:
        """The slots that hold none."""
        return [slot for slot, tag in enumerate(self.tags) if tag is None]

    @property
    def bytes(self) -> int:
        """Device memory that it holds: state, statistics, K/V and recorded graphs."""
        kept = [*tensors(self.decoder).values(), *self.buffers[0], *tensors(self.run.request).values()]
        own = {tensor.data_ptr(): tensor.nbytes for tensor in kept if tensor is not self.decoder.table}
        cache, graphs = self.run.cache, self.graphs
        return sum(own.values()) + (cache.bytes if cache else 0) + (graphs.bytes if graphs else 0)

    @property
    def padded(self) -> bool:
        """May rows be shorter than the canvas?"""
        return self.run.request.attention is not None

    def step(self) -> list[Ended]:
        """One forward pass of every row; the rows that are known to have ended, whose slots are free now."""
        for inspector in self.inspectors:
            inspector.begin(self.decoder, self.buffers[1])
        self.advance()
        for slot in self.live:
            self.ages[slot] += 1
        ended = self._ended(self.monitor.poll(tuple(self.tags)))
        ended |= self._stopped(ended)
        for observer in self.observers:
            observer(self.decoder.state)
        over = [slot for slot in self.live if self.ages[slot] >= self.limits[slot] and slot not in ended]
        if over:
            ended |= self._ended(self.monitor.drain())
            ended = {slot: Ended(self.tags[slot], slot, self.ages[slot]) for slot in over} | ended
        return self._left(ended)

    def settle(self) -> list[Ended]:
        """Wait for the device; the rows that have ended and were not known to."""
        return self._left(self._ended(self.monitor.drain()))

    def _left(self, ended: dict[int, Ended]) -> list[Ended]:
        for slot in ended:
            self.tags[slot] = None
        return [ended[slot] for slot in sorted(ended)]

    def _ended(self, reports: list[Report]) -> dict[int, Ended]:
        """The rows that have ended, by slot. A late report may speak of a row that has left its slot since."""
        ended = {}
        for report in reports:
            for slot, (tag, number) in enumerate(zip(report.tags, report.numbers, strict=True)):
                if tag is None or tag is not self.tags[slot] or not number & 3:
                    continue
                ended[slot] = Ended(tag, slot, number // 4, readable=not number & 2)
                if self.strict and number & 2:
                    raise unreadable(f"row {tag} of the batch", number // 4)
        return ended

    def _stopped(self, ended_already: dict[int, Ended]) -> dict[int, Ended]:
        """End the rows whose `Stop` says so, by slot; they may have ended by themselves in the same step."""
        unreadable_slots = {slot for slot, row in ended_already.items() if not row.readable}
        slots = [slot for slot in self.live if self.stops[slot] is not None and slot not in unreadable_slots]
        if not slots:
            return {}
        state, here, ended = self.decoder.state, self._index(slots), {}
        settled = state.settled(self.decoder.rules.mask_id)[here]
        numbers = torch.cat([settled[:, None], state.step[here, None], state.generated[here]], dim=1).tolist()
        for slot, (final, steps, *tokens) in zip(slots, numbers, strict=True):
            if (kept := self.stops[slot](tokens[:final])) is not None:  # type: ignore[misc]
                behind = (state.positions >= kept) & ~state.fixed[slot]
                state.generated[slot].masked_fill_(behind, self.decoder.rules.pad_id)
                ended[slot] = Ended(self.tags[slot], slot, steps)
        if ended:
            self._close(list(ended))
        return ended

    # --- rows come and go ---

    def read(self, slots: Sequence[int]) -> Rows:
        """What the rows in these slots have become, as copies."""
        state, chosen = self.decoder.state, self._index(slots)
        computed, forwards, scores = self.run.computed(self.decoder), self.run.forwards(self.decoder), None
        if self.decoder.scores is not None:
            scores = TokenScores(*(values[chosen] for values in self.decoder.scores.kept))
        numbers = (state.step[chosen], state.counts[:, chosen], computed[chosen], forwards[chosen])
        return Rows(state.tokens[chosen], *numbers, scores)

    def put(self, source: Batch, rows: Sequence[int], slots: Sequence[int]) -> None:
        """Move rows of another batch, with the same canvas and settings, to these slots, in place. Rows of a batch
        that is not padded may go to one that is and whose request has them already."""
        if self.dims is None:
            self.dims = source.dims if source.dims and source.padded == self.padded else row_dims(self.decoder)
        there, here = source._index(rows), self._index(slots)
        copy_rows(source.decoder, there, self.decoder, here, self.dims)
        self.decoder.rows_moved()
        self.run.put(source.run, there, here)
        self.buffers[0].bad.index_fill_(0, here, False)
        for row, slot in zip(rows, slots, strict=True):
            self.tags[slot], self.ages[slot], self.limits[slot] = source.tags[row], source.ages[row], source.limits[row]
            self.stops[slot] = source.stops[row]
            source.tags[row] = None

    def rebuilt(self, request: Request, rows: Sequence[int], tags: Sequence[Any], limits: Sequence[int]) -> Batch:
        """A batch of all rows of `request`, the first of which are these and go on where they are."""
        run = Run.of(self.run.adapter, request, self.run.fixed)
        decoder = type(self.decoder)(request, self.decoder.table)
        other = Batch(run, decoder, tags, limits, self.observers, self.strict, every_step=self.every_step)
        other.put(self, rows, range(len(rows)))
        if other.free:
            other.clear(other.free)
        return other

    def clear(self, slots: Sequence[int]) -> None:
        """End the rows in these slots, whatever they are doing."""
        state, here = self.decoder.state, self._index(slots)
        state.generated.index_fill_(0, here, self.decoder.rules.pad_id)
        state.lengths.index_fill_(0, here, 0)
        self._close(slots)
        for slot in slots:
            self.tags[slot] = None

    def _close(self, slots: Sequence[int]) -> None:
        """Nothing is open in these slots any more."""
        state, here = self.decoder.state, self._index(slots)
        state.done.index_fill_(0, here, True)
        for flags in (state.pending, state.guided):
            flags.index_fill_(0, here, False)
        self.decoder.rows_moved()

    def _index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(list(slots), dtype=torch.int64, device=self.decoder.state.tokens.device)


def size_for(rows: int, size: int, fixed: bool) -> int:
    """How many slots a batch of `size` should have for so many rows: no more than that; or, where shapes are to stay,
    as many as it has, doubled or halved as often as it takes."""
    if not fixed:
        return rows
    size = max(size, 1)
    while size < rows:
        size *= 2
    while size > 1 and 2 * rows <= size:
        size //= 2
    return size


def decode(batch: Batch, compact: bool = True) -> Rows:
    """Run a batch until every row has ended; what they have become, in the order of their tags.

    Rows that have ended leave it, so that they cost nothing, unless there are observers or `compact` is off.
    """
    compact = compact and not batch.observers
    tags: list[Any] = []
    parts: list[Rows] = []

    def take(ended: list[Ended]) -> None:
        tags.extend(row.tag for row in ended)
        parts.append(batch.read([row.slot for row in ended]))

    ended: list[Ended] = []  # and still in their slots
    while batch.live:
        ended += batch.step()
        if compact and batch.live and _fitting(batch) < len(batch.tags):
            take(ended + batch.settle())
            ended = []
            batch = _compacted(batch) if batch.live else batch
    if ended:
        take(ended)
    order = torch.tensor(tags, device=parts[0].tokens.device).argsort()
    found = [part.scores for part in parts if part.scores is not None]
    scores = TokenScores(*(torch.cat(values)[order] for values in zip(*found, strict=True))) if found else None
    return Rows(
        torch.cat([part.tokens for part in parts])[order],
        torch.cat([part.step for part in parts])[order],
        torch.cat([part.counts for part in parts], dim=1)[:, order],
        torch.cat([part.computed for part in parts])[order],
        torch.cat([part.forwards for part in parts])[order],
        scores,
    )


def _fitting(batch: Batch) -> int:
    return size_for(len(batch.live), len(batch.tags), fixed=batch.run.gpu is not None)


def _compacted(batch: Batch) -> Batch:
    """The rows that go on, and where shapes are to stay perhaps some that have ended, in a smaller batch."""
    live, size = batch.live, _fitting(batch)
    chosen = [*live, *batch.free][:size]
    tags = [batch.tags[slot] for slot in chosen]
    request = batch.run.request.take(torch.tensor(chosen, device=batch.run.request.prompt.device))
    return batch.rebuilt(request, live, tags, [batch.limits[slot] for slot in chosen])
