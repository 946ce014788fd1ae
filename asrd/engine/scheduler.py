"""The scheduler: many requests, a fixed number of slots, and which request runs on which canvas.

First come, first served. A request takes a slot as soon as one is free and keeps it until it has ended. Canvases come
in a few sizes, so that a short request does not pay for a long one. Knows no text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from asrd.engine.batch import Batch
from asrd.engine.device.graph import GraphUse
from asrd.engine.group import COUNTS, Group, Job, Outcome, Watcher

SMALLEST = 16  # of the sizes that prompts and answers are rounded up to
ROOM = 1.5  # a request joins rows whose canvas is at most so many times as long as the size that it would open itself
GRAPH_MEMORY = 2**30  # bytes that batches without rows may hold for the sake of their recorded graphs, on a GPU


@dataclass
class Usage:
    """What the forward passes so far were spent on."""

    forwards: int = 0  # of a group; all groups with rows have one a step
    rows: int = 0  # in them
    positions: int = 0  # in them: rows times canvas
    used: int = 0  # of these, positions of a request's own prompt and answer

    @property
    def wasted(self) -> float:
        """Share of the positions that are padding or lie in empty slots."""
        return 1 - self.used / self.positions if self.positions else 0.0


class Scheduler:
    """Jobs wait, run in groups and end. `slots` is how many run at a time, over all groups; graph_memory: how many
    bytes batches without rows may hold, so that their graphs need not be recorded again; every_step: as for `Batch`."""

    def __init__(
        self,
        slots: int,
        watchers: Sequence[Watcher] = (),
        graph_memory: int = GRAPH_MEMORY,
        every_step: bool = True,
    ) -> None:
        self.slots, self.watchers, self.graph_memory = slots, tuple(watchers), graph_memory
        self.every_step = every_step
        self.waiting: deque[Job] = deque()
        self.groups: list[Group] = []
        self.running = 0
        self.usage = Usage()
        self._recent: dict[Batch, Group] = {}  # batches with graphs, the latest used last

    @property
    def graphs(self) -> GraphUse:
        """The graphs that are kept, and the memory that they take."""
        found = [batch.graphs for batch in self._recent if batch.graphs is not None]
        idle = sum(batch.bytes for batch in self._recent if not batch.live and batch.graphs is not None)
        return GraphUse(sum(graphs.recorded for graphs in found), sum(graphs.bytes for graphs in found), idle)

    @property
    def free(self) -> int:
        """How many further jobs would run at once."""
        return max(self.slots - self.running - len(self.waiting), 0)

    def add(self, job: Job) -> None:
        """Have it wait for a slot."""
        job.kind.longest = tuple(map(max, job.kind.longest, job.size))  # type: ignore[assignment]
        self.waiting.append(job)

    def cancel(self, job: Job) -> Outcome:
        """Take it out, wherever it is; it must not have ended."""
        if job.group is None:
            self.waiting.remove(job)
            return Outcome(job, [], 0, [0] * COUNTS)
        self.running -= 1
        return job.group.cancel(job)

    def step(self) -> list[Outcome]:
        """Fill free slots, then one forward pass of each group; the jobs that have ended."""
        self._admit()
        outcomes = []
        for group in self.groups:
            if jobs := group.jobs:
                self._count(group, jobs)
                if group.fixed and group.batch is not None:
                    self._recent.pop(group.batch, None)
                    self._recent[group.batch] = group
                outcomes += group.step()
        self.running -= len(outcomes)
        return outcomes

    def _admit(self) -> None:
        coming: dict[Group, list[Job]] = {group: [] for group in self.groups}
        while self.waiting and self.running < self.slots:
            job = self.waiting.popleft()
            coming.setdefault(self._place(job, coming), []).append(job)
            self.running += 1
        self.groups = list(coming)
        for group, jobs in coming.items():
            group.fill(jobs)
        room = self.graph_memory
        for batch in [batch for batch in reversed(self._recent) if not batch.live]:
            room -= batch.bytes
            if room < 0 or batch.graphs is None:  # those that were used last stay
                self._recent.pop(batch).forget(batch)
        self.groups = [group for group in self.groups if group.jobs or group.kept]

    def _place(self, job: Job, coming: dict[Group, list[Job]]) -> Group:
        """The smallest canvas among those in use that is not much too large, else a new one."""
        (own_width, own_length), (width, length) = job.size, canvas(job)
        left, right = pads(job)
        fitting = [
            group
            for group, jobs in coming.items()
            if group.kind is job.kind
            and (own_width <= group.width if left else own_width == group.width)
            and (own_length <= group.length if right else own_length == group.length)
            and (jobs or group.jobs or (group.width, group.length) == (width, length))
            and group.width + group.length <= ROOM * (width + length)
        ]
        if fitting:
            return min(fitting, key=lambda group: group.width + group.length)
        return Group(job.kind, width, length, self.watchers, self.every_step)

    def _count(self, group: Group, jobs: list[Job]) -> None:
        self.usage.forwards += 1
        self.usage.rows += len(jobs)
        self.usage.positions += group.slots * (group.width + group.length)
        self.usage.used += sum(sum(job.size) for job in jobs)


def pads(job: Job) -> tuple[bool, bool]:
    """May the job's row stand behind padding, and before padding, without any difference to it?"""
    kind = job.kind
    by_decoder = kind.decoder.pads(kind.config)
    return by_decoder[0] and kind.adapter.pads_left, by_decoder[1] and kind.adapter.pads_right


def canvas(job: Job) -> tuple[int, int]:
    """Prompt and answer positions of the canvas that a job would open: powers of two up to the longest seen, or where
    padding is not possible, its own."""
    found = tuple(
        min(max(SMALLEST, 1 << (size - 1).bit_length()), longest) if may_pad else size
        for size, longest, may_pad in zip(job.size, job.kind.longest, pads(job), strict=True)
    )
    limit = None if job.kind.adapter.takes_positions else job.kind.adapter.context_length
    return job.size if limit is not None and sum(found) > limit else (found[0], found[1])  # padding counts there
