"""A file of prompts, and the file that its results go to: what is in it is not decoded again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asrd.files import require_text

Request = dict[str, Any]  # prompt (text or ids) and settings of its own


def read_requests(text: str, is_json: bool, where: str) -> list[Request]:
    """One request per line that is not empty: its text, or JSON: a string, or an object with `prompt` and settings."""
    requests = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if not is_json:
            requests.append({"prompt": line.strip()})
            continue
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}, line {number} is not JSON: {error.msg}") from None
        request = {"prompt": found} if isinstance(found, str) else found
        if not isinstance(request, dict) or "prompt" not in request:
            raise ValueError(f"{where}, line {number}: expected a string, or an object with a prompt and its settings")
        if isinstance(request["prompt"], str):
            require_text(request["prompt"], f"{where}, line {number}: the prompt")
        requests.append(request)
    return requests


def require_all(failed: int, count: int) -> None:
    """Raise ValueError if some of so many prompts have an error for a result."""
    if failed:
        raise ValueError(f"{failed} of {count} prompts could not be decoded; each one's error says why")


class ResultFile:
    """Results as JSON lines, in the order in which they come; each is in the file before the next one begins.

    A file that exists is continued. `run` says what the results are of (model and settings): a file of another run, or
    of other prompts, is refused.
    """

    def __init__(self, path: Path, requests: Sequence[Request], run: str) -> None:
        self.path, self.run = path, run
        self.failed = 0  # results, of earlier runs too, that are an error
        self.done = self._read(requests) if path.exists() else set()
        self.file = path.open("a", encoding="utf-8")

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, record: dict[str, Any]) -> None:
        """Add the result of request `record["index"]`."""
        self.file.write(json.dumps(record | {"run": self.run}, ensure_ascii=False) + "\n")
        self.file.flush()
        self.done.add(record["index"])
        self.failed += record.get("error") is not None

    def _read(self, requests: Sequence[Request]) -> set[int]:
        """The indices that have a result. What an interruption has left of a line is cut off."""
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        done = set()
        for line in whole.decode().splitlines():
            try:
                record = json.loads(line)
                index, prompt, run = record["index"], record["prompt"], record["run"]
            except (json.JSONDecodeError, TypeError, KeyError):
                raise ValueError(f"{self.path} is not a file of results: give another --out") from None
            if run != self.run or index >= len(requests) or requests[index]["prompt"] != prompt:
                raise ValueError(f"{self.path} has results of other prompts, settings or model: give another --out")
            done.add(index)
            self.failed += record.get("error") is not None
        if whole != content:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        return done
