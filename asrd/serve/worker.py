"""`Worker`: the engine in a thread of its own. Tickets go in by a queue, events come out in the asyncio loop.

The only module that touches the engine. What tickets wait for, and what their answers look like, is not its affair.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from asrd.engine.observers.events import Moment, moment_of
from asrd.engine.request import Request
from asrd.engine.scheduler import Usage
from asrd.many import Engine, Result
from asrd_kernels import DecodeState

log = logging.getLogger("asrd.serve")


class Event:
    """What a ticket is told."""

    last = False  # nothing follows


@dataclass(frozen=True)
class Accepted(Event):
    """The engine has taken the request; it waits or runs."""


@dataclass(frozen=True)
class Settled(Event):
    """These tokens, behind those of the events before, will not change any more."""

    tokens: list[int]


@dataclass(frozen=True)
class Stepped(Event):
    """The row after a step, [1, G] on the CPU; `settled` positions at its beginning will not change any more."""

    moment: Moment
    settled: int


@dataclass(frozen=True)
class Ended(Event):
    """The request has ended."""

    result: Result
    last = True


@dataclass(frozen=True)
class Failed(Event):
    """The engine has failed."""

    message: str
    last = True


@dataclass(eq=False)
class Ticket:
    """One request to the engine, and who is told of it (in the asyncio loop).

    settled, steps: which events are wanted besides the first and the last
    """

    ids: list[int]
    settings: dict[str, Any]
    notify: Callable[[Event], None]
    settled: bool = False
    steps: bool = False
    _seen: int = field(default=0, repr=False)
    _step: int = field(default=0, repr=False)
    _handle: Request | None = field(default=None, repr=False)

    @property
    def watched(self) -> bool:
        """Must its row be looked at after each step?"""
        return self.settled or self.steps


_Command = tuple[str, Ticket | None]


class Worker:
    """Runs the engine that `make` makes with an observer, in a thread, from `start` to `stop`.

    An exception in the engine fails what is running and is logged; a new engine takes over, on the same model.
    """

    FAILURES = 3  # in a row, after which the worker is not healthy

    def __init__(self, make: Callable[[Callable[..., None]], Engine]) -> None:
        self.make = make
        self.engine = make(self._observe)
        self.usage = Usage()  # as of the last step
        self.spent = Usage()  # of engines before this one
        self.failures = 0
        self._tickets: dict[int, Ticket] = {}
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._outbox: list[tuple[Ticket, Event]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # --- from the asyncio loop ---

    def start(self) -> None:
        """Begin; events arrive in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="asrd-engine", daemon=True)
        self._thread.start()

    def stop(self, seconds: float = 10.0) -> None:
        """Cancel what runs and end the thread."""
        if self._thread is not None:
            self._inbox.put(("stop", None))
            self._thread.join(seconds)
            self._thread = None

    def submit(self, ticket: Ticket) -> None:
        """Hand a request to the engine."""
        self._inbox.put(("submit", ticket))

    def cancel(self, ticket: Ticket) -> None:
        """Take it out of the engine; it is told that it has ended, unless it has already."""
        self._inbox.put(("cancel", ticket))

    @property
    def healthy(self) -> bool:
        """Does the thread run, and the engine work?"""
        return self._thread is not None and self._thread.is_alive() and self.failures < self.FAILURES

    # --- in the thread ---

    def _run(self) -> None:
        going = True
        while going:
            going = self._read_inbox()
            if self.engine.pending:
                try:
                    results = self.engine.step()
                    self.failures = 0
                except Exception as error:
                    log.exception("the engine failed; a new one takes over")
                    self._fail(f"{type(error).__name__} in the engine")
                    continue
                self._say_ended(results)
            self._update_usage()
            self._flush()

    def _read_inbox(self) -> bool:
        """Do what was asked; waits if there is nothing else to do. False: stop."""
        wait = not self.engine.pending
        while True:
            try:
                command, ticket = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if ticket is None:
                self._drop("the server is shutting down")
                return False
            if command == "submit":
                self._submit(ticket)
            elif ticket._handle is not None:
                self.engine.cancel(ticket._handle)

    def _submit(self, ticket: Ticket) -> None:
        try:
            handle = ticket._handle = self.engine.submit(ticket.ids, **ticket.settings)
        except Exception as error:  # the engine answers a bad request; this is a fault of ours
            log.exception("a request could not be submitted")
            self._outbox.append((ticket, Failed(f"{type(error).__name__} in the engine")))
            return
        self._tickets[handle.index] = ticket
        if not handle.done:
            self._outbox.append((ticket, Accepted()))

    def _say_ended(self, results: list[Result]) -> None:
        for result in results:
            ticket = self._tickets.pop(result.index)
            ticket._handle = None
            self._outbox.append((ticket, Ended(result)))

    def _fail(self, message: str) -> None:
        self.failures += 1
        self._drop(message)
        self._update_usage()
        self.spent = replace(self.usage)
        self.engine = self.make(self._observe)

    def _drop(self, message: str) -> None:
        """Tell every ticket that nothing will come."""
        self._outbox += [(ticket, Failed(message)) for ticket in self._tickets.values()]
        for ticket in self._tickets.values():
            ticket._handle = None
        self._tickets = {}
        self._flush()

    def _update_usage(self) -> None:
        now, before = self.engine.usage, self.spent
        self.usage = Usage(
            before.forwards + now.forwards,
            before.rows + now.rows,
            before.positions + now.positions,
            before.used + now.used,
        )

    def _flush(self) -> None:
        if self._outbox and self._loop is not None and not self._loop.is_closed():
            batch, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(_deliver, batch)

    def _observe(self, state: DecodeState, handles: tuple[Request | None, ...]) -> None:
        """An observer of the engine: what each watched row has become."""
        owners = [None if handle is None else self._tickets.get(handle.index) for handle in handles]
        slots = [slot for slot, ticket in enumerate(owners) if ticket is not None and ticket.watched]
        if not slots:
            return
        moment, lengths, first = moment_of(state), state.lengths.tolist(), state.settled.tolist()
        for slot in slots:
            ticket = owners[slot]
            assert ticket is not None
            length = min(lengths[slot], ticket.settings["max_new_tokens"])  # block models have whole blocks
            settled = min(first[slot], length)
            if ticket.settled and settled > ticket._seen:
                self._outbox.append((ticket, Settled(moment.tokens[slot, ticket._seen : settled].tolist())))
                ticket._seen = settled
            row = Moment(*(values[slot : slot + 1] for values in moment))
            if ticket.steps and int(row.step) > ticket._step:  # in block diffusion it may pass over a commit
                ticket._step = int(row.step)
                tokens, pending, trusted = (values[:, :length] for values in (row.tokens, row.pending, row.trusted))
                cut = row._replace(tokens=tokens, pending=pending, trusted=trusted)
                self._outbox.append((ticket, Stepped(cut, settled)))


def _deliver(batch: list[tuple[Ticket, Event]]) -> None:
    for ticket, event in batch:
        try:
            ticket.notify(event)
        except Exception:
            log.exception("an event could not be delivered")
