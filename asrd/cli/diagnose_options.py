"""The options of `asrd diagnose`. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asrd.cli.settings import add_model, at_least, check_decoders, listed, parse_setting
from asrd.files import check_file, check_folder
from asrd.lab.tasks import LEVELS
from asrd.settings import check

ERROR_DECODERS = "standard,wino,asrd; on block-diffusion models native,asrd"
RUNTIME_DECODERS = (
    "standard,threshold,factor,wino,saber,asrd; on block-diffusion models native,threshold,factor,loo,asrd"
)
STABILITY_MODELS = "tiny,tiny-plain,tiny-shift"
KINDS = ("code", "math")  # of annotators' prompts
LONGEST = 6


@dataclass(frozen=True)
class _Diagnosis:
    """A subcommand: its defaults, its sentences, and the options that the others do not have."""

    name: str
    n: int
    batch_size: int | None
    short: str
    long: str
    options: Mapping[str, Mapping[str, Any]]
    takes_prompts: bool = True


_WINDOWS = {"default": "1,2,3,4", "help": "k of the decoders with anchors (default: %(default)s)"}
_DIAGNOSES = (
    _Diagnosis(
        "attention", 16, 8,
        "mean attention between masks, pending tokens and anchors, by layer, with guidance and probe on and off",
        "States of real decodes are given to the model with and without guidance and probe. The model runs in eager"
        " attention; --attn is ignored.",
        {"--every": {"type": int, "default": 1, "help": "compare every N-th step (default: 1)"}},
    ),
    _Diagnosis(
        "errors", 32, 32,
        "error rate, long-span ratio R, contamination of anchors by window",
        "On the packaged task the errors are exact. For a benchmark of your own: --prompts FILE --tasks TASKS.json"
        " writes the texts for an annotator; --annotations FILLED.json reads them annotated.",
        {
            "--decoders": {"help": f"(default: {ERROR_DECODERS})"},
            "--windows": _WINDOWS,
            "--annotations": {"type": Path, "help": "read an annotated file instead of decoding"},
            "--tasks": {"type": Path, "help": "write texts for an annotator to this file"},
            "--eval": {"type": Path, "metavar": "FOLDER", "help": "with --tasks: the texts of an asrd eval, --n each"},
            "--kind": {"choices": KINDS, "default": "math", "help": "kind of annotator's prompt"},
        },
    ),
    _Diagnosis(
        "runtime", 6, None,
        "time of a step by part: embed, forward, LM head, statistics, commit, cache",
        "Every decoder decodes every prompt, one at a time. Run it on an idle machine."
        " --set kv_cache=dual adds a row with the cache for each decoder that supports one.",
        {"--decoders": {"help": f"(default: {RUNTIME_DECODERS})"}},
    ),
    _Diagnosis(
        "visible", 16, 32,
        "is a model suited to revocation? predictions at right and planted wrong visible tokens",
        'A few prompts with answers are enough: --prompts FILE of JSON lines with "prompt" and "answer"; packaged'
        " models use their own problems.",
        {"--draws": {"type": int, "default": 8, "help": "partially masked canvases per prompt (default: 8)"}},
    ),
    _Diagnosis(
        "stability", 24, 24,
        "displacement bounds on real states; how many steps wrong predictions last",
        "On the packaged task, where it is known which predictions are wrong.",
        {
            "--models": {"help": f"names or folders; without --model and --models {STABILITY_MODELS}"},
            "--windows": _WINDOWS,
            "--longest": {"type": int, "default": LONGEST, "help": f"largest number of steps (default: {LONGEST})"},
        },
        takes_prompts=False,
    ),
)  # fmt: skip


def add(commands: Any) -> None:
    """Register the command and its subcommands."""
    top = commands.add_parser(
        "diagnose",
        help="diagnostics: attention, errors, runtime, visible positions, stability",
        description="The paper's diagnostics. Each prints a table and a summary.",
    )
    what = top.add_subparsers(dest="what", metavar="WHAT", required=True)
    for diagnosis in _DIAGNOSES:
        _add(what, diagnosis)


def _add(what: Any, diagnosis: _Diagnosis) -> None:
    command = what.add_parser(diagnosis.name, help=diagnosis.short, description=diagnosis.long)
    command.add_argument("--n", type=int, default=diagnosis.n, help="prompts or problems (default: %(default)s)")
    command.add_argument("--level", choices=LEVELS, help="difficulty (default: the hardest of the model's task)")
    if diagnosis.batch_size is not None:
        command.add_argument("--batch-size", type=int, default=diagnosis.batch_size, help="(default: %(default)s)")
    command.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="a setting of AsrdConfig")
    command.add_argument("--out", type=Path, help="folder for JSON, CSV, Markdown and plots")
    for option, arguments in diagnosis.options.items():
        command.add_argument(option, **arguments)
    if diagnosis.takes_prompts:
        command.add_argument("--prompts", type=Path, help='JSON list or lines with "prompt" and "answer"')
    add_model(command, default=None if "--models" in diagnosis.options else "tiny")
    command.set_defaults(run=f"asrd.cli.diagnose:run_{diagnosis.name}", check=_check)


def _check(arguments: argparse.Namespace) -> None:
    at_least(arguments, n=1, batch_size=1, draws=1, every=1)
    for name, value in (parse_setting(item) for item in arguments.set):
        check(name, value)
        if name in ("decoder", "return_dict_in_generate"):
            raise ValueError(f"--set {name}: set by the diagnosis itself")
    if getattr(arguments, "decoders", None) is not None:
        check_decoders(arguments, listed(arguments.decoders))
    if arguments.model is not None and getattr(arguments, "models", None) is not None:
        raise ValueError("--model and --models: give one of the two")
    if getattr(arguments, "windows", None) is not None:
        windows_of(arguments)
    if getattr(arguments, "annotations", None) is not None and arguments.tasks is not None:
        raise ValueError("--annotations and --tasks: one reads what the other writes; give one of the two")
    if getattr(arguments, "eval", None) is not None and arguments.tasks is None:
        raise ValueError("--eval takes texts for an annotator from an evaluation: give --tasks FILE, too")
    for name in ("prompts", "annotations"):
        path = getattr(arguments, name, None)
        if path is not None and not path.is_file():
            raise ValueError(f"--{name} {path}: there is no such file")
    if getattr(arguments, "tasks", None) is not None:
        check_file(arguments.tasks, "--tasks")
    if arguments.out is not None:
        check_folder(arguments.out, "--out")


def windows_of(arguments: argparse.Namespace) -> list[int]:
    """--windows."""
    try:
        windows = [int(k) for k in arguments.windows.split(",")]
    except ValueError:
        windows = [0]
    if min(windows) < 1:
        raise ValueError(f"--windows {arguments.windows}: expected integers of at least 1, such as 1,2,3,4")
    return windows
