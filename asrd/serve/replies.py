"""`Reply`: the answer to one order, from its tickets to texts, finish reasons and usage; whole or bit by bit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from asrd.many import Result
from asrd.serve.drafts import Drafts
from asrd.serve.errors import ApiError
from asrd.serve.fields import Order
from asrd.serve.service import Service
from asrd.serve.text import SettledText
from asrd.serve.worker import Accepted, Ended, Event, Failed, Settled, Stepped, Ticket
from asrd.trace.texts import TokenTexts


@dataclass(frozen=True)
class Update:
    """News of one choice: more text, what a step did, or its end."""

    index: int
    text: str = ""
    draft: dict[str, Any] | None = None
    finish_reason: str | None = None


class Choice:
    """One answer on its way."""

    def __init__(self, service: Service, order: Order, prompt: list[int], length: int) -> None:
        self.prompt, self.length = prompt, length
        self.tokenizer, self.eos_ids = service.tokenizer, service.eos_ids
        self.decode = partial(service.tokenizer.decode, skip_special_tokens=True) if service.tokenizer else _no_text
        self.text = SettledText(self.decode, order.stop, strip=order.chat)
        self.drafts = Drafts(service.tokenizer, prompt, service.mask_id, service.eos_ids) if order.drafts else None
        self.result: Result | None = None
        self.finish_reason: str | None = None

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer, the end of the text included."""
        return self.result.length if self.result is not None else 0

    @property
    def scored(self) -> list[tuple[str, float]]:
        """(text, log-probability) of each token of the answer, its end left out."""
        if self.result is None or self.result.logprobs is None:
            return []
        texts, known = TokenTexts(self.tokenizer, torch.tensor(self.prompt)), dict[str, str]()
        tokens = [token for token in self.result.tokens[: self.result.length] if token not in self.eos_ids]
        known |= texts.new(tokens)
        scores = self.result.logprobs["logprob"]
        return [(known.get(str(token), ""), float(score)) for token, score in zip(tokens, scores, strict=False)]

    @property
    def details(self) -> dict[str, Any]:
        """What it cost."""
        found = {"forward_passes": 0, "tokens_per_forward": 0.0, "drafted": 0, "revoked": 0, "anchors": 0, "edited": 0}
        if self.result is not None and self.result.forwards:
            found |= {name: getattr(self.result, name) for name in ("drafted", "revoked", "anchors", "edited")}
            found["forward_passes"] = self.result.forwards
            found["tokens_per_forward"] = round(self.completion_tokens / self.result.forwards, 4)
        return found


class Reply:
    """Follows the choices of an order. `start` first, `close` in the end, whatever happens."""

    def __init__(self, service: Service, order: Order, prompts: list[list[int]]) -> None:
        self.service, self.order, self.prompts = service, order, prompts
        each = [ids for ids in prompts for _ in range(order.n)]
        self.choices = [Choice(service, order, ids, service.max_tokens(order, len(ids))) for ids in each]
        self.begun = time.monotonic()
        self.deadline = self.begun + service.limits.seconds
        self.ended = [False] * len(self.choices)
        self._events: asyncio.Queue[tuple[int, Event | dict[str, Any]]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._first_text = False

    async def start(self) -> None:
        """Submit, and raise ApiError if the engine refuses any choice."""
        self.service.admit(len(self.choices))
        self._tickets = self.service.tickets(self.order, self.prompts, self._told)
        self.service.metrics.prompt.inc(sum(len(choice.prompt) for choice in self.choices))
        asked, early = len(self.choices), []
        while asked:  # the first event of a choice says whether it was accepted
            number, event = await self._next()
            if isinstance(event, Accepted):
                asked -= 1
            elif isinstance(event, Ended) and event.result.error is not None and event.result.steps == 0:
                self.ended[number] = True
                raise ApiError(400, event.result.error, self.order.field_of(event.result.error))
            elif isinstance(event, Failed):
                raise ApiError(500, event.message)
            else:
                early.append((number, event))
        for news in early:  # of a choice that was accepted before another one
            self._events.put_nowait(news)

    async def updates(self) -> AsyncIterator[Update]:
        """News until every choice has ended."""
        while not all(self.ended):
            number, event = await self._next()
            choice = self.choices[number]
            if isinstance(event, dict):
                yield Update(number, draft=event)
            elif isinstance(event, Settled):
                if delta := choice.text.add(event.tokens):
                    self._said()
                    yield Update(number, delta)
            elif isinstance(event, Ended):
                for update in self._end(number, choice, event.result):
                    yield update
            elif isinstance(event, Failed):
                raise ApiError(500, event.message)
        self.service.answered(time.monotonic() - self.begun)
        self.service.metrics.latency.observe(time.monotonic() - self.begun)
        self.service.metrics.completion.inc(self.usage["completion_tokens"])

    async def finish(self) -> None:
        """Wait for the end of every choice."""
        async for _ in self.updates():
            pass

    def close(self) -> None:
        """Cancel what has not ended: nobody waits for it any more."""
        for number, ticket in enumerate(self._tickets):
            if not self.ended[number]:
                self.service.worker.cancel(ticket)

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of prompts and answers; a prompt counts once."""
        prompt = sum(len(ids) for ids in self.prompts)
        completion = sum(choice.completion_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _end(self, number: int, choice: Choice, result: Result) -> list[Update]:
        choice.result = result
        if result.error is not None:
            raise ApiError(500, result.error)
        if result.finish_reason == "cancelled":
            raise ApiError(503, "the request was cancelled")
        delta = choice.text.end(result.tokens[: result.length], result.stopped_by is not None)
        if delta:
            self._said()
        self.service.metrics.unfaithful.inc(not choice.text.faithful)
        self.ended[number], choice.finish_reason = True, result.finish_reason
        return [*([Update(number, delta)] if delta else []), Update(number, finish_reason=result.finish_reason)]

    def _said(self) -> None:
        if not self._first_text:
            self._first_text = True
            self.service.metrics.first.observe(time.monotonic() - self.begun)

    def _told(self, number: int, event: Event) -> None:
        """An event arrives: a step is reduced to what it changed, so that a slow reader costs little memory."""
        choice = self.choices[number]
        if isinstance(event, Ended):
            self.service.metrics.ended(event.result)
            choice.result = event.result
        if not isinstance(event, Stepped):
            self._events.put_nowait((number, event))
        elif choice.drafts is not None and not self.ended[number]:
            self._events.put_nowait((number, choice.drafts.see(event.moment, event.settled)))

    async def _next(self) -> tuple[int, Event | dict[str, Any]]:
        left = self.deadline - time.monotonic()
        try:
            return await asyncio.wait_for(self._events.get(), max(left, 0))
        except TimeoutError:
            seconds = self.service.limits.seconds
            raise ApiError(504, f"the answer took longer than {seconds:g} seconds and was cancelled") from None


def _no_text(ids: list[int]) -> str:
    return ""
