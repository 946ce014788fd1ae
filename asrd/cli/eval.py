"""`asrd eval`: benchmarks through lm-eval."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from asrd.cli.loading import limit_threads, load_model, load_plugins, require_tokenizer
from asrd.cli.settings import listed, parse_setting, parse_sweep
from asrd.eval.report import conditions, save, say, show
from asrd.eval.run import Cell, Scored
from asrd.eval.sandbox import Limits
from asrd.eval.session import Session, missing_layers
from asrd.eval.summary import Row, summarise
from asrd.eval.tasks import load_task
from asrd.files import write_text
from asrd.lab.compare.plan import RunSpec, plan_runs
from asrd.lab.tables import console, print_table
from asrd.models import ModelAdapter


def run(arguments: argparse.Namespace) -> None:
    """Plan, run, show, save."""
    load_plugins(arguments.plugin)
    if arguments.check_scoring:
        check_scoring(arguments)
        return
    if arguments.repeat is not None:
        repeat(arguments)
        return
    common = dict(parse_setting(item) for item in arguments.set)
    if arguments.preset:
        run_preset(arguments, common)
        return
    sweeps = dict(parse_sweep(item) for item in arguments.sweep)
    runs = plan_runs(listed(arguments.decoders or "asrd"), common, sweeps, range(arguments.seeds))
    session = session_of(arguments)
    cells = cells_of(arguments, runs, session)
    done, about = evaluate(session, cells)
    rows = summarise(done)
    show(rows)
    finish(session, rows, about)


def run_preset(arguments: argparse.Namespace, common: dict[str, Any]) -> None:
    """A table of the paper."""
    from asrd.eval.comparison import HEADINGS, LEGEND, compared, page, remarks
    from asrd.eval.presets import PRESETS, entries

    preset, base = PRESETS[arguments.preset], is_base(arguments.model)
    lengths = [int(length) for length in listed(arguments.lengths)] if arguments.lengths else []
    benchmarks = listed(arguments.benchmarks) if arguments.benchmarks else []
    session = session_of(arguments)
    if (ModelAdapter(session.model).block_length is None) == (preset.table == "block-models"):
        kind = "models with full attention" if preset.table == "block-models" else "block-diffusion models"
        raise ValueError(f"--preset {arguments.preset} is no table of {kind}, and {arguments.model} is one")
    plan = entries(preset, base, chat_of(arguments, session.tokenizer), lengths, benchmarks, common)
    notes = remarks(preset, base, arguments.model, common, arguments.limit)

    def lines(done: Sequence[Scored]) -> list[list[str]]:
        return compared(preset, plan, done, arguments.model)

    cells = {json.dumps(entry.cell.as_dict()): entry.cell for entry in plan}  # --set may make some of them the same
    done, about = evaluate(session, list(cells.values()), lambda done: page(preset, lines(done), notes))
    print_table(console(), HEADINGS, lines(done), preset.title, keys=3)
    say(LEGEND, "Where the settings come from:", *(f"- {note}" for note in notes))
    finish(session, summarise(done), about)


def repeat(arguments: argparse.Namespace) -> None:
    """An evaluation once more, from its record."""
    from asrd.eval.record import differences
    from asrd.eval.repeat import agreements, next_folder, read_record

    record = read_record(arguments.repeat)
    load_plugins([Path(file) for file in record["arguments"].get("plugin", [])])
    elsewhere = {"model": "tiny", "device": None, "attn": "auto", "data": None}  # what may be given, and its default
    for name, value in record["arguments"].items():
        if getattr(arguments, name) == elsewhere.get(name, getattr(arguments, name)):
            setattr(arguments, name, Path(value) if name == "data" and value else value)
    for name in ("limit", "level", "batch_size", "max_length"):
        setattr(arguments, name, record[name])
    arguments.no_events, arguments.out = not record["events"], next_folder(arguments.repeat)
    if record["code"]:
        if not arguments.allow_code_execution:
            raise ValueError(f"--repeat {arguments.repeat} executes programs: allow it with --allow-code-execution")
        arguments.code_seconds, arguments.code_memory = record["code"]["seconds"], record["code"]["memory"] >> 20
    cells = [Cell.from_dict(content) for content in record["cells"]]
    session = session_of(arguments)
    done, about = evaluate(session, cells)
    show(summarise(done))
    found = list(agreements(arguments.repeat, arguments.out, cells))
    rows = [[a.cell.task, a.cell.run.label, str(a.texts), str(a.equal), str(a.scores), a.first] for a in found]
    headings = ["task", "decoder", "answers", "equal token by token", "equal scores", "first difference"]
    print_table(console(), headings, rows, f"{arguments.repeat} and {arguments.out}", keys=2)
    about = json.loads((arguments.out / "record.json").read_text(encoding="utf-8"))
    changed = differences(about, record)
    say(*(changed or ["versions, commit, machine, model, data and settings are the same"]))
    content = {"differences": changed, "cells": [{**asdict(a), "cell": a.cell.as_dict()} for a in found]}
    write_text(arguments.out / "repeat.json", json.dumps(content, indent=2) + "\n")


def evaluate(
    session: Session, cells: list[Cell], extra: Callable[[Sequence[Scored]], str] = lambda done: ""
) -> tuple[list[Scored], dict[str, Any]]:
    """Run the cells and write the tables as they fill; extra: what else results.md has. The results and the record."""
    session.check(cells)
    about = session.about(cells)
    if about["sandbox"] and (missing := missing_layers(about["sandbox"])):
        say(f"programs run without {', '.join(missing)}: use a container")
    done: list[Scored] = []
    for scored in session.run(cells, about):
        done.append(scored)
        seed = f", seed {scored.cell.run.seed}" if len({cell.run.seed for cell in cells}) > 1 else ""
        print(f"{len(done)} of {len(cells)}: {scored.cell.task}, {scored.cell.run.label}{seed}", flush=True)
        save(summarise(done), session.out, about, extra(done))
    return done, about


def finish(session: Session, rows: Sequence[Row], about: dict[str, Any]) -> None:
    """Say what decides the figures, and where everything is."""
    say("What was run:", *(f"- {line}" for line in conditions(rows, about)))
    print(f"record.json, results.json, results.csv, results.md and every answer (cells/) are in {session.out}")


def cells_of(arguments: argparse.Namespace, runs: list[RunSpec], session: Session) -> list[Cell]:
    """The cells of --tasks; one of a task that compares likelihoods, in which no decoder plays a part."""
    chat, multiturn = chat_of(arguments, session.tokenizer), not arguments.single_turn
    found = []
    for task in listed(arguments.tasks):
        own = runs if session.task(task, arguments.shots).generates else runs[:1]
        if len(own) < len(runs):
            say(f"{task} compares likelihoods, which do not depend on the decoder: it is run once")
        found += [Cell(task, run, arguments.shots, chat, multiturn, arguments.system) for run in own]
    return found


def is_base(model: str) -> bool:
    """Does the name of a model say that it is a base model?"""
    return re.search(r"(^|[-_.])base([-_.]|$)", model.rstrip("/").rpartition("/")[2].lower()) is not None


def chat_of(arguments: argparse.Namespace, tokenizer: Any) -> bool:
    """Whether prompts go through the chat template."""
    if arguments.chat != "auto":
        return bool(arguments.chat == "on")
    return getattr(tokenizer, "chat_template", None) is not None and not is_base(arguments.model)


def limits_of(arguments: argparse.Namespace) -> Limits | None:
    """What programs may use; None: they are not run."""
    return Limits(arguments.code_seconds, arguments.code_memory << 20) if arguments.allow_code_execution else None


def session_of(arguments: argparse.Namespace) -> Session:
    """The model loaded, and where to and how."""
    limit_threads()
    model, tokenizer = load_model(arguments)
    require_tokenizer(arguments, tokenizer)
    how = {name: getattr(arguments, name) for name in ("model", "dtype", "device", "attn", "trust_remote_code")}
    how |= {"data": None if arguments.data is None else str(arguments.data.resolve())}
    how |= {"bertscore": arguments.bertscore, "mc_num": arguments.mc_num}
    how |= {"plugin": [str(file.resolve()) for file in arguments.plugin]}
    return Session(
        arguments.model, model, tokenizer, arguments.out, arguments.data, arguments.limit, arguments.level,
        arguments.batch_size, not arguments.no_events, limits_of(arguments), arguments.max_length,
        arguments.mc_num, arguments.bertscore, how,
    )  # fmt: skip


def check_scoring(arguments: argparse.Namespace) -> None:
    """Score answers that are known."""
    from asrd.eval import replay

    rows, failing = [], []
    for name in listed(arguments.tasks):
        task = load_task(name, arguments.data, arguments.shots, arguments.level, arguments.limit, arguments.bertscore)
        found = replay.check_scoring(task, arguments.limit, limits_of(arguments))
        rows.append([name, str(found.n), f"{found.right:.2%}", f"{found.wrong:.2%}", f"{found.mixed:.2%}",
                     f"{found.expected:.2%}"])  # fmt: skip
        failing += [f"{name}, {which}: {reason}"[:200] for which, reason in found.failing.items()]
    headings = ["task", "problems", "solutions", "wrong answers", "every third wrong", "expected"]
    print_table(console(), headings, rows)
    for line in failing:
        print(f"solution not judged right: {line}")
