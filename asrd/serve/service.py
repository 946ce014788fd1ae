"""`Service`: a model, its tokenizer and its engine thread, and how much may wait for it. Knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from asrd.arguments import resolve_config
from asrd.config import FIELDS, AsrdConfig
from asrd.decoders import DECODERS, find_decoder
from asrd.engine.caches import require_blocks
from asrd.engine.defaults import with_defaults
from asrd.many import Engine, Observer
from asrd.models import ModelAdapter, special_ids
from asrd.serve.errors import ApiError
from asrd.serve.fields import CLOSED, Order
from asrd.serve.limits import Limits
from asrd.serve.metrics import Metrics
from asrd.serve.prompts import encode_order
from asrd.serve.worker import Event, Ticket, Worker

MEMORY = 0.9  # of the running mean of seconds per answer


class Service:
    """Everything that requests share.

    name      of the model, as clients say it
    settings  of the engine, for all requests that do not say otherwise
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str,
        slots: int = 16,
        limits: Limits | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self.name, self.slots, self.limits = tokenizer, name, slots, limits or Limits()
        config, adapter = resolve_config(None, settings or {}), ModelAdapter(model)
        ids = special_ids(adapter, config, tokenizer)
        self.context, self.mask_id = adapter.context_length, ids.mask
        if adapter.block_length is not None:
            require_blocks(adapter, config, find_decoder(config.decoder).variant(config, adapter))
        if config.max_new_tokens is None:  # the server's own default, not the model's
            config.max_new_tokens = FIELDS["max_new_tokens"].default
        self.config: AsrdConfig = with_defaults(config, adapter)
        self.decoders = [name for name in DECODERS if self._runs(name, adapter)]
        self.eos_ids = ids.eos if self.config.early_stop else ()

        def make(observer: Observer) -> Engine:
            return Engine(model, tokenizer, slots, observers=[observer], **settings or {})

        self.worker = Worker(make)
        self.metrics = Metrics(self)
        self.created = int(time.time())
        self.draining = False
        self.inflight = 0  # tickets that have not ended
        self._seconds = 1.0  # a running mean of what an answer takes
        self._encoder = ThreadPoolExecutor(1, "asrd-tokenizer")

    def _runs(self, name: str, adapter: ModelAdapter) -> bool:
        """Is this a decoder for the model?"""
        if adapter.block_length is None:
            return DECODERS[name].full_attention
        return DECODERS[name].variant(self.config, adapter).on_blocks

    def start(self) -> None:
        """Begin to take orders, in the running loop."""
        self.worker.start()

    def stop(self) -> None:
        """End; what still runs is told so."""
        self.draining = True
        self.worker.stop()
        self._encoder.shutdown(wait=False)

    @property
    def waiting(self) -> int:
        """Tickets that have no slot yet."""
        return max(self.inflight - self.slots, 0)

    async def encode(self, order: Order) -> list[list[int]]:
        """The ids of an order's prompts, made in a thread: a long prompt must not keep the others waiting."""
        work = partial(encode_order, self.tokenizer, order, self.limits, self.context, self.mask_id)
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    def admit(self, count: int) -> None:
        """Raise 429 if so many more tickets may not wait, 503 if the server is about to stop."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", headers={"Retry-After": "5"})
        if not self.worker.healthy:
            raise ApiError(503, "the engine is not running", headers={"Retry-After": "5"})
        if max(self.inflight + count - self.slots, 0) > self.limits.waiting:
            seconds = min(max(math.ceil(self._seconds * (self.waiting + 1) / self.slots), 1), 60)
            message = f"{self.waiting} requests are waiting: try again in {seconds} seconds"
            raise ApiError(429, message, code="server_busy", headers={"Retry-After": str(seconds)})

    def tickets(self, order: Order, prompts: list[list[int]], notify: Callable[[int, Event], None]) -> list[Ticket]:
        """A ticket for each choice, submitted; `notify` is told its number and each event."""
        seed = order.seed
        if seed is None and order.settings.get("temperature", self.config.temperature) > 0:
            seed = secrets.randbits(63)
        made = []
        for number in range(len(prompts) * order.n):
            ids, row = prompts[number // order.n], number % order.n
            own: dict[str, Any] = {"max_new_tokens": self.max_tokens(order, len(ids)), "row_id": row}
            own |= {"seed": self.config.seed if seed is None else seed}
            own |= {"logprobs": True} if order.logprobs else {}
            own |= {"stop_strings": list(order.stop)} if order.stop else {}
            made.append(Ticket(ids, order.settings | own, self._told(number, notify), order.stream, order.drafts))
        self.inflight += len(made)
        for ticket in made:
            self.worker.submit(ticket)
        return made

    def max_tokens(self, order: Order, prompt: int) -> int:
        """How much an answer may have: what was asked for, or the server's own as far as the context goes."""
        if order.max_tokens is not None:
            return order.max_tokens
        most = min(int(self.config.max_new_tokens), self.limits.max_tokens)
        return most if self.context is None else max(min(most, self.context - prompt), 1)

    def answered(self, seconds: float) -> None:
        """An answer took so long."""
        self._seconds = MEMORY * self._seconds + (1 - MEMORY) * seconds

    def _told(self, number: int, notify: Callable[[int, Event], None]) -> Callable[[Event], None]:
        def told(event: Event) -> None:
            if event.last:
                self.inflight -= 1
            notify(number, event)

        return told

    @property
    def facts(self) -> dict[str, Any]:
        """What a client may want to know of the server."""
        settings = {name: value for name, value in self.config.settings().items() if name not in CLOSED}
        return {
            "decoders": self.decoders,
            "settings": settings,
            "max_new_tokens": min(int(self.config.max_new_tokens), self.limits.max_tokens),
            "max_tokens": self.limits.max_tokens,
            "context_length": self.context,
            "slots": self.slots,
            "process": os.getpid(),  # which of several replicas this is
            "chat": getattr(self.tokenizer, "chat_template", None) is not None,
        }
