"""The options of `asrd eval`. Imports nothing heavy."""

from __future__ import annotations

import argparse
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asrd.cli.settings import DECODER_NAMES, add_model, at_least, check_decoders, listed, parse_setting, parse_sweep
from asrd.files import check_folder
from asrd.lab.tiny.task import LEVELS
from asrd.settings import check

TASK_NAMES = (
    "gsm8k", "gsm8k_cot", "gsm8k_cot_zeroshot", "minerva_math500", "humaneval", "humaneval_instruct", "mbpp",
    "mbpp_instruct", "nq_open", "cnn_dailymail", "packaged",
)  # fmt: skip
PRESET_NAMES = (
    "paper-main", "paper-base-rl", "paper-multiseed", "paper-threshold-only", "paper-open-ended", "paper-block-models",
)  # fmt: skip
OF_A_RECORD = (
    "decoders", "set", "sweep", "seeds", "limit", "shots", "level", "chat", "single_turn", "system", "batch_size",
    "max_length", "no_events", "mc_num", "bertscore", "lengths", "benchmarks", "check_scoring", "out", "dtype",
    "plugin", "code_seconds", "code_memory",
)  # fmt: skip
BENCHMARKS = ("HumanEval", "MBPP", "GSM8K", "MATH500", "NQ-Open", "CNN/DailyMail")


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "eval",
        help="benchmarks: GSM8K, MATH500, HumanEval, MBPP, NQ-Open, CNN/DailyMail, any task of lm-eval",
        description="Run tasks of lm-eval on a diffusion LLM, every decoder on the same problems. Every answer is on"
        " disk as it comes: the same command resumes where it was stopped. Needs asrd[eval].",
        epilog="examples: asrd eval --model GSAI-ML/LLaDA-8B-Instruct --device cuda --tasks gsm8k_cot_zeroshot"
        " --decoders standard,asrd --set max_new_tokens=256; asrd eval --tasks packaged --limit 20",
    )
    command.add_argument("--tasks", help=f"of {','.join(TASK_NAMES)} (problems of tiny), or any other of lm-eval")
    command.add_argument("--data", type=Path, help="folder of JSON lines files, in the place of the Hub")
    command.add_argument("--limit", type=int, help="problems per task (default: all)")
    command.add_argument("--shots", type=int, help="few-shot examples (default: as many as the task says)")
    command.add_argument("--level", default="hard", choices=LEVELS, help="difficulty of the packaged problems")
    command.add_argument(
        "--chat", choices=("auto", "on", "off"), default="auto",
        help="use the chat template (default: auto, on where there is one and the model's name does not say base)",
    )  # fmt: skip
    command.add_argument("--single-turn", action="store_true", help="few-shot examples in one message, not as turns")
    command.add_argument("--system", help="system message")
    command.add_argument("--decoders", help=f"of {','.join(DECODER_NAMES)} (default: asrd)")
    command.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="a setting of all runs")
    command.add_argument("--sweep", metavar="KEY=A,B,C", action="append", default=[], help="one run per value")
    command.add_argument("--seeds", type=int, default=1, help="seeds 0 .. N-1 (with --set temperature=...)")
    command.add_argument("--batch-size", type=int, default=16, help="texts that decode at a time (default: 16)")
    command.add_argument("--max-length", type=int, help="longest prompt and text together (default: the model's own)")
    command.add_argument(
        "--no-events", action="store_true",
        help="do not watch single tokens (anchors, flip-flops): for wall-clock figures on a GPU",
    )  # fmt: skip
    command.add_argument(
        "--mc-num", type=int,
        help="draws of each likelihood, for multiple choice (default: LLaDA's published number, 128 or 1 by task)",
    )  # fmt: skip
    command.add_argument(
        "--bertscore", metavar="MODEL", default="distilbert-base-uncased",
        help="model of BERTScore for summaries, on disk, with :LAYER where that is not known"
        " (default: distilbert-base-uncased, lm-eval's)",
    )  # fmt: skip
    command.add_argument("--preset", choices=PRESET_NAMES, help="a table of the paper, in place of --tasks")
    command.add_argument("--lengths", help="of a preset: these lengths only, such as 256")
    command.add_argument("--benchmarks", help=f"of a preset: these only, of {','.join(BENCHMARKS)}")
    command.add_argument(
        "--repeat", type=Path, metavar="FOLDER",
        help="run the evaluation in this folder again, from its record, and compare token by token",
    )  # fmt: skip
    command.add_argument(
        "--check-scoring", action="store_true",
        help="no model: score the published solutions of the tasks (100 %% if all is right) and wrong answers (0 %%)",
    )  # fmt: skip
    command.add_argument("--out", type=Path, default=Path("asrd-eval"), help="folder (default: asrd-eval)")
    _add_code(command)
    add_model(command)
    command.set_defaults(run="asrd.cli.eval:run", check=functools.partial(_check, command))


