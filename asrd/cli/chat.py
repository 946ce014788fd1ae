"""`asrd chat`: a conversation in the terminal, with live drafts, settings that can be changed, and a file to save to.

Ctrl-C stops the answer, which is forgotten then, and not the program. Knows the terminal; decoding is the engine's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from asrd.cli.loading import load_model, load_plugins, require_tokenizer
from asrd.cli.settings import parse_setting, settings_of
from asrd.config import FIELDS, check
from asrd.decoders import DECODERS, find_decoder
from asrd.engine.stopping import text_before
from asrd.files import require_text, write_text
from asrd.generate import fast_generate
from asrd.output import AsrdOutput
from asrd_kernels import DecodeState

HELP = """\
/decoder NAME    decode by another one: {decoders}
/set KEY=VALUE   change a setting, such as /set max_new_tokens=128; /set alone shows what was changed
/save FILE       write the conversation to a JSON file
/undo            forget the last question and its answer
/clear           forget the conversation
/help, /quit     this; the end (or Ctrl-D)
"""
MASK = "·"


class Chat:
    """A conversation: the messages so far, and how the next answer is decoded."""

    def __init__(self, model: Any, tokenizer: Any, settings: dict[str, Any], system: str | None = None) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, dict(settings)
        self.first = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self.first)
        self.forwards = self.tokens = 0  # of the last answer

    def answer(self, question: str, show: Callable[[DecodeState], None] | None = None) -> str:
        """Ask; the question and the answer are remembered, unless it is interrupted."""
        messages = [*self.messages, {"role": "user", "content": question}]
        ids = self._ids(messages)
        observers = [] if show is None else [show]
        settings = self.settings | {"return_dict_in_generate": True}
        out = fast_generate(self.model, ids, tokenizer=self.tokenizer, observers=observers, **settings)
        assert isinstance(out, AsrdOutput)
        new = out.sequences[0, ids.shape[1] :].tolist()
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        text = text_before(text, self.settings.get("stop_strings")).strip()
        self.forwards = int(out.forwards[0])
        self.tokens = round(float(out.tokens_per_forward[0]) * self.forwards)
        self.messages = [*messages, {"role": "assistant", "content": text}]
        return text

    def _ids(self, messages: list[dict[str, str]]) -> torch.Tensor:
        if getattr(self.tokenizer, "chat_template", None) is None:
            text = "\n".join(message["content"] for message in messages)
            return torch.tensor([self.tokenizer.encode(text)])
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])

    def command(self, line: str) -> str:
        """Do what a line that begins with a slash says; gives what is to be printed."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name == "decoder":
            find_decoder(rest)
            self.settings["decoder"] = rest
            return f"decoder: {rest}"
        if name == "set":
            return self._set(rest)
        if name == "save":
            if not rest:
                raise ValueError("/save: give a file, as in /save talk.json")
            content = {"messages": self.messages, "settings": self.settings}
            write_text(Path(rest), json.dumps(content, indent=2, ensure_ascii=False) + "\n")
            return f"{len(self.messages)} messages in {rest}"
        if name == "undo":
            self.messages = self.messages[:-2] if len(self.messages) > len(self.first) + 1 else list(self.first)
            return f"{len(self.messages) - len(self.first)} messages left"
        if name == "clear":
            self.messages = list(self.first)
            return "forgotten"
        if name == "help":
            return HELP.format(decoders=", ".join(DECODERS)).rstrip()
        raise ValueError(f"/{name} is no command: there are /decoder, /set, /save, /undo, /clear, /help and /quit")

    def _set(self, item: str) -> str:
        if item:
            key, value = parse_setting(item)
            check(key, value)
            self.settings[key] = value
            if value == FIELDS[key].default and not FIELDS[key].by_model:
                del self.settings[key]
        return ", ".join(f"{key}={value}" for key, value in self.settings.items()) or "all settings as ever"


def run(arguments: argparse.Namespace) -> None:
    """Talk until the end of input."""
    settings = settings_of(arguments)
    load_plugins(arguments.plugin)
    model, tokenizer = load_model(arguments)
    require_tokenizer(arguments, tokenizer)
    chat, console = Chat(model, tokenizer, settings, arguments.system), Console()
    live = console.is_terminal and not arguments.plain
    if sys.stdin.isatty():
        console.print(f"{arguments.model}; /help lists the commands, Ctrl-D ends", style="dim", markup=False)
    while (line := read_line()) is not None:
        if line.strip() in ("/quit", "/exit"):
            return
        if line.strip():
            reply(chat, line.strip(), console, live)


def read_line() -> str | None:
    """The next line; None at the end of input. Ctrl-C gives an empty one."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


def reply(chat: Chat, line: str, console: Console, live: bool) -> None:
    """Answer a line, or do what it commands; errors and Ctrl-C end neither conversation nor program."""
    try:
        require_text(line, "the line")
        if line.startswith("/"):
            console.print(chat.command(line), style="dim", markup=False, highlight=False)
            return
        if live:
            with Live(console=console, refresh_per_second=12, transient=True) as screen:
                text = chat.answer(line, Drafts(chat.tokenizer, screen))
        else:
            text = chat.answer(line)
        console.print(text, markup=False, highlight=False)
        if live:
            rate = chat.tokens / max(chat.forwards, 1)
            console.print(f"{chat.tokens} tokens in {chat.forwards} forward passes, {rate:.1f} a pass", style="dim")
    except KeyboardInterrupt:
        console.print("stopped", style="dim")
    except (ValueError, OSError) as error:
        console.print(f"error: {' '.join(str(error).split())}", style="red", markup=False, highlight=False)


class Drafts:
    """Shows the canvas while it changes: what is settled plainly, drafts dimmed, masks as dots."""

    def __init__(self, tokenizer: Any, screen: Live) -> None:
        self.tokenizer, self.screen = tokenizer, screen
        self.mask = tokenizer.mask_token_id

    def __call__(self, state: DecodeState) -> None:
        """After each step."""
        tokens = state.generated[0].tolist()
        is_open = [token == self.mask for token in tokens]
        pending = state.pending[0].tolist()
        settled = next((p for p, (o, w) in enumerate(zip(is_open, pending, strict=True)) if o or w), len(tokens))
        shown = Text(self.tokenizer.decode(tokens[:settled], skip_special_tokens=True))
        last = max((p for p, o in enumerate(is_open) if not o), default=-1)
        for token in tokens[settled : last + 1]:
            word = MASK if token == self.mask else self.tokenizer.decode([token], skip_special_tokens=True)
            shown.append(" " + word.strip() if word.strip() else "", style="grey50")
        self.screen.update(shown)
