"""`asrd generate`: continue a prompt, or every prompt of a file, from the command line or standard input."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from asrd.cli.requests import Request, ResultFile, read_requests
from asrd.cli.settings import add_model, add_settings, load_model, settings_of
from asrd.generate import fast_generate
from asrd.many import Engine, Result, encode
from asrd.output import AsrdOutput
from asrd_kernels import DecodeState

COUNTERS = ("steps", "drafted", "revoked", "anchors")


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "generate",
        help="continue a prompt, or every prompt of a file",
        description="Continue prompts with a diffusion LLM. Text goes to standard output, progress to standard error.",
        epilog='examples: asrd generate "Ann has 3 apples ..." --model tiny --json;'
        " asrd generate --file prompts.jsonl --out results.jsonl",
    )
    command.add_argument("prompt", nargs="?", help="the prompt; without it (or with -) standard input is read")
    command.add_argument(
        "--file",
        type=Path,
        help="read the prompt from this file; from .jsonl one per line: a string, or an object with a prompt (text or"
        " ids) and settings such as max_new_tokens and seed",
    )
    command.add_argument("--lines", action="store_true", help="one prompt per line")
    command.add_argument(
        "--out",
        type=Path,
        help="append each result to this file (JSON lines) as soon as it is there; prompts with a result in it are not"
        " decoded again",
    )
    command.add_argument("--slots", type=int, default=16, help="prompts that decode at a time (default: 16)")
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
    text, is_json = read_text(arguments), arguments.file is not None and arguments.file.suffix == ".jsonl"
    many = arguments.lines or is_json
    where = str(arguments.file or "standard input")
    requests = read_requests(text, is_json, where) if many else [{"prompt": text.strip()}]
    if not requests or requests[0]["prompt"] == "":
        raise ValueError("the prompt is empty: give at least one word")
    model, tokenizer = load_model(arguments)
    if tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer, so text cannot be turned into ids; use it from Python")
    if many or arguments.out is not None:
        generate_all(arguments, model, tokenizer, requests, settings)
    else:
        generate_one(arguments, model, tokenizer, requests[0]["prompt"], settings)


def generate_one(arguments: argparse.Namespace, model: Any, tokenizer: Any, prompt: str, settings: Any) -> None:
    """One prompt, with its progress token by token."""
    ids = encode(tokenizer, [prompt], chat=not arguments.raw)["input_ids"]
    started = time.perf_counter()
    with Progress() as progress:
        out = fast_generate(
            model, ids, tokenizer=tokenizer, observers=[progress], **settings | {"return_dict_in_generate": True}
        )
    seconds = time.perf_counter() - started
    assert isinstance(out, AsrdOutput)
    tokens = out.sequences[0, ids.shape[1] :].tolist()
    text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    if not arguments.json:
        print(text)
        return
    record = {"prompt": prompt, "text": text, "tokens": tokens, "seconds": round(seconds, 4), "model": arguments.model}
    for name in (*COUNTERS, "tokens_per_forward"):
        record[name] = out[name][0].item()
    record["forwards_per_step"] = out.forwards_per_step
    print(json.dumps(record, ensure_ascii=False))


def generate_all(
    arguments: argparse.Namespace, model: Any, tokenizer: Any, requests: list[Request], settings: dict[str, Any]
) -> None:
    """Many prompts at a time: to the file as they end, or to standard output in their order."""
    engine = Engine(model, tokenizer, arguments.slots, chat=not arguments.raw, **settings)
    failed = 0
    with ExitStack() as files:
        file = None
        if arguments.out is not None:
            file = files.enter_context(ResultFile(arguments.out, requests, run_key(arguments, settings)))
        missing = [index for index in range(len(requests)) if file is None or index not in file.done]
        progress = files.enter_context(Tally(engine, len(requests), len(requests) - len(missing)))
        waiting: dict[int, Result] = {}  # for earlier ones to be printed
        printed = 0
        for result in engine.run({"row_id": index} | requests[index] for index in missing):
            index = missing[result.index]
            failed += result.error is not None
            progress.add(result)
            if file is not None:
                file.write(record_of(arguments, index, requests[index], result, settings))
                continue
            waiting[index] = result
            while printed in waiting:
                ended = waiting.pop(printed)
                record = record_of(arguments, printed, requests[printed], ended, settings)
                print(json.dumps(record, ensure_ascii=False) if arguments.json else ended.text)
                printed += 1
    if failed:
        raise ValueError(f"{failed} of {len(missing)} prompts could not be decoded; each one's error says why")


def run_key(arguments: argparse.Namespace, settings: dict[str, Any]) -> str:
    """What results are of: a file of another model or other settings is not continued."""
    given = repr((arguments.model, arguments.dtype, arguments.raw, sorted(settings.items())))
    return hashlib.sha256(given.encode()).hexdigest()[:12]


def record_of(
    arguments: argparse.Namespace, index: int, request: Request, result: Result, settings: dict[str, Any]
) -> dict[str, Any]:
    """A result as it is printed and stored."""
    record = {"index": index, **request, "text": result.text, "tokens": result.tokens, "model": arguments.model}
    record |= {name: getattr(result, name) for name in (*COUNTERS, "finish_reason", "error")}
    record["tokens_per_forward"] = result.length / result.steps if result.steps else 0.0
    record["forwards_per_step"] = 2 if {**settings, **request}.get("cfg_scale") else 1
    return record


def read_text(arguments: argparse.Namespace) -> str:
    """What argument, file or standard input say."""
    if arguments.file is not None and arguments.prompt is not None:
        raise ValueError("a prompt and --file were given: give one of the two")
    if arguments.file is not None:
        return str(arguments.file.read_text(encoding="utf-8"))
    if arguments.prompt is not None and arguments.prompt != "-":
        return str(arguments.prompt)
    if sys.stdin.isatty():
        raise ValueError('no prompt: give one as an argument, with --file, or on standard input ("-")')
    return sys.stdin.read()


class Tally:
    """Progress over many prompts, on standard error: a bar if that is a terminal, and one line at the end."""

    def __init__(self, engine: Engine, total: int, done: int) -> None:
        self.engine, self.done, self.started = engine, done, time.perf_counter()
        self.count = self.tokens = 0
        self.bar = tqdm(total=total, initial=done, unit="prompt", disable=not sys.stderr.isatty(), file=sys.stderr)

    def __enter__(self) -> Tally:
        return self

    def add(self, result: Result) -> None:
        """One more."""
        self.count += 1
        self.tokens += result.length
        self.bar.set_postfix_str(f"{self._rate():.0f} tokens/s, {self.engine.usage.forwards} forward passes", False)
        self.bar.update()

    def _rate(self) -> float:
        return self.tokens / (time.perf_counter() - self.started)

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        usage = self.engine.usage
        print(
            f"{self.count} prompts, {self.tokens} tokens, {self._rate():.0f} tokens/s, {usage.forwards} forward passes,"
            f" {usage.wasted:.0%} of their positions padding" + (f"; {self.done} were done before" * bool(self.done)),
            file=sys.stderr,
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
