"""Clients that go away, do not read, flood or ask for too much, and an engine that fails: the next is answered."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from asrd.cli import main
from asrd.serve.limits import Limits
from tests.support.server import Running, alone, chat, running

LONG = {"decoder": "standard", "block_length": 32}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(slots=4, limits=Limits(waiting=400, seconds=60)) as found:
        yield found


def request(stream: bool = True, tokens: int = 64, **fields: Any) -> bytes:
    body = {"model": "tiny", "messages": chat(), "max_tokens": tokens, "stream": stream, "asrd": LONG} | fields
    content = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(content)}\r\n\r\n".encode() + content


def is_well(server: Running) -> None:
    answer = server.client().chat.completions.create(model="tiny", messages=chat(), max_tokens=16)
    assert answer.choices[0].message.content == alone(chat(), 16)[0]
    assert server.service.worker.healthy


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_go_away_in_mid_answer_are_cancelled(server: Running, stream: bool) -> None:
    before, steps = server.service.metrics.cancelled._value.get(), server.service.metrics.steps._value.get()
    clients = 200 if stream else 20
    for _ in range(clients // 20):
        sockets = [server.connect() for _ in range(20)]
        for one in sockets:
            one.sendall(request(stream, tokens=256))
        if stream:
            assert sockets[0].recv(100).startswith(b"HTTP/1.1 200")
        else:
            while not server.service.inflight:
                time.sleep(0.01)
        for one in sockets:
            one.close()
    assert server.idle(30), f"{server.service.inflight} requests still run for nobody"
    assert server.service.metrics.cancelled._value.get() - before >= clients // 2
    assert server.service.metrics.steps._value.get() - steps < clients * 256 / 4, "they were decoded to the end"
    is_well(server)


@pytest.mark.slow
def test_a_client_that_does_not_read_keeps_nobody_waiting(server: Running) -> None:
    slow = [server.connect() for _ in range(8)]  # twice the slots
    for one in slow:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        one.sendall(request(tokens=48, asrd=LONG | {"drafts": True}))
    assert server.idle(40), "an answer that nobody reads holds its slot"
    is_well(server)
    read = b""
    while not read.endswith(b"0\r\n\r\n"):  # and it is all there when the client reads it
        part = slow[0].recv(65536)
        assert part
        read += part
    assert read.count(b'"step":') == alone(chat(), 48, **LONG)[2]
    assert b"data: [DONE]" in read
    for one in slow:
        one.close()


def test_floods_of_headers_and_half_requests_are_shut_out(server: Running) -> None:
    for flood in (b"GET / HTTP/1.1\r\n" + b"X-A: 1\r\n" * 20_000, b"GET /" + b"a" * 100_000, b"\x16\x03\x01" * 50):
        with server.connect() as one:
            try:
                one.sendall(flood + b"\r\n\r\n")
                assert one.recv(100).startswith((b"HTTP/1.1 4", b""))
            except (BrokenPipeError, ConnectionResetError):
                pass
    with server.connect() as half:
        half.sendall(request()[:-20])
    is_well(server)


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with running(slots=1, limits=Limits(receive_seconds=0.3)) as server, server.connect() as one:
        one.sendall(request()[:-20])
        answer = one.recv(2000)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"the body did not arrive within 0.3 seconds" in answer


def test_more_than_may_wait_is_answered_with_429_and_when_to_come_back() -> None:
    with running(slots=1, limits=Limits(waiting=2)) as server:
        sockets = [server.connect() for _ in range(3)]
        for one in sockets:
            one.sendall(request(tokens=256))
            one.recv(100)
        with pytest.raises(openai.RateLimitError) as error:
            server.client().chat.completions.create(model="tiny", messages=chat())
        assert 1 <= int(error.value.response.headers["retry-after"]) <= 60
        assert "requests are waiting: try again in" in error.value.message
        with pytest.raises(openai.RateLimitError):
            server.client().chat.completions.create(model="tiny", messages=chat(), n=4)
        for one in sockets:
            one.close()
        assert server.idle()
        is_well(server)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_cancelled(stream: bool) -> None:
    with running(slots=1, limits=Limits(seconds=0.4)) as server:
        ask = server.client().chat.completions.create
        with pytest.raises(openai.APIError, match=r"took longer than 0.4 seconds"):
            list(ask(model="tiny", messages=chat(), max_tokens=400, stream=stream, extra_body={"asrd": LONG}))
        assert server.idle(10)


def test_an_engine_that_fails_fails_what_runs_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(slots=2) as server:
        engine = server.service.worker.engine

        def broken() -> list[Any]:
            raise RuntimeError("CUDA error: an illegal memory access")

        monkeypatch.setattr(engine, "step", broken)
        with pytest.raises(openai.InternalServerError, match="RuntimeError in the engine") as error:
            server.client().chat.completions.create(model="tiny", messages=chat())
        assert "illegal" not in str(error.value), "details are for the log"
        is_well(server)
        assert server.service.worker.engine is not engine
        assert server.idle()


def test_a_server_whose_engine_does_not_recover_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(slots=2) as server:
        worker = server.service.worker
        make = worker.make

        def broken(observer: Any) -> Any:
            engine = make(observer)
            monkeypatch.setattr(engine, "step", lambda: 1 / 0)
            return engine

        monkeypatch.setattr(worker, "make", broken)
        worker.engine = broken(worker._observe)
        for _ in range(worker.FAILURES):
            with pytest.raises(openai.InternalServerError, match="ZeroDivisionError in the engine"):
                server.client().chat.completions.create(model="tiny", messages=chat())
        end = time.monotonic() + 30
        while server.answers:
            assert time.monotonic() < end, "the server goes on without an engine"
            time.sleep(0.1)


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", "no/such", "--port", port]) == 2
    assert f"--port {port} cannot be used: Address already in use" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_stays_flat_over_many_requests(server: Running) -> None:
    import psutil

    client, process = server.client(), psutil.Process()

    def some(count: int) -> None:
        for number in range(count):  # one more seed each
            client.completions.create(model="tiny", prompt="ann has 3 apples .", max_tokens=4, seed=number)

    some(30)
    gc.collect()
    before = process.memory_info().rss
    some(40)
    gc.collect()
    assert process.memory_info().rss - before < 20e6


def test_prompts_are_not_logged_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    for log in (False, True):
        caplog.clear()
        with running(slots=1, log_prompts=log) as server:
            server.client().completions.create(model="tiny", prompt="ann has 3 apples .", max_tokens=4)
            with pytest.raises(openai.BadRequestError):
                server.client().completions.create(model="tiny", prompt="apples <|mask|>", max_tokens=4)
        own = [record.getMessage() for record in caplog.records if not record.name.startswith(("openai", "httpcore"))]
        assert any("apples" in line for line in own) == log


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is open to others: give an API key"),
        (["--host", "example.org"], "is open to others"),
        (["--api-key", "short"], "less than 8 characters"),
        (["--api-key-file", "/nowhere"], "nowhere"),
        (["--slots", "0"], "--slots 0: expected at least 1"),
        (["--port", "70000"], "expected at most 65535"),
        (["--replicas", "2"], "are for --ray"),
        (["--timeout", "0"], "--timeout 0: expected more than 0"),
        (["--set", "treshold=1"], "did you mean threshold?"),
    ],
)
def test_a_server_that_would_be_unsafe_or_wrong_does_not_start(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_to_stop_lets_running_answers_end_and_refuses_new_ones() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "asrd", "serve", "--port", str(port), "--slots", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        server = Running(port, None)  # type: ignore[arg-type]
        client = server.client(max_retries=60)
        client.models.list()
        texts: list[str] = []

        def ask() -> None:
            chunks = client.with_options(max_retries=0).chat.completions.create(
                model="tiny", messages=chat(), max_tokens=200, stream=True, extra_body={"asrd": LONG}
            )
            texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert texts == [alone(chat(), 200, **LONG)[0]] * 3
        assert process.wait(30) in (0, -signal.SIGTERM)
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
