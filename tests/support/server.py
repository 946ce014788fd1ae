"""The server for tests: the app that `asrd serve` runs, under uvicorn in a thread, on a free port of loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import asrd
from asrd.serve.app import make_app
from asrd.serve.limits import Limits
from asrd.serve.run import make_server
from asrd.serve.service import Service

QUESTION = "ben has {} stones . monday he finds 3 . how many stones does ben have now ?"


@cache
def tiny() -> tuple[Any, Any]:
    return asrd.load("tiny")


@dataclass
class Running:
    """A server that answers."""

    port: int
    service: Service

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self, seconds: float = 30.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), seconds)

    def client(self, **options: Any) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0} | options)

    @property
    def answers(self) -> bool:
        """Does anybody listen?"""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def idle(self, seconds: float = 30.0) -> bool:
        """Wait until the engine has nothing to do."""
        end = time.monotonic() + seconds
        while self.service.inflight and time.monotonic() < end:
            time.sleep(0.02)
        return self.service.inflight == 0


@contextmanager
def running(
    slots: int = 4,
    limits: Limits | None = None,
    model: Any = None,
    tokenizer: Any = None,
    settings: Any = None,
    **options: Any,
) -> Iterator[Running]:
    """A server of `tiny`, or of another model."""
    loaded, tokenizer = tiny() if model is None else (model, tokenizer)
    service = Service(loaded, tokenizer, "tiny", slots, limits, {"max_new_tokens": 32} | (settings or {}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = make_server(make_app(service, **options), service, "127.0.0.1", port, access_log=False)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield Running(port, service)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server did not stop"


def alone(messages: list[dict[str, str]] | str, max_tokens: int = 32, row: int = 0, **settings: Any) -> Any:
    """(text, length, steps) of `fast_generate` on a chat, or on the text of a prompt."""
    model, tokenizer = tiny()
    if isinstance(messages, str):
        ids = tokenizer(messages)["input_ids"]
    else:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    out = asrd.fast_generate(
        model, torch.tensor([ids]), max_new_tokens=max_tokens, row_ids=[row], return_dict_in_generate=True, **settings
    )
    tokens = out.sequences[0, len(ids) :].tolist()
    length = tokens.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in tokens else len(tokens)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return (text if isinstance(messages, str) else text.strip()), length, int(out.steps[0])


def chat(number: int = 4) -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTION.format(number)}]
