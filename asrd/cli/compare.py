"""`asrd compare`: decoders side by side on the packaged problems, or on any model's own prompts."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from asrd.cli.loading import limit_threads, load_model, load_plugins, require_packaged_task
from asrd.cli.settings import listed, parse_setting, parse_sweep
from asrd.lab.compare import RunSpec, check_runs, measure, summarise
from asrd.lab.compare import prompts as own
from asrd.lab.compare.frontier import save_problems
from asrd.lab.compare.plots import draw, draw_frontier
from asrd.lab.compare.presets import PRESETS, Part, Table
from asrd.lab.compare.records import Store, environment, timing_conditions
from asrd.lab.compare.report import (
    LEGEND,
    SHOWN,
    Summary,
    at_equal_forwards,
    cells,
    read_csv,
    save,
    save_overview,
)
from asrd.lab.diagnose.samples import read_samples
from asrd.lab.tables import console, counted, print_table
from asrd.lab.tasks import Task


def run(arguments: argparse.Namespace) -> None:
    """Plan, measure, show, save; or plot earlier results."""
    if arguments.source:
        plot(arguments.source, arguments.out)
        return
    load_plugins(arguments.plugin)
    tables = plan(arguments)
    limit_threads()
    model, tokenizer = load_model(arguments)
    if arguments.prompts is not None:
        compare_prompts(arguments, tables[0][1], model, tokenizer)
        return
    task = require_packaged_task(
        arguments, tokenizer, 'give --prompts FILE, a JSON list or JSON lines with "prompt" and perhaps "answer"'
    )
    compare_problems(arguments, tables, model, task)


def compare_problems(
    arguments: argparse.Namespace, tables: Sequence[tuple[Table, list[RunSpec]]], model: Any, task: Task
) -> None:
    """Every table on the packaged problems."""
    arguments.n = 100 if arguments.n is None else arguments.n
    chosen = task.held_out(arguments.n, arguments.level, arguments.first)
    check_runs(model, [run for _, runs in tables for run in runs])
    store = Store(arguments.out / "records", model, {"level": arguments.level}, arguments.fresh)
    about, timed = _about(arguments, model, store, arguments.n)
    about |= {"level": arguments.level, "n": arguments.n, "first": arguments.first}
    made: list[tuple[str, str, list[Summary]]] = []
    for table, runs in tables:
        folder = arguments.out / table.name if arguments.preset else arguments.out
        notes: list[str] = []
        if arguments.preset:
            amount = f"{counted(len(runs), 'run')} of {counted(arguments.n, 'problem')}"
            print(f"{table.name}: {amount}", file=sys.stderr, flush=True)
        with _resumable(arguments):
            records = measure(model, runs, chosen, store, arguments.batch_size, note=notes.append)
        summaries = summarise(runs, records, timed)
        notes += _untimed(summaries, timed)
        where = f"{arguments.model}, {counted(arguments.n, f'{arguments.level} problem')}"
        save(summaries, folder, about | {"notes": notes}, table.title)
        save_problems(runs, records, folder / "problems.csv")
        draw(summaries, folder / "results.png", f"{table.title or title_of(table)}\n{where}", table.axes)
        made.append((table.name, table.title, summaries))
        show(summaries, table.title)
        print("\n".join([*notes, ""]), end="")
        print(f"problems.csv, results.csv, results.json, results.md and results.png are in {folder}\n")
        if arguments.preset:
            save_overview(arguments.out, about["command"], made)
    if arguments.preset:
        print(f"all tables and plots on one page: {arguments.out / 'results.md'}")


def compare_prompts(arguments: argparse.Namespace, runs: Sequence[RunSpec], model: Any, tokenizer: Any) -> None:
    """One table on prompts of the user's own."""
    samples = read_samples(arguments.prompts, tokenizer, arguments.answers is not None, arguments.n)
    prompts = own.prompts_of(samples)
    answers = arguments.answers or ("auto" if all(prompt.answer.strip() for prompt in prompts) else None)
    check_runs(model, runs)
    store = Store(arguments.out / "records", model, {"prompts": "own"}, arguments.fresh)
    about, timed = _about(arguments, model, store, len({prompt.seed for prompt in prompts}))
    about |= {"prompts": str(arguments.prompts), "n": len(prompts), "answers": answers}
    notes: list[str] = []
    with _resumable(arguments):
        records = own.measure_prompts(model, tokenizer, runs, prompts, store, arguments.batch_size, note=notes.append)
    summaries = own.summarise_prompts(runs, records, prompts, answers, timed)
    notes += _untimed(summaries, timed)
    own.save_prompts(summaries, runs, records, prompts, arguments.out, about | {"notes": notes})
    out = console()
    title = f"{arguments.model}, {counted(len(prompts), 'prompt')} of {arguments.prompts.name}"
    print_table(out, ["decoder", *(name for name, _, _ in own.COLUMNS)], [own.cells(s) for s in summaries], title)
    out.print(own.LEGEND, highlight=False)
    print("\n".join([*notes, ""]), end="")
    print(f"results.csv, results.json, results.md and texts.jsonl are in {arguments.out}")


