"""The options of every command, and what is wrong with them as far as that can be said without a model.

Imports nothing heavy. A command's `check` runs at once; `run` names the function that is imported to do the work.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import asrd
from asrd.cli import doctor_options, eval_options
from asrd.cli.serve_options import add_batch, add_serve
from asrd.cli.settings import (
    DECODER_NAMES,
    add_model,
    add_settings,
    at_least,
    check_decoders,
    listed,
    parse_setting,
    parse_sweep,
    settings_of,
)
from asrd.files import check_file, check_folder
from asrd.lab.tasks import LEVELS
from asrd.settings import check

PRESET_NAMES = (
    "paper-main", "paper-ablations", "paper-sweeps", "caches", "frontier", "blocks", "sudoku",
)  # fmt: skip
THRESHOLDS = "threshold=0.5,0.6,0.7,0.8,0.9,0.95"
WITH_REVOCATIONS = 56  # a hard problem in which ASRD with its default settings revokes tokens
LAST_PROBLEM = 9_999
MATCHING = ("auto", "number", "exact", "contains")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="asrd",
        description="Anchor-supervised revocable decoding for diffusion LLMs.",
        epilog="asrd COMMAND --help shows a command's options.",
    )
    top.add_argument("--version", action="version", version=f"asrd {asrd.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    own = (_add_demo, _add_generate, _add_chat, _add_trace, _add_compare, _add_diagnose)
    for add in (*own, eval_options.add, add_serve, add_batch, doctor_options.add):
        add(commands)
    return top


def _add_demo(commands: Any) -> None:
    command = commands.add_parser(
        "demo",
        help="watch the packaged model decode, then compare decoders",
        description="Decode a few word problems live with ASRD and the standard decoder, then compare four decoders.",
    )
    command.add_argument("--watch", type=int, default=3, help="problems to show live (default: 3)")
    command.add_argument("--n", type=int, default=8, help="problems in the table (default: 8)")
    command.add_argument("--level", choices=LEVELS, help="difficulty (default: the hardest of the model's task)")
    command.add_argument("--seed", type=int, default=0, help="which problems (default: 0)")
    add_model(command)
    command.set_defaults(run="asrd.cli.demo:run", check=_check_demo)


def _check_demo(arguments: argparse.Namespace) -> None:
    at_least(arguments, watch=0, n=1, seed=0)
    if arguments.seed > 40_000:
        raise ValueError(f"--seed {arguments.seed}: expected at most 40000")


def _add_generate(commands: Any) -> None:
    command = commands.add_parser(
        "generate",
        help="continue a prompt, or every prompt of a file",
        description="Continue prompts with a diffusion LLM. Text goes to standard output, progress to standard error.",
        epilog="examples: asrd generate --problem 0; asrd generate --model GSAI-ML/LLaDA-8B-Instruct --device cuda"
        ' "What is 17 * 3?"; asrd generate --file prompts.jsonl --out results.jsonl',
    )
    command.add_argument("prompt", nargs="?", help="the prompt; without it (or with -) standard input is read")
    command.add_argument(
        "--file",
        type=Path,
        help="read the prompt from this file; from .jsonl one per line: a string, or an object with a prompt (text or"
        " ids) and settings such as max_new_tokens and seed",
    )
    command.add_argument(
        "--problem", type=int, metavar="N", help="a held-out problem of the packaged models as the prompt: 0, 1, ..."
    )
    command.add_argument(
        "--template",
        metavar="TEXT",
        help="fill in the blanks of this text, ___, {name} or {name:8} (of 8 tokens); a prompt is then the question"
        " that it answers",
    )
    command.add_argument("--lines", action="store_true", help="one prompt per line")
    command.add_argument(
        "--out",
        type=Path,
        help="append each result to this file (JSON lines) as soon as it is there; prompts with a result in it are not"
        " decoded again",
    )
    command.add_argument("--slots", type=int, default=16, help="prompts that decode at a time (default: 16)")
    command.add_argument("--raw", action="store_true", help="do not apply the tokenizer's chat template")
    command.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt, with tokens and counters"
    )
    add_model(command)
    add_settings(command)
    command.set_defaults(run="asrd.cli.generate:run", check=_check_generate)


def _check_generate(arguments: argparse.Namespace) -> None:
    settings_of(arguments)
    at_least(arguments, slots=1)
    check_problem(arguments)
    if arguments.template is not None:
        _check_template(arguments)
        return
    given = [arguments.prompt is not None, arguments.file is not None, arguments.problem is not None]
    if sum(given) > 1:
        raise ValueError("a prompt, --file and --problem: give one of the three")
    if arguments.prompt is not None and not arguments.prompt.strip():
        raise ValueError("the prompt is empty: give at least one word")
    if not any(given) and sys.stdin.isatty():
        raise ValueError('no prompt: give one as an argument, with --file, --problem, or on standard input ("-")')
    if arguments.file is not None and not arguments.file.is_file():
        raise ValueError(f"--file {arguments.file}: there is no such file")
    if arguments.out is not None:
        check_file(arguments.out, "--out")


def _check_template(arguments: argparse.Namespace) -> None:
    for name in ("file", "lines", "out"):
        if getattr(arguments, name):
            raise ValueError(f"--template and --{name}: a template is filled in for one prompt, on standard output")
    if not re.search(r"\{[A-Za-z_]\w*(:\d+)?\}|___|<\|.*mask.*\|>", arguments.template):
        raise ValueError(f"--template {arguments.template!r} has no blank: write ___, {{name}} or {{name:8}}")


def check_problem(arguments: argparse.Namespace) -> None:
    """--problem N."""
    if arguments.problem is not None and not 0 <= arguments.problem <= LAST_PROBLEM:
        raise ValueError(f"--problem {arguments.problem}: expected a number from 0 to {LAST_PROBLEM}")


def _add_chat(commands: Any) -> None:
    command = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="A conversation in the terminal; drafts are shown as they change. Ctrl-C stops an answer, Ctrl-D or"
        " /quit ends the program; /help lists the commands.",
        epilog="example: asrd chat --model GSAI-ML/LLaDA-8B-Instruct --device cuda",
    )
    command.add_argument("--system", help="a message that stands before the conversation")
    command.add_argument("--plain", action="store_true", help="print answers when they are finished; no live drafts")
    add_model(command)
    add_settings(command)
    command.set_defaults(run="asrd.cli.chat:run", check=_check_chat)


def _check_chat(arguments: argparse.Namespace) -> None:
    settings_of(arguments)


def _add_trace(commands: Any) -> None:
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
    command.add_argument(
        "--partial", action="store_true", help="with --from: also show a trace that was cut off, as far as it goes"
    )
    command.add_argument("--save", type=Path, metavar="FOLDER", help="also keep the traces, as JSON lines")
    command.add_argument("--raw", action="store_true", help="do not apply the tokenizer's chat template")
    command.add_argument("--level", choices=LEVELS, help="difficulty (default: the hardest of the model's task)")
    command.add_argument(
        "--problem", type=int, metavar="N", help=f"which of the held-out problems (default: {WITH_REVOCATIONS})"
    )
    add_model(command)
    add_settings(command)
    command.set_defaults(run="asrd.cli.trace:run", check=_check_trace)


def _check_trace(arguments: argparse.Namespace) -> None:
    settings = settings_of(arguments)
    check_problem(arguments)
    check_file(arguments.out, "--out")
    if arguments.save is not None:
        check_folder(arguments.save, "--save")
    if arguments.source:
        given = {"a prompt": arguments.prompt, "--against": arguments.against, "--save": arguments.save}
        given |= {"--problem": arguments.problem, "settings": settings}
        for name, value in given.items():
            if value:
                raise ValueError(f"--from shows recorded traces, which have {name} in them: leave {name} out")
        for path in arguments.source:
            if not path.is_file():
                raise ValueError(f"--from {path}: there is no such file")
        return
    if arguments.partial:
        raise ValueError("--partial is for traces from files: give --from FILE")
    if arguments.prompt is not None and not arguments.prompt.strip():
        raise ValueError("the prompt is empty: give at least one word")
    if arguments.prompt is not None and arguments.problem is not None:
        raise ValueError("a prompt and --problem: give one of the two")
    decoders = [settings.get("decoder", "asrd"), *arguments.against]
    check_decoders(arguments, decoders)
    if len(set(decoders)) != len(decoders):
        raise ValueError(f"--against {arguments.against[-1]}: expected another decoder than the first")


def _add_compare(commands: Any) -> None:
    command = commands.add_parser(
        "compare",
        help="decoders side by side: accuracy, forward passes, speed, revocations",
        description="Decode N held-out problems, or prompts of your own, with each decoder and setting. Results are"
        " kept in the output folder: the same command resumes where it was stopped. A result is used again only if"
        " code, versions, weights, device and settings are the same.",
        epilog=f"examples: asrd compare --n 200 --decoders standard,threshold,asrd --sweep {THRESHOLDS};"
        " asrd compare --model GSAI-ML/LLaDA-8B-Instruct --device cuda --prompts own.jsonl --set max_new_tokens=128",
    )
    command.add_argument("--n", type=int, help="problems, or at most so many prompts (default: 100, all prompts)")
    command.add_argument("--first", type=int, default=0, help="number of the first problem (default: 0)")
    command.add_argument("--level", choices=LEVELS, help="difficulty (default: the hardest of the model's task)")
    command.add_argument("--decoders", help=f"of {','.join(DECODER_NAMES)} (default: standard,threshold,asrd)")
    command.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="a setting of all runs")
    command.add_argument("--sweep", metavar="KEY=A,B,C", action="append", default=[], help="one run per value")
    command.add_argument(
        "--preset", choices=PRESET_NAMES, help="a group of tables by name, in place of --decoders and --sweep"
    )
    command.add_argument("--seeds", type=int, default=1, help="seeds 0 .. N-1 (with --set temperature=...)")
    command.add_argument("--batch-size", type=int, default=32, help="problems that decode at a time (default: 32)")
    command.add_argument("--fresh", action="store_true", help="decode anew what the output folder has results of")
    command.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help='prompts of your own for any model: a JSON list or JSON lines with "prompt" (text or chat messages) and'
        ' perhaps "answer"',
    )  # fmt: skip
    command.add_argument(
        "--answers", choices=MATCHING, nargs="?", const="auto",
        help='grade against each "answer" of --prompts: number (the last one in the text), exact, contains, or auto'
        " (number where the answer has one, else contains; what is done if every prompt has an answer)",
    )  # fmt: skip
    command.add_argument(
        "--from", dest="source", type=Path, action="append", default=[], metavar="FILE",
        help="plot accuracy against forward passes from a results.csv instead of decoding; may be repeated, one panel"
        " per model",
    )  # fmt: skip
    command.add_argument(
        "--out", type=Path, help="folder (default: asrd-compare); with --from the PNG file (default: results.png)"
    )
    add_model(command)
    command.set_defaults(run="asrd.cli.compare:run", check=_check_compare)


def _check_compare(arguments: argparse.Namespace) -> None:
    if arguments.source:
        out = arguments.out = arguments.out or Path("results.png")
        if out.suffix != ".png":
            raise ValueError(f"--out {out}: with --from, expected a file that ends in .png")
        check_file(out, "--out")
        for file in arguments.source:
            if not file.is_file():
                raise ValueError(f"--from {file}: there is no such file")
        return
    at_least(arguments, n=1, seeds=1, batch_size=1, first=0)
    for name, value in (parse_setting(item) for item in arguments.set):
        if name in ("decoder", "seed", "return_dict_in_generate"):
            raise ValueError(f"--set {name}: set by the comparison itself (--decoders, --seeds)")
        check(name, value)
    for name, values in (parse_sweep(item) for item in arguments.sweep):
        for value in values:
            check(name, value)
    if arguments.preset:
        for name in ("decoders", "sweep", "prompts"):
            if getattr(arguments, name):
                raise ValueError(f"--preset and --{name}: a preset already defines the runs; give one of the two")
        if arguments.seeds != 1:
            raise ValueError("--preset and --seeds: a preset has its own number of seeds; leave --seeds out")
    elif arguments.decoders is not None:
        check_decoders(arguments, listed(arguments.decoders))
    if arguments.prompts is not None and not arguments.prompts.is_file():
        raise ValueError(f"--prompts {arguments.prompts}: there is no such file")
    if arguments.answers is not None and arguments.prompts is None:
        raise ValueError("--answers is for prompts of your own: give --prompts FILE")
    arguments.out = arguments.out or Path("asrd-compare")
    if str(arguments.out) == ".":
        raise ValueError('--out "": expected the name of a folder')
    check_folder(arguments.out, "--out")


def _add_diagnose(commands: Any) -> None:
    from asrd.cli.diagnose_options import add

    add(commands)
