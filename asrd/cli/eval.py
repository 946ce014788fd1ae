"""`asrd eval`: benchmarks through lm-eval."""

from __future__ import annotations

import argparse
from typing import Any

from asrd.cli.loading import limit_threads, load_model, load_plugins, require_tokenizer
from asrd.cli.settings import listed, parse_setting, parse_sweep
from asrd.eval.report import save, show
from asrd.eval.run import Cell
from asrd.eval.sandbox import Limits
from asrd.eval.session import Session, missing_layers
from asrd.eval.summary import summarise
from asrd.eval.tasks import load_task
from asrd.lab.compare.plan import RunSpec, plan_runs
from asrd.lab.tables import console, print_table


def run(arguments: argparse.Namespace) -> None:
    """Plan, run, show, save."""
    load_plugins(arguments.plugin)
    if arguments.check_scoring:
        check_scoring(arguments)
        return
    common = dict(parse_setting(item) for item in arguments.set)
    sweeps = dict(parse_sweep(item) for item in arguments.sweep)
    runs = plan_runs(listed(arguments.decoders or "asrd"), common, sweeps, range(arguments.seeds))
    session = session_of(arguments)
    evaluate(session, cells_of(arguments, runs, chat_of(arguments, session.tokenizer)))


def evaluate(session: Session, cells: list[Cell]) -> None:
    """Run the cells and write the tables as they fill."""
    session.check(cells)
    about = session.about(cells)
    if about["sandbox"] and (missing := missing_layers(about["sandbox"])):
        print(f"programs run without {', '.join(missing)}: use a container")
    done = []
    for scored in session.run(cells, about):
        done.append(scored)
        print(f"{len(done)} of {len(cells)}: {scored.cell.task}, {scored.cell.run.label}")
        save(summarise(done), session.out, about)
    show(summarise(done))
    print(f"record.json, results.json, results.csv, results.md and every answer (cells/) are in {session.out}")


def cells_of(arguments: argparse.Namespace, runs: list[RunSpec], chat: bool) -> list[Cell]:
    """The cells of --tasks."""
    multiturn = not arguments.single_turn
    return [
        Cell(task, run, arguments.shots, chat, multiturn, arguments.system)
        for task in listed(arguments.tasks)
        for run in runs
    ]


def chat_of(arguments: argparse.Namespace, tokenizer: Any) -> bool:
    """Whether prompts go through the chat template."""
    if arguments.chat != "auto":
        return bool(arguments.chat == "on")
    return getattr(tokenizer, "chat_template", None) is not None and "base" not in arguments.model.lower()


def limits_of(arguments: argparse.Namespace) -> Limits | None:
    """What programs may use; None: they are not run."""
    return Limits(arguments.code_seconds, arguments.code_memory << 20) if arguments.allow_code_execution else None


def session_of(arguments: argparse.Namespace) -> Session:
    """The model loaded, and where to and how."""
    limit_threads()
    model, tokenizer = load_model(arguments)
    require_tokenizer(arguments, tokenizer)
    return Session(
        arguments.model, model, tokenizer, arguments.out, arguments.data, arguments.limit, arguments.level,
        arguments.batch_size, not arguments.no_events, limits_of(arguments), arguments.max_length,
    )  # fmt: skip


def check_scoring(arguments: argparse.Namespace) -> None:
    """Score answers that are known."""
    from asrd.eval import replay

    rows, failing = [], []
    for name in listed(arguments.tasks):
        task = load_task(name, arguments.data, arguments.shots, arguments.level, arguments.limit)
        found = replay.check_scoring(task, arguments.limit, limits_of(arguments))
        rows.append([name, str(found.n), f"{found.right:.2%}", f"{found.wrong:.2%}", f"{found.mixed:.2%}",
                     f"{found.expected:.2%}"])  # fmt: skip
        failing += [f"{name}, {which}: {reason}"[:200] for which, reason in found.failing.items()]
    headings = ["task", "problems", "solutions", "wrong answers", "every third wrong", "expected"]
    print_table(console(), headings, rows)
    for line in failing:
        print(f"solution not judged right: {line}")
