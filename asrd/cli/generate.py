"""`asrd generate`: continue a prompt, or every prompt of a file, from the command line or standard input."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

from asrd.cli.loading import load_model, load_plugins, problem_number, require_packaged_task, require_tokenizer
from asrd.cli.requests import Request, ResultFile, read_requests, require_all
from asrd.cli.settings import settings_of
from asrd.engine.stopping import text_before
from asrd.files import read_text, require_text
from asrd.generate import fast_generate
from asrd.lab.tasks import length_and_blocks
from asrd.many import Engine, Result
from asrd.models.source import PACKAGED_NAMES
from asrd.output import AsrdOutput
from asrd.prompts import encode
from asrd.templates import fill
from asrd_kernels import DecodeState

LOOKED_UP = 1000  # words at most
COUNTERS = ("steps", "forwards", "drafted", "revoked", "anchors", "edited")


def run(arguments: argparse.Namespace) -> None:
    """Decode and print."""
    settings = settings_of(arguments)
    load_plugins(arguments.plugin)
    if arguments.template is not None:
        fill_template(arguments, settings)
        return
    requests, many = requests_of(arguments) if arguments.problem is None else ([], False)
    model, tokenizer = load_model(arguments)
    require_tokenizer(arguments, tokenizer)
    if arguments.problem is not None:
        task = require_packaged_task(arguments, tokenizer, "give a prompt of its own instead of --problem")
        problem = problem_number(task, arguments.problem, arguments.level)
        requests = [{"prompt": problem.question}]
        settings = length_and_blocks(problem, model) | settings
    warn_of_unknown_words(arguments.model, tokenizer, [request["prompt"] for request in requests])
    if many or arguments.out is not None:
        generate_all(arguments, model, tokenizer, requests, settings)
    else:
        generate_one(arguments, model, tokenizer, requests[0]["prompt"], settings)


def fill_template(arguments: argparse.Namespace, settings: dict[str, Any]) -> None:
    """The blanks of --template; with --json also by name."""
    prompt = arguments.prompt
    model, tokenizer = load_model(arguments)
    require_tokenizer(arguments, tokenizer)
    if arguments.problem is not None:
        task = require_packaged_task(arguments, tokenizer, "give a prompt of its own instead of --problem")
        prompt = problem_number(task, arguments.problem, arguments.level).question
    with Progress() as progress:
        filled = fill(model, tokenizer, arguments.template, prompt=prompt, observers=[progress], **settings)
    if not arguments.json:
        print(filled.text)
        return
    record = {"template": arguments.template, "prompt": prompt, "text": filled.text, "parts": filled.parts}
    record |= {"tokens": filled.output.sequences[0].tolist(), "model": arguments.model}
    print(json.dumps(record | {name: filled.output[name][0].item() for name in COUNTERS}, ensure_ascii=False))


def requests_of(arguments: argparse.Namespace) -> tuple[list[Request], bool]:
    """What argument, file or standard input say, and whether they are many."""
    is_json = arguments.file is not None and arguments.file.suffix == ".jsonl"
    many = arguments.lines or is_json
    where = str(arguments.file or "standard input")
    if arguments.file is not None:
        text = read_text(arguments.file)
    elif arguments.prompt is not None and arguments.prompt != "-":
        text = str(arguments.prompt)
    else:
        text = read_input()
    requests = read_requests(text, is_json, where) if many else [{"prompt": text.strip()}]
    if not requests or requests[0]["prompt"] == "":
        raise ValueError("the prompt is empty: give at least one word")
    return requests, many


def read_input() -> str:
    """Standard input, in UTF-8."""
    try:
        text = sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8 text: {error.reason}") from None
    require_text(text, "standard input")  # where the locale is C, Python lets other bytes pass
    return text


def warn_of_unknown_words(name: str, tokenizer: Any, prompts: list[Any]) -> None:
    """Say on standard error which words of the prompts the model does not know."""
    unknown_id = getattr(tokenizer, "unk_token_id", None)
    if unknown_id is None:
        return
    words = [word for prompt in prompts if isinstance(prompt, str) for word in prompt.split()][:LOOKED_UP]
    unknown = [word for word in words if unknown_id in tokenizer(word, add_special_tokens=False)["input_ids"]]
    if unknown:
        some = ", ".join(dict.fromkeys(unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        hint = "; a problem that it can solve: asrd generate --problem 0" if name in PACKAGED_NAMES else ""
        message = f"{len(unknown)} of {len(words)} words are unknown to {name} ({some}){hint}"
        print(f"asrd: warning: {message}", file=sys.stderr)


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
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    text = text_before(text, settings.get("stop_strings")).strip()
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
    require_all(failed if file is None else file.failed, len(requests))


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
    record["tokens_per_forward"] = result.length / result.forwards if result.forwards else 0.0
    record["forwards_per_step"] = 2 if {**settings, **request}.get("cfg_scale") else 1
    return record


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