def _add_code(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("code tasks")
    group.add_argument("--allow-code-execution", action="store_true", help="run the programs that the model writes")
    group.add_argument(
        "--code-seconds", type=float, default=10.0,
        help="processor time of a program; three times as much of the clock (default: 10)",
    )  # fmt: skip
    group.add_argument("--code-memory", type=int, default=2048, help="memory of a program in MB (default: 2048)")


Given = Callable[..., str]  # the first of the named options that is not its default, with its dashes; empty: none


def _given(arguments: argparse.Namespace, command: argparse.ArgumentParser, *names: str) -> str:
    found = [name for name in names if getattr(arguments, name) != command.get_default(name)]
    return "--" + found[0].replace("_", "-") if found else ""


def _check_preset(arguments: argparse.Namespace, given_of: Given) -> None:
    if given := given_of("decoders", "sweep", "seeds", "shots", "system", "single_turn", "check_scoring"):
        raise ValueError(
            f"--preset and {given}: a preset has its own decoders, settings, seeds and prompts; --set changes a setting"
        )
    for length in listed(arguments.lengths) if arguments.lengths else []:
        if not length.isdigit():
            raise ValueError(f"--lengths {length}: expected numbers of tokens with commas between, such as 256,512")


def _check(command: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    given_of = functools.partial(_given, arguments, command)
    at_least(arguments, limit=1, seeds=1, batch_size=1, max_length=2, code_memory=64, shots=0, mc_num=1)
    if arguments.code_seconds <= 0:
        raise ValueError(f"--code-seconds {arguments.code_seconds}: expected more than 0")
    if sum(map(bool, (arguments.tasks, arguments.preset, arguments.repeat))) > 1:
        raise ValueError("--tasks, --preset and --repeat: give one of the three")
    if arguments.repeat is not None:
        if given := given_of(*OF_A_RECORD):
            raise ValueError(
                f"--repeat and {given}: the record says what is run; leave {given} out (--model, --device, --attn and"
                " --data may be given, for another machine)"
            )
    elif arguments.preset:
        _check_preset(arguments, given_of)
    elif given := given_of("lengths", "benchmarks"):
        raise ValueError(f"{given} takes a part of a table: give it with --preset")
    elif not arguments.tasks:
        raise ValueError("--tasks is missing: name one or several tasks, such as gsm8k_cot_zeroshot,humaneval_instruct")
    elif "" in listed(arguments.tasks):
        raise ValueError(f"--tasks {arguments.tasks!r}: a name is missing between the commas")
    if arguments.data is not None and not arguments.data.is_dir():
        what = "is a file, expected its folder" if arguments.data.exists() else "there is no such folder"
        raise ValueError(f"--data {arguments.data}: {what}")
    check_decoders(arguments, listed(arguments.decoders or "asrd"))
    for name, value in (parse_setting(item) for item in arguments.set):
        if name in ("decoder", "seed", "return_dict_in_generate"):
            raise ValueError(f"--set {name}: set by the evaluation itself (--decoders, --seeds)")
        check(name, value)
    for name, values in (parse_sweep(item) for item in arguments.sweep):
        for value in values:
            check(name, value)
    check_folder(arguments.out, "--out")
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError('asrd eval needs lm-eval: pip install "asrd[eval]"')
