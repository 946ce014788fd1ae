"""`Limits`: what one request, and all of them together, may take."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Limits:
    """Every limit of the server; a request over one is refused with a sentence that names it."""

    body: int = 1 << 20  # bytes of a request
    prompt_tokens: int | None = None  # of one prompt; None: what the model's context leaves
    max_tokens: int = 4096  # that a request may ask for
    choices: int = 16  # of one request: prompts times n
    waiting: int = 64  # choices that wait for a slot; one more is answered with 429
    seconds: float = 300.0  # from the request to the end of its answer
    receive_seconds: float = 30.0  # for the client to send its body
    grace: float = 30.0  # seconds for running requests after a signal to stop

    def __post_init__(self) -> None:
        for field in fields(self):
            value: Any = getattr(self, field.name)
            least = 0 if field.name in ("waiting", "grace") else 1 if isinstance(value, int) else 1e-3
            if value is not None and value < least:
                raise ValueError(f"{field.name}={value!r} is out of range: expected at least {least}")
