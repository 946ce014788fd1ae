"""`asrd trace`: one HTML file that replays a decode step by step; two decoders side by side on one clock."""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from asrd.cli.settings import add_model, add_settings, limit_threads, load_model, settings_of
from asrd.decoders import DECODERS, find_decoder
from asrd.generate import fast_generate
from asrd.lab.tasks import LEVELS, Problem, task_of
from asrd.many import encode
from asrd.output import AsrdOutput
from asrd.trace import Trace, read
from asrd.viewer import page

WITH_REVOCATIONS = 56  # a hard problem in which ASRD with its default settings revokes tokens


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "trace",
        help="watch a decode in the browser, step by step",
        description="Decode a prompt and write one HTML file that shows every step and needs no network. Without a"
        " prompt, a held-out problem of the packaged models is decoded.",
        epilog="example: asrd trace --out trace.html --decoder asrd --against standard",
    )
    command.add_argument("prompt", nargs="?", help="the prompt (default: a held-out problem)")
    command.add_argument("--out", type=Path, default=Path("trace.html"), help="the HTML file (default: trace.html)")
    command.add_argument("--against", metavar="DECODER", action="append", default=[], help="a second decoder beside it")
    command.add_argument(
        "--from", dest="source", type=Path, action="append", default=[], metavar="FILE",
        help="show a trace from this file instead of decoding; twice: side by side",
    )  # fmt: skip
    command.add_argument("--save", type=Path, metavar="FOLDER", help="also keep the traces, as JSON lines")
    command.add_argument("--raw", action="store_true", help="do not apply the tokenizer's chat template")
    command.add_argument("--level", choices=LEVELS, help="difficulty (default: the hardest of the model's task)")
    command.add_argument(
        "--problem",
        type=int,
        default=WITH_REVOCATIONS,
        metavar="N",
        help=f"which of the held-out problems (default: {WITH_REVOCATIONS})",
    )
    add_model(command)
    add_settings(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Decode or read, then write the page."""
    grades: list[str | None] = []
    if arguments.source:
        if arguments.prompt is not None or arguments.against:
            raise ValueError("--from shows recorded traces: leave out the prompt and --against")
        traces = [read(path) for path in arguments.source]
    else:
        traces, grades = decode(arguments)
    html = page(traces, grades, title=f"asrd trace: {' and '.join(t.header.decoder for t in traces)}")
    arguments.out.write_text(html, encoding="utf-8")
    passes = ", ".join(f"{t.header.decoder} {len(t.steps) * t.header.forwards_per_step}" for t in traces)
    print(f"{arguments.out}: forward passes: {passes}; open it in a browser", file=sys.stderr)


def decode(arguments: argparse.Namespace) -> tuple[list[Trace], list[str | None]]:
    """A trace for each decoder, and the grade of its answer."""
    settings = settings_of(arguments)
    decoders = [settings.pop("decoder", "asrd"), *arguments.against]
    for name in decoders:
        find_decoder(name)
    if arguments.problem < 0:
        raise ValueError(f"--problem {arguments.problem}: expected at least 0")
    limit_threads()
    model, tokenizer = load_model(arguments)
    if tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer, so text cannot be turned into ids; use it from Python")
    problem = None
    if arguments.prompt is None:
        task = task_of(tokenizer, arguments.model)
        problem = next(itertools.islice(task.shown(task.level(arguments.level), 0), arguments.problem, None))
        settings.setdefault("max_new_tokens", problem.response_length)
        settings.setdefault("block_length", problem.block_length)
    batch = encode(tokenizer, [problem.question if problem else arguments.prompt], chat=not arguments.raw)
    traces, grades = [], []
    for name in decoders:
        trace = _trace(model, tokenizer, batch, name, settings)
        traces.append(trace)
        grades.append(grade_text(problem, trace.tokens[0]) if problem else None)
        if arguments.save:
            arguments.save.mkdir(parents=True, exist_ok=True)
            trace.save(arguments.save / f"{name}.jsonl")
    return traces, grades


def _trace(model: Any, tokenizer: Any, batch: Any, decoder: str, settings: dict[str, Any]) -> Trace:
    """The trace of one decode, with those of the settings that this decoder reads."""
    read_by_it = {name: value for name, value in settings.items() if name in DECODERS[decoder].reads}
    out = fast_generate(
        model,
        batch["input_ids"],
        batch["attention_mask"],
        tokenizer=tokenizer,
        decoder=decoder,
        return_trace=True,
        **read_by_it,
    )
    assert isinstance(out, AsrdOutput)
    return out.trace


def grade_text(problem: Problem, tokens: list[int]) -> str:
    """Whether the answer is right, with the right answer."""
    return f"right: {problem.answer}" if problem.is_right(tokens) else f"wrong: it is {problem.answer}"
