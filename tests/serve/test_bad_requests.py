"""Bad requests, each with its status and its sentence; the server answers the next good one."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from asrd.serve.fields import CLOSED, FIELDS, SETTINGS
from asrd.serve.limits import Limits
from tests.support.server import Running, alone, chat, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
KEY = "correct-horse-battery"
HELLO = {"role": "user", "content": "ann has 3 apples ."}
LIMITS = Limits(body=20_000, prompt_tokens=60, max_tokens=64, choices=4)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(slots=2, limits=LIMITS) as found:
        yield found


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with running(slots=2, api_key=KEY) as found:
        yield found


def send(
    server: Running, method: str, path: str, body: bytes | str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest(method, path, skip_host="Host" in (headers or {}))
    content = body.encode() if isinstance(body, str) else body
    given = (headers or {}) | ({} if content is None else {"Content-Length": str(len(content))})
    for name, value in given.items():
        connection.putheader(name, value)
    connection.endheaders(content)
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def refused(server: Running, body: Any, path: str = CHAT) -> dict[str, Any]:
    status, _, content = send(server, "POST", path, json.dumps(body), JSON)
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error | {"status": status}


# --- fields: (path, what the request has, status, param, words) ------------------------------------------------------

FIELD_CASES: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    (CHAT, {"model": None}, 400, "model", "model is missing: give 'tiny'"),
    (CHAT, {"model": "gpt-5"}, 404, "model", "the model 'gpt-5' does not exist: this server has 'tiny'"),
    (CHAT, {"model": 7}, 400, "model", "model must be a string, not a number"),
    (CHAT, {"model": "../../etc/passwd"}, 404, "model", "does not exist"),
    (CHAT, {"messages": None}, 400, "messages", "messages must be a list of at least one message"),
    (CHAT, {"messages": []}, 400, "messages", "at least one message"),
    (CHAT, {"messages": "hello"}, 400, "messages", "messages must be a list"),
    (CHAT, {"messages": ["hello"]}, 400, "messages[0]", "messages[0] must be an object, not a string"),
    (CHAT, {"messages": [{"content": "hi"}]}, 400, "messages[0].role", "must be system, developer, user or assistant"),
    (CHAT, {"messages": [{"role": "tool", "content": "hi"}]}, 400, "messages[0].role", "must be system"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", "must be text, or a list of parts"),
    (CHAT, {"messages": [{"role": "user", "content": " \n"}]}, 400, "messages[0].content", "is empty"),
    (CHAT, {"messages": [{"role": "user", "content": []}]}, 400, "messages[0].content", "must be text"),
    (CHAT, {"messages": [HELLO | {"content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]},
     400, "messages[0].content", "parts of type text only"),
    (CHAT, {"messages": [HELLO | {"tool_calls": [1]}]}, 400, "messages[0].tool_calls", "is not supported"),
    (CHAT, {"messages": [HELLO, {"role": "assistant", "content": "so"}]}, 400, "messages", "must not be the"),
    (CHAT, {"messages": [HELLO | {"content": "\ud800"}]}, 400, "messages[0].content", "not valid Unicode"),
    (CHAT, {"messages": [HELLO | {"content": "<|mask|>"}]}, 400, "messages", "a prompt must not contain masks"),
    (CHAT, {"messages": [HELLO | {"content": "ann " * 70}]}, 400, "messages", "tokens: this server takes 60 at most"),
    (CHAT, {"prompt": "hi"}, 400, "prompt", "prompt is not a field of this endpoint"),
    (CHAT, {"max_tokens": 0}, 400, "max_tokens", "expected an integer from 1 to 64"),
    (CHAT, {"max_tokens": 65}, 400, "max_tokens", "expected an integer from 1 to 64"),
    (CHAT, {"max_tokens": 1.5}, 400, "max_tokens", "must be an integer from 1 to 64, not 1.5"),
    (CHAT, {"\ud800": 1}, 400, "?", "unrecognized request argument: ?"),
    (CHAT, {"asrd": {"\ud800": 1}}, 400, "asrd.?", "asrd.? cannot be set"),
    (CHAT, {"messages": [HELLO | {"\ud800": 1}]}, 400, "messages[0].?", "is not supported: a message has"),
    (CHAT, {"stream": True, "stream_options": {"\ud800": 1}}, 400, "stream_options.?", "is not supported"),
    (CHAT, {"model": "\ud800"}, 404, "model", "does not exist"),
    (CHAT, {"y" * 9000: 1}, 400, "y" * 200, "unrecognized request argument: yyy"),
    (TEXT, {"asrd": {"block_length": 0}}, 400, "asrd.block_length", "expected an integer from 1"),
    (CHAT, {"max_tokens": True}, 400, "max_tokens", "must be an integer"),
    (CHAT, {"max_tokens": "9"}, 400, "max_tokens", "must be an integer from 1 to 64, not a string"),
    (CHAT, {"max_tokens": 8, "max_completion_tokens": 9}, 400, "max_completion_tokens", "are one field"),
    (CHAT, {"temperature": -0.1}, 400, "temperature", "must be a number from 0 to 2"),
    (CHAT, {"temperature": 2.1}, 400, "temperature", "must be a number from 0 to 2"),
    (CHAT, {"temperature": "hot"}, 400, "temperature", "must be a number from 0 to 2"),
    (CHAT, {"top_p": 0}, 400, "top_p", "must be a number from"),
    (CHAT, {"top_p": 1.5}, 400, "top_p", "must be a number from"),
    (CHAT, {"logprobs": 3}, 400, "logprobs", "logprobs must be true or false"),
    (CHAT, {"logprobs": True, "top_logprobs": 5}, 400, "top_logprobs", "those of the chosen tokens"),
    (CHAT, {"logprobs": True, "stream": True}, 400, "logprobs", "not supported with stream=true"),
    (TEXT, {"logprobs": 5}, 400, "logprobs", "logprobs must be 0 or null"),
    (CHAT, {"n": 0}, 400, "n", "expected an integer from 1 to 4"),
    (CHAT, {"n": 5}, 400, "n", "expected an integer from 1 to 4"),
    (CHAT, {"stop": ""}, 400, "stop", "none of them empty"),
    (CHAT, {"stop": ["a"] * 17}, 400, "stop", "up to 16 strings"),
    (CHAT, {"top_k": -2}, 400, "top_k", "top_k is out of range"),
    (CHAT, {"top_k": 2.5}, 400, "top_k", "top_k must be an integer"),
    (TEXT, {"min_p": 1.5}, 400, "min_p", "min_p must be a number from 0 to 1"),
    (CHAT, {"repetition_penalty": 0}, 400, "repetition_penalty", "must be a number from 0.01 to 100"),
    (CHAT, {"ignore_eos": True}, 400, "ignore_eos", "an answer ends where its text ends"),
    (CHAT, {"asrd": {"top_k": 5}}, 400, "asrd.top_k", "use the field top_k"),
    (CHAT, {"stop": [1]}, 400, "stop", "stop must be a string"),
    (CHAT, {"seed": 2**64}, 400, "seed", "seed is out of range"),
    (CHAT, {"seed": "x"}, 400, "seed", "seed must be an integer"),
    (CHAT, {"stream": "yes"}, 400, "stream", "stream must be true or false, not a string"),
    (CHAT, {"stream_options": {"include_usage": True}}, 400, "stream_options", "is for stream=true"),
    (CHAT, {"stream": True, "stream_options": {"x": 1}}, 400, "stream_options.x", "there is include_usage"),
    (CHAT, {"stream": True, "stream_options": [1]}, 400, "stream_options", "must be an object, not a list"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools", "tools is not supported: tools are not offered"),
    (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format", "is not supported"),
    (CHAT, {"logit_bias": {"5": 1}}, 400, "logit_bias", "is not supported"),
    (CHAT, {"frequency_penalty": 0.5}, 400, "frequency_penalty", "penalties are not offered"),
    (CHAT, {"reasoning_effort": "high"}, 400, "reasoning_effort", "is not supported"),
    (CHAT, {"store": True}, 400, "store", "answers are not stored"),
    (CHAT, {"modalities": ["text", "audio"]}, 400, "modalities", "answers are text"),
    (CHAT, {"treshold": 1}, 400, "treshold", "unrecognized request argument: treshold"),
    (CHAT, {"threshold": 0.5}, 400, "threshold", "settings of the decoder go into the object asrd"),
    (CHAT, {"asrd": 1}, 400, "asrd", "asrd must be an object, not a number"),
    (CHAT, {"asrd": {"drafts": True}}, 400, "asrd.drafts", "asrd.drafts is for stream=true"),
    (CHAT, {"asrd": {"drafts": 1}}, 400, "asrd.drafts", "asrd.drafts must be true or false"),
    (CHAT, {"asrd": {"treshold": 1}}, 400, "asrd.treshold", "did you mean threshold?"),
    (CHAT, {"asrd": {"threshold": 2}}, 400, "asrd.threshold", "expected a number from 0 to 1"),
    (CHAT, {"asrd": {"decoder": "magic"}}, 400, "asrd.decoder", "asrd.decoder='magic' is unknown"),
    (CHAT, {"asrd": {"mask_token_id": 3}}, 400, "asrd.mask_token_id", "cannot be set by a request"),
    (CHAT, {"asrd": {"max_new_tokens": 9999}}, 400, "asrd.max_new_tokens", "use the field max_tokens"),
    (CHAT, {"asrd": {"trace": "/tmp/x"}}, 400, "asrd.trace", "asrd.trace cannot be set"),
    (CHAT, {"asrd": {"threshold": [1]}}, 400, "asrd.threshold", "must be a string, a number"),
    (CHAT, {"asrd": {"decoder": "saber", "kv_cache": "dual"}}, 400, "asrd.kv_cache", "cannot be used with decoder="),
    (CHAT, {"asrd": {"factor": 2}}, 400, "asrd.factor", "factor=2 is not a setting of decoder='asrd': leave it out"),
    (CHAT, {"asrd": {"decoder": "loo", "threshold": 0.5}}, 400, "asrd.threshold", "is not a setting of decoder='loo'"),
    (TEXT, {"asrd": {"decoder": "standard", "eps": 0.1}}, 400, "asrd.eps", "does nothing beside the other settings"),
    (TEXT, {"asrd": {"decoder": "native"}}, 400, "asrd.decoder", "is for block-diffusion models"),
    (CHAT, {"asrd": {"decoder": "standard", "steps": 1, "block_length": 4}}, 400, "asrd.steps", "number of blocks"),
    (TEXT, {"prompt": ""}, 400, "prompt", "prompt is empty"),
    (TEXT, {"prompt": []}, 400, "prompt", "it must not be empty"),
    (TEXT, {"prompt": [[]]}, 400, "prompt", "no part may be empty"),
    (TEXT, {"prompt": [1, -2]}, 400, "prompt", "list of either"),
    (TEXT, {"prompt": [1.5]}, 400, "prompt", "list of either"),
    (TEXT, {"prompt": [9999]}, 400, "prompt", "outside the model's vocabulary"),
    (TEXT, {"prompt": {"a": 1}}, 400, "prompt", "prompt must be text"),
    (TEXT, {"prompt": ["ann"] * 5}, 400, "prompt", "this server takes 4 at a time"),
    (TEXT, {"prompt": ["ann"] * 3, "n": 2}, 400, "n", "this server gives 4 choices at most"),
    (TEXT, {"prompt": [5] * 61}, 400, "prompt", "prompt has 61 tokens: this server takes 60 at most"),
    (TEXT, {"messages": [HELLO]}, 400, "messages", "not a field of this endpoint"),
    (TEXT, {"echo": True}, 400, "echo", "the prompt is not repeated"),
    (TEXT, {"best_of": 3}, 400, "best_of", "use n"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "has", "status", "param", "words"), FIELD_CASES)
def test_a_field_that_is_wrong_is_named(
    server: Running, path: str, has: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    good: dict[str, Any] = {"messages": [HELLO]} if path == CHAT else {"prompt": "ann has 3 apples ."}
    for name in ("prompt", "messages"):
        if name in has:
            good.pop("messages" if name == "messages" else "prompt", None)
    error = refused(server, {"model": "tiny"} | good | has, path)
    assert (error["status"], error["param"]) == (status, param), error["message"]
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("name", [name for name, field in FIELDS.items() if field.status == "refused"])
def test_a_field_that_is_not_offered_is_refused_but_its_neutral_value_is_not(server: Running, name: str) -> None:
    field = FIELDS[name]
    path = TEXT if field.where == "completions" else CHAT
    good = {"model": "tiny", "max_tokens": 4} | ({"prompt": "ann"} if path == TEXT else {"messages": [HELLO]})
    error = refused(server, good | {name: {"wanted": 1}}, path)
    assert (error["status"], error["param"], error["code"]) == (400, name, "unsupported_parameter")
    assert f"{name} is not supported: " in error["message"]
    for value in (*field.neutral, None)[:2]:
        assert send(server, "POST", path, json.dumps(good | {name: value}), JSON)[0] == 200


# --- bodies and headers: (method, path, headers, body, status, words) ------------------------------------------------

DEEP = "[" * 9000 + "]" * 9000
RAW_CASES: list[tuple[str, str, dict[str, str], bytes | str | None, int, str]] = [
    ("POST", CHAT, JSON, "", 400, "the body is not JSON"),
    ("POST", CHAT, JSON, "{", 400, "the body is not JSON: Expecting property name"),
    ("POST", CHAT, JSON, "[]", 400, "the body must be a JSON object, not a list"),
    ("POST", CHAT, JSON, "null", 400, "the body must be a JSON object, not null"),
    ("POST", CHAT, JSON, '{"temperature": NaN}', 400, "NaN is not a number in JSON"),
    ("POST", CHAT, JSON, '{"temperature": -Infinity}', 400, "-Infinity is not a number in JSON"),
    ("POST", CHAT, JSON, '{"seed": ' + "9" * 5000 + "}", 400, "a number too long"),
    ("POST", CHAT, JSON, DEEP, 400, "nested too deeply"),
    ("POST", CHAT, JSON, b'{"model": "\xff\xfe"}', 400, "not valid UTF-8: byte 11 cannot be read"),
    ("POST", CHAT, JSON, b"\x00\x01\x02", 400, "the body is not JSON"),
    ("POST", CHAT, JSON, "x" * 20_001, 413, "the body is longer than 20000 bytes"),
    ("POST", CHAT, JSON, b"x" * 10_000_000, 413, "the body is longer than 20000 bytes"),
    ("POST", CHAT, {"Content-Type": "text/plain"}, "{}", 415, "Content-Type: application/json"),
    ("POST", CHAT, {}, "{}", 415, "Content-Type: application/json"),
    ("POST", CHAT, JSON | {"Content-Encoding": "gzip"}, "{}", 415, "a compressed body is not accepted"),
    ("POST", CHAT, JSON | {"Origin": "https://evil.example"}, "{}", 403, "pages of other origins"),
    ("POST", CHAT, JSON | {"Origin": "null"}, "{}", 403, "pages of other origins"),
    ("GET", "/v1/models", {"Host": "evil.example"}, None, 403, "answers to localhost only"),
    ("GET", "/v1/models", {"Host": "[::1]evil.example"}, None, 403, "answers to localhost only"),
    ("GET", "/v1/models", {"Host": "127.0.0.1:80@evil.example"}, None, 403, "answers to localhost only"),
    ("GET", "/v1/models", {"Host": "127.0.0.1:evil"}, None, 403, "answers to localhost only"),
    ("GET", "/v1/models", {"Host": ""}, None, 403, "answers to localhost only"),
    ("POST", CHAT, JSON, b'\xef\xbb\xbf{"model": "tiny"}', 400, "the body is not JSON: Unexpected UTF-8 BOM"),
    ("POST", CHAT, JSON, '{"model": "tiny"}'.encode("utf-16"), 400, "not valid UTF-8: byte 0"),
    ("POST", CHAT, JSON, '{"model": "tiny"}{}', 400, "Extra data at character 17"),
    ("PUT", CHAT, JSON, "{}", 405, "PUT is not for this address"),
    ("CONNECT", "127.0.0.1:22", {}, None, 404, "there is nothing here"),
    ("GET", CHAT, {}, None, 405, "GET is not for this address"),
    ("DELETE", "/v1/models", {}, None, 405, "DELETE is not for this address"),
    ("POST", "/v1/embeddings", JSON, "{}", 404, "there is nothing here"),
    ("GET", "/docs", {}, None, 404, "there is nothing here"),
    ("GET", "/openapi.json", {}, None, 404, "there is nothing here"),
    ("GET", "/../../../etc/passwd", {}, None, 404, "there is nothing here"),
    ("GET", "/%2e%2e/%2e%2e/etc/passwd", {}, None, 404, "there is nothing here"),
    ("GET", "/page/live.js", {}, None, 404, "there is nothing here"),
    ("GET", "/v1/models/../../etc/passwd", {}, None, 404, "there is no such model"),
    ("GET", "/v1/models/%00", {}, None, 404, "there is no such model"),
]


@pytest.mark.parametrize(("method", "path", "headers", "body", "status", "words"), RAW_CASES)
def test_what_cannot_be_read_is_refused(
    server: Running, method: str, path: str, headers: dict[str, str], body: Any, status: int, words: str
) -> None:
    try:
        found, _, content = send(server, method, path, body, headers)
    except (BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
        assert status == 413
        return
    assert found == status, content
    assert words in json.loads(content)["error"]["message"]


def test_there_are_sixty_bad_requests_in_these_tables() -> None:
    assert len(FIELD_CASES) + len(RAW_CASES) >= 60


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "no API key"),
        ({"Authorization": ""}, "no API key"),
        ({"Authorization": f"Basic {KEY}"}, "the API key is wrong"),
        ({"Authorization": f"Bearer {KEY[:-1]}"}, "the API key is wrong"),
        ({"Authorization": f"Bearer {KEY}x"}, "the API key is wrong"),
        ({"Authorization": "Bearer \xff"}, "the API key is wrong"),
        ({"Authorization": KEY}, "no API key"),
        ({"api-key": KEY}, "no API key"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/metrics", "/nowhere"])
def test_without_the_key_nothing_is_told(guarded: Running, path: str, headers: dict[str, str], words: str) -> None:
    method = "POST" if path == CHAT else "GET"
    status, found, content = send(guarded, method, path, "{}" if method == "POST" else None, JSON | headers)
    assert (status, found["www-authenticate"]) == (401, "Bearer")
    assert words in json.loads(content)["error"]["message"]
    assert KEY not in content.decode()


def test_with_the_key_clients_are_served_under_any_name(guarded: Running) -> None:
    answer = guarded.client(api_key=KEY).chat.completions.create(model="tiny", messages=chat(), max_tokens=8)
    assert answer.choices[0].message.content == alone(chat(), 8)[0]
    given = {"Authorization": f"bearer {KEY}", "Host": "models.example"}
    assert send(guarded, "GET", "/v1/models", headers=given)[0] == 200
    assert send(guarded, "GET", "/health")[0] == send(guarded, "GET", "/")[0] == 200


def test_every_answer_has_the_headers_that_browsers_obey(server: Running) -> None:
    for method, path, body in (("GET", "/", None), ("GET", "/health", None), ("POST", CHAT, "{}"), ("GET", "/x", None)):
        _, headers, _ = send(server, method, path, body, JSON)
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "server" not in headers
    policy = send(server, "GET", "/")[1]["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8000", "localhost:1", "[::1]", "[::1]:8000"])
def test_names_of_this_machine_are_answered(server: Running, host: str) -> None:
    assert send(server, "GET", "/v1/models", headers={"Host": host})[0] == 200


def test_an_answer_that_the_context_has_no_room_for_is_refused_with_the_room_that_there_is() -> None:
    with running(slots=1) as server:
        error = refused(server, {"model": "tiny", "messages": [HELLO], "max_tokens": 4000})
    assert (error["status"], error["param"], error["code"]) == (400, "max_tokens", "context_length_exceeded")
    assert "more than the model's context of 512: give max_tokens of at most 50" in error["message"]


def test_after_all_of_this_a_good_request_is_answered(server: Running) -> None:
    answer = server.client().chat.completions.create(model="tiny", messages=chat(), max_tokens=16)
    assert answer.choices[0].message.content == alone(chat(), 16)[0]
    assert server.idle()
    assert server.service.worker.failures == 0


def test_no_number_breaks_the_engine_of_a_block_diffusion_model() -> None:
    import asrd

    model, tokenizer = asrd.load("tiny-block")
    with running(slots=2, model=model, tokenizer=tokenizer) as server:
        for name, own in SETTINGS.items():
            for value in (2**31 - 1, 2**31, 2**63, 1e308, 1e-320):
                if name in CLOSED or isinstance(own.default, str | bool):
                    continue
                for decoder in ("asrd", "native", "loo"):
                    settings = {"decoder": decoder, name: value}
                    body = {"model": "tiny", "messages": [HELLO], "max_tokens": 4, "asrd": settings}
                    status, _, content = send(server, "POST", CHAT, json.dumps(body), JSON)
                    assert status in (200, 400), (settings, content)
                    assert status == 400 or value < 2**31, settings
        assert server.service.worker.failures == 0
