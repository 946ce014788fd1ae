"""`asrd trace`: one HTML file that replays a decode step by step; two decoders side by side on one clock."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from asrd.arguments import log_once
from asrd.cli.commands import WITH_REVOCATIONS
from asrd.cli.generate import warn_of_unknown_words
from asrd.cli.loading import (
    limit_threads,
    load_model,
    load_plugins,
    problem_number,
    require_packaged_task,
    require_tokenizer,
)
from asrd.cli.settings import settings_of
from asrd.decoders import DECODERS, find_decoder
from asrd.engine.defaults import default_length
from asrd.files import write_text
from asrd.generate import fast_generate
from asrd.lab.progress import Progress
from asrd.lab.tasks import Problem, length_and_blocks
from asrd.output import AsrdOutput
from asrd.prompts import encode
from asrd.trace import Trace, read
from asrd.viewer import page
from asrd_kernels import DecodeState


def run(arguments: argparse.Namespace) -> None:
    """Decode or read, then write the page."""
    grades: list[str | None] = []
    load_plugins(arguments.plugin)
    if arguments.source:
        traces = [read(path, arguments.partial) for path in arguments.source]
    else:
        traces, grades = decode(arguments)
    html = page(traces, grades, title=f"asrd trace: {' and '.join(t.header.decoder for t in traces)}")
    write_text(arguments.out, html)
    passes = ", ".join(f"{t.header.decoder} {len(t.steps) * t.header.forwards_per_step}" for t in traces)
    unit = "forward passes" if traces[0].header.offsets is None else "steps"
    print(f"{arguments.out}: {unit}: {passes}; open it in a browser", file=sys.stderr)


def decode(arguments: argparse.Namespace) -> tuple[list[Trace], list[str | None]]:
    """A trace for each decoder, and the grade of its answer."""
    settings = settings_of(arguments)
    decoders = [settings.pop("decoder", "asrd"), *arguments.against]
    for name in decoders:
        find_decoder(name)
    for name in settings:
        if not any(name in DECODERS[decoder].reads for decoder in decoders):
            log_once(f"{name} does nothing: {' and '.join(decoders)} do not look at it")
    limit_threads()
    model, tokenizer = load_model(arguments)
    require_tokenizer(arguments, tokenizer)
    problem = None
    if arguments.prompt is None:
        task = require_packaged_task(arguments, tokenizer, "give a prompt")
        number = WITH_REVOCATIONS if arguments.problem is None else arguments.problem
        problem = problem_number(task, number, arguments.level)
        settings = length_and_blocks(problem, model) | settings
    else:
        warn_of_unknown_words(arguments.model, tokenizer, [arguments.prompt])
    batch = encode(tokenizer, [problem.question if problem else arguments.prompt], chat=not arguments.raw)
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
    traces, grades = [], []
    for name in decoders:
        trace = _trace(model, tokenizer, batch, name, settings)
        traces.append(trace)
        grades.append(grade_text(problem, trace.tokens[0]) if problem else None)
        if arguments.save:
            trace.save(arguments.save / f"{name}.jsonl")
    return traces, grades


def _trace(model: Any, tokenizer: Any, batch: Any, decoder: str, settings: dict[str, Any]) -> Trace:
    """The trace of one decode, with those of the settings that this decoder reads."""
    read_by_it = {name: value for name, value in settings.items() if name in DECODERS[decoder].reads}
    length = settings.get("max_new_tokens") or default_length(model)
    with Progress(length, "token", label=decoder) as progress:

        def show(state: DecodeState) -> None:
            decided = int((state.drafted - state.revoked).clamp(max=length)[0])
            progress.advance(max(0, decided - progress.count))

        out = fast_generate(
            model,
            batch["input_ids"],
            batch["attention_mask"],
            tokenizer=tokenizer,
            decoder=decoder,
            return_trace=True,
            observers=[show],
            **read_by_it,
        )
    assert isinstance(out, AsrdOutput)
    return out.trace


def grade_text(problem: Problem, tokens: list[int]) -> str:
    """Whether the answer is right, with the right answer."""
    return f"right: {problem.answer}" if problem.is_right(tokens) else f"wrong: it is {problem.answer}"