def _about(arguments: argparse.Namespace, model: Any, store: Store, count: int) -> tuple[dict[str, Any], str]:
    """What the results are of, and the conditions under which they are timed."""
    timed = timing_conditions(min(arguments.batch_size, count), model)
    about = {"command": shlex.join(["asrd", *sys.argv[1:]]), "model": arguments.model, **environment(model)}
    about |= {"weights": store.context["weights"], "timed": timed, "threads": torch.get_num_threads()}
    return about | {"batch_size": arguments.batch_size}, timed


@contextmanager
def _resumable(arguments: argparse.Namespace) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        again = "the same command without --fresh" if arguments.fresh else "the same command"
        print(f"\nstopped; {again} resumes from {arguments.out / 'records'}", file=sys.stderr)
        raise


def _untimed(summaries: Sequence[Summary] | Sequence[own.Summary], timed: str) -> list[str]:
    if all(summary.seconds is not None for summary in summaries):
        return []
    return [f"no time and speed where records were not timed as now: {timed}"]


def title_of(table: Table) -> str:
    """The title of a plot without one of its own."""
    return (
        "Accuracy against forward passes" if table.axes is None else f"Accuracy and forward passes by {table.axes[0]}"
    )


def plot(files: Sequence[Path], out: Path) -> None:
    """Accuracy against forward passes of results.csv files, one panel per model."""
    by_model: dict[str, list[Summary]] = {}
    for file in files:
        for model, summaries in read_csv(file).items():
            by_model.setdefault(model, []).extend(summaries)
    counts = {s.n for summaries in by_model.values() for s in summaries}
    problems = f", {counted(counts.pop(), 'problem')}" if len(counts) == 1 else ""
    for model, summaries in by_model.items():
        show(summaries, model)
    written = draw_frontier(by_model, out, f"Accuracy against forward passes{problems}")
    print(f"written: {', '.join(map(str, written))}")


def plan(arguments: argparse.Namespace) -> list[tuple[Table, list[RunSpec]]]:
    """The tables to make and the runs of each, all checked before the first one starts."""
    common = dict(parse_setting(item) for item in arguments.set)
    if arguments.preset:
        return [(table, table.runs(common)) for table in PRESETS[arguments.preset]]
    sweeps = dict(parse_sweep(item) for item in arguments.sweep)
    decoders = tuple(listed("standard,threshold,asrd" if arguments.decoders is None else arguments.decoders))
    axes = tuple(sweeps) if len(sweeps) == 1 and "threshold" not in sweeps else None
    table = Table("results", "", (Part(decoders, sweeps),), seeds=arguments.seeds, axes=axes)
    return [(table, table.runs(common))]


def show(summaries: list[Summary], title: str) -> None:
    """Print the tables."""
    out = console()
    print_table(out, ["decoder", *(heading for heading, _, _ in SHOWN)], [cells(s, SHOWN) for s in summaries], title)
    out.print(LEGEND, highlight=False)
    if equal := at_equal_forwards(summaries):
        rows = [
            [
                entry["label"],
                f"{entry['forwards']:.1f}",
                f"{entry['accuracy']:.1%}",
                f"{entry['threshold']:.1%}",
                f"{100 * entry['difference']:+.1f}",
            ]
            for entry in equal
        ]
        print_table(
            out,
            ["decoder", "passes", "accuracy", "threshold", "points"],
            rows,
            "Against threshold at equal forward passes (interpolated)",
        )
