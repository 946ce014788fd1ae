"""`asrd demo`: watch the packaged model solve problems with ASRD and the standard decoder, then a small table."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from typing import Any

import torch
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from asrd.cli.display import Frame, Frames, coloured, legend, plain
from asrd.cli.loading import limit_threads, load_model, load_plugins, require_packaged_task
from asrd.engine.observers.events import EventObserver
from asrd.generate import fast_generate
from asrd.lab.compare.measure import decode_batch
from asrd.lab.compare.plan import RunSpec
from asrd.lab.compare.report import Summary, summarise
from asrd.lab.tables import counted
from asrd.lab.tasks import Problem, length_and_blocks
from asrd.lab.tiny.batch import prompt_ids
from asrd.lab.tiny.language import EOS_ID, MASK_ID, PAD_ID

FRAME_SECONDS = 0.09
NATIVE = RunSpec("native")  # the reference on block-diffusion models, which have no standard decoder
RUNS = (
    RunSpec("standard"),
    RunSpec("threshold", {"threshold": 0.7}, ("threshold",)),
    RunSpec("asrd", {"threshold": 0.7}, ("threshold",)),
)
CACHED = RunSpec("loo", {"kv_cache": "dual"}, ("kv_cache",))
ON_BLOCKS = RunSpec("loo")  # these models have a cache of their own


def run(arguments: argparse.Namespace) -> None:
    """Watch, then compare."""
    load_plugins(arguments.plugin)
    limit_threads()
    console = Console()
    model, tokenizer = load_model(arguments)
    task = require_packaged_task(
        arguments, tokenizer, "compare decoders on your own prompts with asrd compare --prompts FILE"
    )
    on_blocks = getattr(model.config, "asrd_block_length", None)
    runs = (NATIVE, *RUNS[1:], ON_BLOCKS) if on_blocks else (*RUNS, CACHED)
    count = max(arguments.watch, arguments.n)
    chosen = list(itertools.islice(task.shown(arguments.level, arguments.seed), count))
    for problem in chosen[: arguments.watch]:
        recordings = {run.decoder: record(model, tokenizer, problem, run) for run in (runs[2], runs[0])}
        (play if console.is_terminal else print_revocations)(console, problem, recordings)
    records = []
    decode_batch(model, runs[0], chosen[:1])  # what is slow the first time is not timed
    for spec in runs:
        with console.status(f"{counted(arguments.n, 'problem')} with {spec.label} ..."):
            records.append(decode_batch(model, spec, chosen[: arguments.n]))
    show(console, summarise(runs, records))


def record(model: Any, tokenizer: Any, problem: Problem, spec: RunSpec) -> list[Frame]:
    """Decode a problem; one frame per forward pass."""
    frames = Frames(tokenizer, hidden=(EOS_ID, PAD_ID))
    fast_generate(
        model,
        torch.tensor([prompt_ids(problem)]),
        decoder=spec.decoder,
        observers=[EventObserver(MASK_ID, (EOS_ID,), frames.handle)],
        **length_and_blocks(problem, model),
        **spec.settings,
    )
    return frames.frames


def play(console: Console, problem: Problem, recordings: dict[str, list[Frame]]) -> None:
    """Both decoders on one clock, one frame per forward pass; when the faster is done, four passes per frame."""
    console.print(Panel(problem.question, title="problem", border_style="blue"))
    shortest, longest = (extreme(len(frames) for frames in recordings.values()) for extreme in (min, max))
    ticks = [*range(shortest), *range(shortest, longest, 4), longest - 1]
    with Live(console=console, auto_refresh=False) as live:
        for tick in ticks:
            width = console.width // 2 - 1
            panels = [panel(name, frames, tick, problem, width) for name, frames in recordings.items()]
            live.update(Group(Columns(panels), legend()), refresh=True)
            time.sleep(FRAME_SECONDS)
    console.print()


def panel(name: str, frames: list[Frame], tick: int, problem: Problem, width: int) -> Panel:
    """One decoder's canvas at a tick of the clock."""
    frame = frames[min(tick, len(frames) - 1)]
    title = f"{name}: {frame.step} forward passes"
    footer, style = f"anchors {frame.anchors}, revoked {frame.revoked}", "white"
    if tick >= len(frames) - 1:
        right = problem.is_right(" ".join(frame.words))
        footer, style = (
            ("answer right" if right else f"answer wrong, it is {problem.answer}"),
            ("green" if right else "red"),
        )
    return Panel(coloured(frame), title=title, subtitle=footer, border_style=style, width=width)


def print_revocations(console: Console, problem: Problem, recordings: dict[str, list[Frame]]) -> None:
    """The same without a terminal: the steps with revocations, and the result."""
    print(f"problem: {problem.question}")
    print("         marks: (pending), [anchor], ~revoked~")
    for name, frames in recordings.items():
        for before, frame in itertools.pairwise(frames):
            if frame.revoked > before.revoked:
                print(f"{name}, forward pass {frame.step}: {plain(frame)}")
        last = frames[-1]
        graded = "right" if problem.is_right(" ".join(last.words)) else f"wrong, it is {problem.answer}"
        print(f"{name}, {last.step} forward passes, answer {graded}: {plain(last)}")
    print(flush=True)


def show(console: Console, summaries: list[Summary]) -> None:
    """Print the table."""
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=100)
    table = Table("decoder", "accuracy", "forward passes", "seconds", "speed", title=Text("side by side"))
    standard = summaries[0]
    for s in summaries:
        fewer = (
            f"{s.forwards:.1f} ({standard.forwards / s.forwards:.1f}x fewer)"
            if s is not standard
            else f"{s.forwards:.1f}"
        )
        table.add_row(
            s.label,
            f"{round(s.accuracy * s.n)} of {s.n}",
            fewer,
            f"{(s.seconds or 0) * s.n:.1f}",
            f"{s.speed:.1f}x" if s.speed else "",
        )
    console.print(table)
    console.print("More: asrd compare --help")
