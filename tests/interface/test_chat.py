"""`asrd chat`: history, commands, live drafts, and Ctrl-C that stops the answer and not the program."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asrd import cli
from asrd.cli import chat as module
from asrd.cli.chat import Chat, Drafts, reply
from tests.support.letters import Letters
from tests.support.table_models import TableModel, TableSpec


def new_chat(**settings: Any) -> Chat:
    return Chat(TableModel(TableSpec(seed=2)), Letters(), {"max_new_tokens": 6, "block_length": 3} | settings)


def printed(chat: Chat, *lines: str, live: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=live, width=200)
    for line in lines:
        reply(chat, line, console, live)
    return out.getvalue()


def test_the_conversation_is_remembered_and_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, seen = new_chat(), []
    encode = chat._ids
    monkeypatch.setattr(chat, "_ids", lambda messages: (seen.append([*messages]), encode(messages))[1])
    first = printed(chat, "ab").strip()
    assert chat.messages == [{"role": "user", "content": "ab"}, {"role": "assistant", "content": first}]
    chat.messages[1]["content"] = "ca"
    monkeypatch.setattr(chat, "_ids", lambda messages: (seen.append([*messages]), encode(messages[-1:]))[1])
    printed(chat, "dd")
    assert [message["content"] for message in seen[1]] == ["ab", "ca", "dd"]


def test_commands(tmp_path: Path) -> None:
    chat = new_chat()
    assert "decoder: threshold" in printed(chat, "/decoder threshold")
    assert chat.settings["decoder"] == "threshold"
    assert "unknown" in printed(chat, "/decoder magic")
    assert chat.settings["decoder"] == "threshold"
    assert "threshold=0.7" in printed(chat, "/set threshold=0.7")  # the default, but not that of every model
    assert "threshold=0.9" in printed(chat, "/set threshold=0.9")
    assert "out of range" in printed(chat, "/set threshold=7")
    assert "expected KEY=VALUE" in printed(chat, "/set nonsense")
    assert chat.settings["threshold"] == 0.9
    printed(chat, "ab", "ca")
    file = tmp_path / "talk.json"
    assert "4 messages" in printed(chat, f"/save {file}")
    assert json.loads(file.read_text(encoding="utf-8"))["messages"] == chat.messages
    assert "2 messages left" in printed(chat, "/undo")
    assert "forgotten" in printed(chat, "/clear")
    assert chat.messages == []
    assert "/save FILE" in printed(chat, "/help")
    assert "is no command" in printed(chat, "/dance")
    assert "give a file" in printed(chat, "/save")


def test_an_interruption_stops_the_answer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = new_chat()

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "fast_generate", interrupted)
        assert "stopped" in printed(chat, "ab")
    assert chat.messages == []
    assert printed(chat, "ab").strip() == chat.messages[1]["content"]


def test_drafts_are_shown_while_they_change() -> None:
    frames = []

    class Screen:
        def update(self, shown: Any) -> None:
            frames.append(shown.plain)

    chat = new_chat()
    chat.answer("ab", Drafts(chat.tokenizer, Screen()))  # type: ignore[arg-type]
    assert len(frames) == chat.forwards
    assert frames[-1].strip() == chat.messages[1]["content"]
    assert "forward passes" in printed(chat, "ca", live=True)


def test_the_command_talks_until_the_end_of_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["ann has 3 apples .", "/set max_new_tokens=8", "/quit", "never asked"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert cli.main(["chat", "--model", "tiny", "--max-new-tokens", "8", "--plain"]) == 0
    out = capsys.readouterr().out
    assert "max_new_tokens=8" in out
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\n"))
    assert cli.main(["chat", "--model", "tiny"]) == 0
    assert cli.main(["chat", "--decoder", "magic"]) == 2
