"""`Gate`: what every request passes before it reaches a route: key, host, size, and the headers of every answer.

An ASGI middleware. Knows no route but those that need no key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from asrd.serve.errors import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN = ("/", "/health")  # these tell nothing and cost nothing
LOOPBACK = ("localhost", "127.0.0.1", "::1")
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)


class Gate:
    """Refuses what must not reach the app.

    key    that clients must have; None: nobody needs one, but then only loopback names are served, so that no page of
           the web can reach the server by a name that it controls, unless `anyone`
    body   bytes of a request at most
    seconds for the client to send them
    """

    def __init__(self, app: Asgi, key: str | None, body: int, seconds: float, anyone: bool = False) -> None:
        self.app, self.body, self.seconds, self.anyone = app, body, seconds, anyone
        self.digest = None if key is None else _digest(key.encode())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        send = _with_headers(send)
        try:
            self._check_sender(scope, headers)
            if scope["method"] in ("POST", "PUT", "PATCH"):
                self._check_type(headers)
                receive = _replay(await self._read(headers, receive), receive)
        except ApiError as error:
            await _answer(send, error)
            return
        await self.app(scope, receive, send)

    def _check_sender(self, scope: MutableMapping[str, Any], headers: dict[bytes, bytes]) -> None:
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin")
        if self.digest is None and not self.anyone and host_name(host) not in LOOPBACK:
            raise ApiError(403, "without an API key this server answers to localhost only")
        if origin is not None and origin.decode("latin-1").partition("://")[2] != host:
            raise ApiError(403, "pages of other origins may not use this server")
        if self.digest is None or scope["path"] in OPEN:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if not given:
            message = "no API key: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})
        if not (hmac.compare_digest(_digest(given.strip()), self.digest) and scheme.lower() == b"bearer"):
            raise ApiError(401, "the API key is wrong", None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})

    def _check_type(self, headers: dict[bytes, bytes]) -> None:
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":
            raise ApiError(415, "the body must be JSON: send the header Content-Type: application/json")
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise ApiError(415, "a compressed body is not accepted")

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The whole body, if it is not too long and comes in time."""
        too_long = ApiError(413, f"the body is longer than {self.body} bytes", headers={"Connection": "close"})
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self.body:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self.seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ApiError(400, "the client went away")
                    body += message.get("body", b"")
                    if len(body) > self.body:
                        raise too_long
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            message_ = f"the body did not arrive within {self.seconds:g} seconds"
            raise ApiError(408, message_, headers={"Connection": "close"}) from None


def host_name(host: str) -> str:
    """The name in a Host header, without its port and the brackets of an address; empty if it is not well formed."""
    found = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d*)?", host)
    return "" if found is None else found[1] or found[2] or ""


def _digest(key: bytes) -> bytes:
    """Keys are compared by their hashes, in constant time: neither length nor content can be measured."""
    return hashlib.sha256(key).digest()


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body once, then what the client does."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _with_headers(send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            known = {name.lower() for name, _ in message.get("headers", ())}
            extra: Iterable[tuple[bytes, bytes]] = (pair for pair in HEADERS if pair[0] not in known)
            message["headers"] = [*message.get("headers", ()), *extra]
        await send(message)

    return sent


async def _answer(send: Send, error: ApiError) -> None:
    content = json.dumps(error.body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
