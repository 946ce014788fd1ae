"""`Group`: requests that share settings and canvas, in one batch whose rows come and go.

Knows how large the batch should be and which slots are free. Which requests belong together, and when they come, is
the scheduler's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from asrd.config import AsrdConfig
from asrd.engine.batch import Batch, size_for
from asrd.engine.decoder import Decoder
from asrd.engine.defaults import with_defaults
from asrd.engine.device.completion import unreadable
from asrd.engine.device.gpu import shapes_on
from asrd.engine.loop import Run
from asrd.engine.request import Request, stack
from asrd.engine.scores import TokenScores
from asrd.engine.stopping import Stop
from asrd.models.adapter import ModelAdapter
from asrd_kernels import DecodeState


@dataclass(eq=False)
class Kind:
    """Settings, other than length and seed, that requests have in common, on one model."""

    adapter: ModelAdapter
    decoder: type[Decoder]
    config: AsrdConfig
    key: Hashable = None
    longest: tuple[int, int] = (1, 1)  # prompt and answer so far
    keep: Any = None  # what its key names by identity, so that nothing else takes that


@dataclass(eq=False)
class Job:
    """A request on its way through the engine: one row, its settings, and for whom."""

    kind: Kind
    request: Request
    owner: Any
    stop: Stop | None = None  # what may end it besides its EOS and its length
    slot: int = -1  # where its row is, once it has one
    group: Group | None = field(default=None, repr=False)

    @property
    def size(self) -> tuple[int, int]:
        """Tokens of the prompt, and of the answer."""
        return self.request.prompt.shape[1], self.request.length


COUNTS = 6  # of an outcome


@dataclass(frozen=True)
class Outcome:
    """What became of a job; None: of a request that never became one."""

    job: Job | None
    tokens: list[int]
    steps: int
    counts: list[int]  # commits, revocations, promotions, edits, positions computed, forward passes
    error: str = ""
    scores: TokenScores | None = None  # [n] each, of the tokens


Watcher = Callable[[DecodeState, tuple[Job | None, ...]], None]


class Group:
    """Jobs of one kind on a canvas of `width` prompt positions and `length` generated ones.

    watchers see the state after each step; every_step: as for `Batch`.

    Where nothing wants fixed shapes, the batch has as many slots as there are rows. On a GPU the sizes are powers of
    two, and a batch that was left for a larger or smaller one is kept, for it holds a recorded graph.
    """

    def __init__(
        self, kind: Kind, width: int, length: int, watchers: Sequence[Watcher] = (), every_step: bool = True
    ) -> None:
        self.kind, self.width, self.length, self.every_step = kind, width, length, every_step
        config = AsrdConfig(**kind.config.settings() | {"max_new_tokens": length})
        self.config = with_defaults(config, kind.adapter)
        self.config.block_length = kind.decoder.block_length(self.config)
        self.observers = [self._shown_to(watcher) for watcher in watchers]
        self.fixed = shapes_on(kind.adapter.table.device)[1] is not None
        self.batch: Batch | None = None
        self.kept: dict[tuple[int, bool], Batch] = {}

    @property
    def jobs(self) -> list[Job]:
        """Those whose rows are decoding, in the order of their slots."""
        return [] if self.batch is None else [self.batch.tags[slot] for slot in self.batch.live]

    @property
    def slots(self) -> int:
        """Rows of a forward pass."""
        return 0 if self.batch is None else len(self.batch.tags)

    def fill(self, newcomers: Sequence[Job]) -> None:
        """Give each newcomer a slot, and drop slots that are not needed."""
        staying = self.jobs
        rows = len(staying) + len(newcomers)
        if rows == 0:
            self.batch = self.batch if self.kept else None
            return
        padded = (self.batch is not None and self.batch.padded) or any(
            job.size != (self.width, self.length) for job in newcomers
        )
        size = size_for(rows, self.slots, self.fixed)
        if self.batch is None or size != self.slots or padded != self.batch.padded:
            self._resize(size, padded, staying, newcomers)
        elif newcomers:
            self._refill(newcomers)
        for slot, job in enumerate(self.batch.tags if self.batch else ()):
            if job is not None:
                job.slot, job.group = slot, self

    def step(self) -> list[Outcome]:
        """One forward pass of every row; those that have ended."""
        assert self.batch is not None
        ended = self.batch.step()
        if not ended:
            return []
        scores = self._scores([row.slot for row in ended])
        outcomes = [
            self._outcome(row.tag, values, "" if row.readable else str(unreadable("this request", row.steps)), score)
            for row, values, score in zip(ended, self._read([row.slot for row in ended]), scores, strict=True)
        ]
        if failed := [row.slot for row in ended if not row.readable]:
            self.batch.clear(failed)
        return outcomes

    def cancel(self, job: Job) -> Outcome:
        """Take a row out of its slot, as far as it has come."""
        assert self.batch is not None
        (values,) = self._read([job.slot])
        self.batch.clear([job.slot])
        outcome = self._outcome(job, values)
        mask = self.batch.decoder.rules.mask_id
        final = outcome.tokens.index(mask) if mask in outcome.tokens else len(outcome.tokens)
        return Outcome(job, outcome.tokens[:final], outcome.steps, outcome.counts)

    # --- the batch ---

    def _resize(self, size: int, padded: bool, staying: list[Job], newcomers: Sequence[Job]) -> None:
        """Another batch, in which the rows that stay go first."""
        old, target = self.batch, self.kept.get((size, padded))
        if target is None:
            target = self._batch([*staying, *newcomers], size, padded)
        elif newcomers:
            places = range(len(staying), len(staying) + len(newcomers))
            target.put(self._batch(newcomers, len(newcomers), padded), range(len(newcomers)), places)
        if old is not None and staying:
            target.put(old, old.live, range(len(staying)))
        if self.fixed:
            self.kept[size, padded] = target
            if old is not None:
                old.clear(range(len(old.tags)))
        self.batch = target

    def forget(self, batch: Batch) -> None:
        """Let go of a batch without rows, and of what was recorded of it."""
        self.kept = {key: kept for key, kept in self.kept.items() if kept is not batch}
        self.batch = None if self.batch is batch else self.batch

    def _refill(self, jobs: Sequence[Job]) -> None:
        """Rows in slots that others have left, in place."""
        assert self.batch is not None
        fresh = self._batch(jobs, len(jobs), self.batch.padded)
        self.batch.put(fresh, range(len(jobs)), self.batch.free[: len(jobs)])

    def _batch(self, jobs: Sequence[Job], size: int, padded: bool) -> Batch:
        """A batch of these rows before their first step, in the first of `size` slots."""
        requests = [job.request for job in jobs]
        request = stack(requests, self.config, self.width, self.length, size, padded)
        decoder = self.kind.decoder(request, self.kind.adapter.table.detach())
        tags = [*jobs, *[None] * (size - len(jobs))]
        limits = [decoder.max_steps(job.request.length) for job in jobs] + [self.length] * (size - len(jobs))
        stops = [*(job.stop for job in jobs), *[None] * (size - len(jobs))]
        run = Run.of(self.kind.adapter, request)
        return Batch(run, decoder, tags, limits, self.observers, stops=stops, every_step=self.every_step)

    def _read(self, slots: list[int]) -> list[list[int]]:
        """Of each row its tokens, steps and counts, in one copy to the host."""
        assert self.batch is not None
        rows = self.batch.read(slots)
        counts = torch.cat([rows.step[None], rows.counts, rows.computed[None], rows.forwards[None]])
        return torch.cat([rows.tokens[:, self.width :], counts.T], dim=1).tolist()

    def _scores(self, slots: list[int]) -> list[TokenScores | None]:
        """Of each row what is kept of its tokens, where it was asked for."""
        assert self.batch is not None
        if self.batch.decoder.scores is None:
            return [None] * len(slots)
        kept = self.batch.decoder.scores.kept
        return [TokenScores(*(values[slot].cpu() for values in kept)) for slot in slots]

    def _outcome(self, job: Job, values: list[int], error: str = "", scores: TokenScores | None = None) -> Outcome:
        tokens, (steps, *counts) = values[: job.request.asked], values[self.length :]
        job.group = None
        if scores is not None:
            scores = TokenScores(*(values[: len(tokens)] for values in scores))
        return Outcome(job, tokens, steps, counts, error, scores)

    def _shown_to(self, watcher: Watcher) -> Callable[[DecodeState], None]:
        def observer(state: DecodeState) -> None:
            assert self.batch is not None
            watcher(state, tuple(self.batch.tags))

        return observer
