"""docs/serve.md is true: its client runs against a server, its table is that of the code."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from pathlib import Path

from asrd.serve.fields import FIELDS
from asrd.serve.limits import Limits
from tests.support.server import alone, chat, running

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_table_of_fields_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w ]+) \| (.+) \|$", PAGE, re.MULTILINE)
    assert rows == [(name, field.where, field.status, field.about) for name, field in FIELDS.items()]


def test_curl_and_client_work_as_printed() -> None:
    with running(slots=2) as server:
        for block in blocks("python"):
            exec(compile(block.replace("http://127.0.0.1:8000", server.url), "docs/serve.md", "exec"), {})
        (curl,) = blocks("sh")
        words = shlex.split(curl)
        body, headers = words[words.index("-d") + 1], dict([words[words.index("-H") + 1].split(": ")])
        url = words[1].replace("http://127.0.0.1:8000", server.url)
        with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)) as answer:
            text = json.loads(answer.read())["choices"][0]["message"]["content"]
    assert text == alone(chat())[0]


def test_the_limits_are_those_of_the_code() -> None:
    limits = Limits()
    said = "body 1 MB, prompt (what the context leaves), `max_tokens` 4096, 16 choices, 64 waiting, 300 s"
    assert said in PAGE
    found = (limits.body, limits.prompt_tokens, limits.max_tokens, limits.choices, limits.waiting, limits.seconds)
    assert found == (1 << 20, None, 4096, 16, 64, 300.0)
