"""`asrd generate`: continue a prompt from the command line, a file or standard input."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from asrd.cli.settings import add_model, add_settings, load_model, settings_of
from asrd.generate import fast_generate
from asrd.output import AsrdOutput
from asrd_kernels import DecodeState


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue a prompt with a diffusion LLM. Text goes to standard output, progress to standard error.",
        epilog='example: asrd generate "Ann has 3 apples ..." --model tiny --json',
    )
    command.add_argument("prompt", nargs="?", help="the prompt; without it (or with -) standard input is read")
    command.add_argument("--file", type=Path, help="read the prompt from this file")
    command.add_argument("--lines", action="store_true", help="one prompt per line; all run as one batch")
    command.add_argument("--raw", action="store_true", help="do not apply the tokenizer's chat template")
    command.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt, with tokens and counters"
    )
    add_model(command)
    add_settings(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Decode and print."""
    settings = settings_of(arguments)
    prompts = read_prompts(arguments)
    model, tokenizer = load_model(arguments)
    if tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer, so text cannot be turned into ids; use it from Python")

    batch = encode(tokenizer, prompts, chat=not arguments.raw)
    started = time.perf_counter()
    with Progress() as progress:
        out = fast_generate(
            model,
            batch["input_ids"],
            batch["attention_mask"],
            tokenizer=tokenizer,
            observers=[progress],
            **settings | {"return_dict_in_generate": True},
        )
    seconds = time.perf_counter() - started
    assert isinstance(out, AsrdOutput)
    width = batch["input_ids"].shape[1]
    for row, prompt in enumerate(prompts):
        tokens = out.sequences[row, width:].tolist()
        text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
        if not arguments.json:
            print(text)
            continue
        record = {
            "prompt": prompt,
            "text": text,
            "tokens": tokens,
            "seconds": round(seconds, 4),
            "model": arguments.model,
        }
        for name in ("steps", "tokens_per_forward", "drafted", "revoked", "anchors"):
            record[name] = out[name][row].item()
        record["forwards_per_step"] = out.forwards_per_step
        print(json.dumps(record, ensure_ascii=False))


def read_prompts(arguments: argparse.Namespace) -> list[str]:
    """The prompts from argument, file or standard input; at least one, none empty."""
    if arguments.file is not None and arguments.prompt is not None:
        raise ValueError("a prompt and --file were given: give one of the two")
    if arguments.file is not None:
        text = arguments.file.read_text(encoding="utf-8")
    elif arguments.prompt is not None and arguments.prompt != "-":
        text = arguments.prompt
    elif sys.stdin.isatty():
        raise ValueError('no prompt: give one as an argument, with --file, or on standard input ("-")')
    else:
        text = sys.stdin.read()
    prompts = [line.strip() for line in text.splitlines() if line.strip()] if arguments.lines else [text.strip()]
    if not prompts or not prompts[0]:
        raise ValueError("the prompt is empty: give at least one word")
    return prompts


def encode(tokenizer: Any, prompts: list[str], chat: bool) -> Any:
    """`input_ids` and `attention_mask` [B, P], left-padded; through the chat template if there is one."""
    chat = chat and tokenizer.chat_template is not None
    if chat:
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], add_generation_prompt=True, tokenize=False)
            for p in prompts
        ]
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer(
        prompts, return_tensors="pt", padding=len(prompts) > 1, padding_side="left", add_special_tokens=not chat
    )


class Progress:
    """A progress bar of final positions on standard error, if that is a terminal."""

    def __enter__(self) -> Progress:
        self.bar = tqdm(unit="tok", leave=False, disable=not sys.stderr.isatty(), file=sys.stderr)
        return self

    def __call__(self, state: DecodeState) -> None:
        if self.bar.disable:
            return
        decided = int(state.drafted.sum() - state.revoked.sum() - state.pending.sum())
        self.bar.total = state.pending.numel()
        self.bar.n = self.bar.total if bool(state.done.all()) else min(decided, self.bar.total)
        self.bar.set_postfix(steps=int(state.step.max()), revoked=int(state.revoked.sum()))

    def __exit__(self, *_: object) -> None:
        self.bar.close()
