"""`asrd eval`: benchmarks through lm-eval."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from asrd.cli.compare import parse_sweep
from asrd.cli.settings import add_model, limit_threads, load_model, parse_setting
from asrd.decoders import DECODERS
from asrd.lab.compare.plan import plan_runs
from asrd.lab.tiny.task import LEVELS


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "eval",
        help="benchmarks: GSM8K, MATH500, HumanEval, MBPP, NQ-Open, CNN/DailyMail, any task of lm-eval",
        description="Run tasks of lm-eval on a diffusion LLM, every decoder on the same problems. Every answer is on"
        " disk as it comes: the same command resumes where it was stopped. Needs asrd[eval].",
        epilog="example: asrd eval --model GSAI-ML/LLaDA-8B-Instruct --tasks gsm8k_cot_zeroshot --decoders"
        " standard,asrd --set max_new_tokens=256 --out gsm8k",
    )
    command.add_argument(
        "--tasks",
        help="gsm8k, gsm8k_cot, gsm8k_cot_zeroshot, minerva_math500, humaneval, humaneval_instruct, mbpp,"
        " mbpp_instruct, nq_open, cnn_dailymail, packaged (the problems of tiny), or others of lm-eval",
    )
    command.add_argument("--data", type=Path, help="folder of JSON lines files, in the place of the Hub")
    command.add_argument("--limit", type=int, help="problems per task (default: all)")
    command.add_argument("--shots", type=int, help="few-shot examples (default: as many as the task says)")
    command.add_argument("--level", default="hard", choices=LEVELS, help="difficulty of the packaged problems")
    command.add_argument("--chat", choices=("auto", "on", "off"), default="auto", help="use the chat template (default:"
                         " auto, on where there is one and the model's name does not say base)")  # fmt: skip
    command.add_argument("--single-turn", action="store_true", help="few-shot examples in one message, not as turns")
    command.add_argument("--system", help="system message")
    command.add_argument("--decoders", default="asrd", help=f"of {','.join(DECODERS)} (default: asrd)")
    command.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="a setting of all runs")
    command.add_argument("--sweep", metavar="KEY=A,B,C", action="append", default=[], help="one run per value")
    command.add_argument("--seeds", type=int, default=1, help="seeds 0 .. N-1 (with --set temperature=...)")
    command.add_argument("--batch-size", type=int, default=16, help="texts that decode at a time (default: 16)")
    command.add_argument("--max-length", type=int, help="longest prompt and text together (default: the model's own)")
    command.add_argument("--no-events", action="store_true", help="do not watch single tokens (anchors, flip-flops):"
                         " for wall-clock figures on a GPU")  # fmt: skip
    command.add_argument("--out", type=Path, default=Path("asrd-eval"), help="folder (default: asrd-eval)")
    _add_code(command)
    add_model(command)
    command.set_defaults(run=run)


def _add_code(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("code tasks")
    group.add_argument("--allow-code-execution", action="store_true", help="run the programs that the model writes")
    group.add_argument("--code-seconds", type=float, default=10.0, help="time limit of a program (default: 10)")
    group.add_argument("--code-memory", type=int, default=2048, help="memory limit in MB (default: 2048)")


def run(arguments: argparse.Namespace) -> None:
    """Plan, run, show, save."""
    require_lm_eval()
    for name in ("limit", "seeds", "batch_size", "max_length", "code_memory"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least 1")
    if not arguments.tasks:
        raise ValueError("--tasks is missing: name one or several tasks, such as gsm8k_cot_zeroshot,humaneval_instruct")
    common = dict(parse_setting(item) for item in arguments.set)
    for name in ("decoder", "seed", "return_dict_in_generate"):
        if name in common:
            raise ValueError(f"--set {name}: set by the evaluation itself (--decoders, --seeds)")
    sweeps = dict(parse_sweep(item) for item in arguments.sweep)
    runs = plan_runs(arguments.decoders.split(","), common, sweeps, range(arguments.seeds))
    session = session_of(arguments)
    evaluate(session, cells_of(arguments, runs, chat_of(arguments, session.tokenizer)))


def evaluate(session: Any, cells: list[Any]) -> None:
    """Run the cells and show the tables as they fill."""
    from asrd.eval.report import save, show
    from asrd.eval.session import missing_layers
    from asrd.eval.summary import summarise

    session.check(cells)
    about = session.about(cells)
    if about["sandbox"] and (missing := missing_layers(about["sandbox"])):
        print(f"programs run without {', '.join(missing)}: use a container")
    done = []
    for scored in session.run(cells):
        done.append(scored)
        print(f"{len(done)} of {len(cells)}: {scored.cell.task}, {scored.cell.run.label}")
        save(summarise(done), session.out, about)
    show(summarise(done))
    print(f"record.json, results.json, results.csv, results.md and every answer (cells/) are in {session.out}")


def cells_of(arguments: argparse.Namespace, runs: list[Any], chat: bool) -> list[Any]:
    """The cells of --tasks."""
    from asrd.eval.run import Cell

    multiturn = not arguments.single_turn
    return [
        Cell(task, run, arguments.shots, chat, multiturn, arguments.system)
        for task in arguments.tasks.split(",")
        for run in runs
    ]


def chat_of(arguments: argparse.Namespace, tokenizer: Any) -> bool:
    """Whether prompts go through the chat template."""
    if arguments.chat != "auto":
        return arguments.chat == "on"
    return getattr(tokenizer, "chat_template", None) is not None and "base" not in arguments.model.lower()


def session_of(arguments: argparse.Namespace) -> Any:
    """The model loaded, and where to and how."""
    from asrd.eval.sandbox import Limits
    from asrd.eval.session import Session

    limit_threads()
    model, tokenizer = load_model(arguments)
    if tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer, which lm-eval's tasks need")
    limits = Limits(arguments.code_seconds, arguments.code_memory << 20) if arguments.allow_code_execution else None
    return Session(
        arguments.model, model, tokenizer, arguments.out, arguments.data, arguments.limit, arguments.level,
        arguments.batch_size, not arguments.no_events, limits, arguments.max_length,
    )  # fmt: skip


def require_lm_eval() -> None:
    """Raise ValueError if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError('asrd eval needs lm-eval: pip install "asrd[eval]"')
