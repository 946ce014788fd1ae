"""A reply in OpenAI's words: the JSON object, the chunks of a stream, and the response that sends them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from asrd import __version__
from asrd.serve.errors import ApiError
from asrd.serve.replies import Choice, Reply, Update

DONE = b"data: [DONE]\n\n"


class Words:
    """The fields that all parts of one answer share."""

    def __init__(self, reply: Reply) -> None:
        self.reply, self.order = reply, reply.order
        chat = self.order.chat
        self.name = ("chat.completion", "chat.completion.chunk") if chat else ("text_completion", "text_completion")
        self.common = {
            "id": ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12),
            "created": int(time.time()),
            "model": reply.service.name,
            "system_fingerprint": f"asrd-{__version__}",
        }

    def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        choices = [self._choice(index, choice) for index, choice in enumerate(self.reply.choices)]
        return {**self.common, "object": self.name[0], "choices": choices, "usage": self.reply.usage}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        scores = self._scores(choice) if self.order.logprobs else None
        found: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason, "logprobs": scores}
        if self.order.chat:
            found["message"] = {"role": "assistant", "content": choice.text.sent, "refusal": None}
        else:
            found["text"] = choice.text.sent
        return found | ({"asrd": choice.details} if self.order.details else {})

    def _scores(self, choice: Choice) -> dict[str, Any]:
        """Log-probabilities as the endpoint has them."""
        scored = choice.scored
        if self.order.chat:
            parts = [
                {"token": text, "logprob": score, "bytes": list(text.encode()), "top_logprobs": []}
                for text, score in scored
            ]
            return {"content": parts, "refusal": None}
        texts, scores = [text for text, _ in scored], [score for _, score in scored]
        joined = "".join(texts)
        dropped = 0 if joined.startswith(choice.text.sent) else len(joined) - len(joined.lstrip())  # by the tokenizer
        ends = list(accumulate(map(len, texts)))
        offsets = [max(end - len(text) - dropped, 0) for end, text in zip(ends, texts, strict=True)]
        return {"tokens": texts, "token_logprobs": scores, "top_logprobs": None, "text_offset": offsets}

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events. An error after the first of them is the last one."""
        try:
            for index, choice in enumerate(self.reply.choices):
                extra = {"length": choice.length, "prompt_tokens": len(choice.prompt)} if self.order.drafts else None
                start: Any = {"role": "assistant", "content": ""} if self.order.chat else ""
                if start or extra:
                    yield self._chunk(index, start, None, extra)
            async for update in self.reply.updates():
                yield self._update(update)
            if self.order.include_usage:
                yield event({**self.common, "object": self.name[1], "choices": [], "usage": self.reply.usage})
            yield DONE
        except ApiError as error:
            yield event(error.body)

    def _update(self, update: Update) -> bytes:
        choice = self.reply.choices[update.index]
        extra = choice.details if update.finish_reason and self.order.details else update.draft
        delta: Any = update.text
        if self.order.chat:
            delta = {"content": update.text} if update.text else {}
        return self._chunk(update.index, delta, update.finish_reason, extra)

    def _chunk(self, index: int, delta: Any, reason: str | None, extra: dict[str, Any] | None) -> bytes:
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": reason}
        choice |= {"delta": delta} if self.order.chat else {"text": delta}
        if extra is not None:
            choice["asrd"] = extra
        chunk = {**self.common, "object": self.name[1], "choices": [choice]}
        return event(chunk | ({"usage": None} if self.order.include_usage else {}))


def event(value: Any) -> bytes:
    """A server-sent event. JSON has no line ends, so that a text cannot end it."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends events until they end, the client goes away or its time is up; closes the reply in any case."""

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, slack: float = 5.0) -> None:
        super().__init__(headers={"x-accel-buffering": "no", "cache-control": "no-store"})
        self.reply, self.slack = reply, slack
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            left = max(self.reply.deadline - time.monotonic(), 0) + self.slack  # of a client that does not read
            await first_of(self._pump(send), gone(receive), seconds=left)
        finally:
            self.reply.close()

    async def _pump(self, send: Send) -> None:
        async for part in Words(self.reply).events():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def whole_answer(reply: Reply, request: Request) -> dict[str, Any] | None:
    """The answer as one object; None if the client has gone away."""
    try:
        finished = await first_of(reply.finish(), gone(request.receive))
    finally:
        reply.close()
    return Words(reply).whole() if finished else None


async def gone(receive: Receive) -> None:
    """Wait until the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_of(work: Any, other: Any, seconds: float | None = None) -> bool:
    """Do `work` until it is done, the `other` ends or the time is up: True if it is done; its errors are raised."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            tasks[0].result()
            return True
        return False
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
