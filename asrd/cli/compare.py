"""`asrd compare`: decoders side by side on the packaged problems."""

from __future__ import annotations

import argparse
import hashlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from asrd.cli.settings import add_model, limit_threads, load_model, parse_setting, parse_value
from asrd.config import FIELDS
from asrd.decoders import DECODERS
from asrd.lab.compare import RunSpec, check_runs, measure, summarise
from asrd.lab.compare.frontier import save_problems
from asrd.lab.compare.plots import draw, draw_frontier
from asrd.lab.compare.presets import PRESETS, Part, Table
from asrd.lab.compare.report import COLUMNS, LEGEND, Summary, at_equal_forwards, cells, read_csv, save, save_overview
from asrd.lab.tables import console, print_table
from asrd.lab.tasks import LEVELS, task_of

THRESHOLDS = "threshold=0.5,0.6,0.7,0.8,0.9,0.95"


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "compare",
        help="decoders side by side: accuracy, forward passes, speed, revocations",
        description="Decode N held-out problems with each decoder and setting. Results are kept in the output folder:"
        " the same command resumes where it was stopped.",
        epilog=f"example: asrd compare --n 200 --decoders standard,threshold,asrd --sweep {THRESHOLDS}",
    )
    command.add_argument("--n", type=int, default=100, help="problems (default: 100)")
    command.add_argument("--first", type=int, default=0, help="number of the first problem (default: 0)")
    command.add_argument("--level", choices=LEVELS, help="difficulty (default: the hardest of the model's task)")
    command.add_argument("--decoders", help=f"of {','.join(DECODERS)} (default: standard,threshold,asrd)")
    command.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="a setting of all runs")
    command.add_argument("--sweep", metavar="KEY=A,B,C", action="append", default=[], help="one run per value")
    command.add_argument(
        "--preset", choices=PRESETS, help="a group of tables by name, in place of --decoders and --sweep"
    )
    command.add_argument("--seeds", type=int, default=1, help="seeds 0 .. N-1 (with --set temperature=...)")
    command.add_argument("--batch-size", type=int, default=32)
    command.add_argument(
        "--from", dest="source", type=Path, action="append", default=[], metavar="FILE",
        help="plot accuracy against forward passes from a results.csv instead of decoding; may be repeated, one panel"
        " per model",
    )  # fmt: skip
    command.add_argument(
        "--out", type=Path, help="folder (default: asrd-compare); with --from the PNG file (default: results.png)"
    )
    add_model(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Plan, measure, show, save; or plot earlier results."""
    if arguments.source:
        plot(arguments.source, arguments.out or Path("results.png"))
        return
    arguments.out = arguments.out or Path("asrd-compare")
    for name in ("n", "seeds", "batch_size"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: expected at least 1")
    tables = plan(arguments)
    if arguments.first < 0:
        raise ValueError(f"--first {arguments.first}: expected at least 0")
    limit_threads()
    model, tokenizer = load_model(arguments)
    task = task_of(tokenizer, arguments.model)
    arguments.level = task.level(arguments.level)
    chosen = task.held_out(arguments.n, arguments.level, arguments.first)
    context = {"model": arguments.model, "weights": fingerprint(model), "level": arguments.level}
    about = {"command": shlex.join(["asrd", *sys.argv[1:]]), "threads": torch.get_num_threads(), **context}
    about |= {"n": arguments.n, "first": arguments.first, "batch_size": arguments.batch_size}
    check_runs(model, [run for _, runs in tables for run in runs])
    made: list[tuple[str, str, list[Summary]]] = []
    for table, runs in tables:
        folder = arguments.out / table.name if arguments.preset else arguments.out
        try:
            records = measure(model, runs, chosen, arguments.out / "records", context, arguments.batch_size)
        except KeyboardInterrupt:
            print(f"\nstopped; the same command resumes from {arguments.out / 'records'}", file=sys.stderr)
            raise
        summaries = summarise(runs, records)
        where = f"{arguments.model}, {arguments.n} {arguments.level} problems"
        save(summaries, folder, about, table.title)
        save_problems(runs, records, folder / "problems.csv")
        draw(summaries, folder / "results.png", f"{table.title or title_of(table)}\n{where}", table.axes)
        made.append((table.name, table.title, summaries))
        show(summaries, table.title)
        print(f"problems.csv, results.csv, results.json, results.md and results.png are in {folder}\n")
        if arguments.preset:
            save_overview(arguments.out, about["command"], made)
    if arguments.preset:
        print(f"all tables and plots on one page: {arguments.out / 'results.md'}")


def title_of(table: Table) -> str:
    """The title of a plot without one of its own."""
    return (
        "Accuracy against forward passes" if table.axes is None else f"Accuracy and forward passes by {table.axes[0]}"
    )


def plot(files: Sequence[Path], out: Path) -> None:
    """Accuracy against forward passes of results.csv files, one panel per model."""
    if out.suffix != ".png":
        raise ValueError(f"--out {out}: with --from, expected a file that ends in .png")
    by_model: dict[str, list[Summary]] = {}
    for file in files:
        for model, summaries in read_csv(file).items():
            by_model.setdefault(model, []).extend(summaries)
    counts = {s.n for summaries in by_model.values() for s in summaries}
    problems = f", {counts.pop()} problems" if len(counts) == 1 else ""
    for model, summaries in by_model.items():
        show(summaries, model)
    written = draw_frontier(by_model, out, f"Accuracy against forward passes{problems}")
    print(f"written: {', '.join(map(str, written))}")


def plan(arguments: argparse.Namespace) -> list[tuple[Table, list[RunSpec]]]:
    """The tables to make and the runs of each, all checked before the first one starts."""
    common = dict(parse_setting(item) for item in arguments.set)
    for name in ("decoder", "seed", "return_dict_in_generate"):
        if name in common:
            raise ValueError(f"--set {name}: set by the comparison itself (--decoders, --seeds)")
    if arguments.preset:
        for name in ("decoders", "sweep"):
            if getattr(arguments, name):
                raise ValueError(f"--preset and --{name}: a preset already defines the runs; give one of the two")
        return [(table, table.runs(common)) for table in PRESETS[arguments.preset]]
    sweeps = dict(parse_sweep(item) for item in arguments.sweep)
    decoders = tuple((arguments.decoders or "standard,threshold,asrd").split(","))
    axes = tuple(sweeps) if len(sweeps) == 1 and "threshold" not in sweeps else None
    table = Table("results", "", (Part(decoders, sweeps),), seeds=arguments.seeds, axes=axes)
    return [(table, table.runs(common))]


def fingerprint(model: Any) -> str:
    """Identifies the weights, so that records of another model of the same name are not used."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(str((weight.dtype, weight.double().sum().item(), weight.double().square().sum().item())).encode())
    return digest.hexdigest()[:12]


def parse_sweep(item: str) -> tuple[str, list[Any]]:
    """KEY=A,B,C."""
    key, equals, text = item.partition("=")
    key = key.strip().replace("-", "_")
    if not equals or key not in FIELDS or not text:
        raise ValueError(f"--sweep {item}: expected KEY=A,B,C with KEY one of {', '.join(sorted(FIELDS))}")
    return key, [parse_value(value) for value in text.split(",")]


def show(summaries: list[Summary], title: str) -> None:
    """Print the tables."""
    out = console()
    print_table(out, ["decoder", *(heading for heading, _, _ in COLUMNS)], [cells(s) for s in summaries], title)
    out.print(LEGEND, highlight=False, soft_wrap=not sys.stdout.isatty())
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
