"""`asrd diagnose`: attention, errors, runtime, visible, stability; each prints a table and writes files with --out."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from asrd.cli.settings import add_model, limit_threads, load_model, parse_setting
from asrd.config import check
from asrd.decoders import find_decoder
from asrd.lab.diagnose import errors, reports, runtime
from asrd.lab.diagnose.annotations import INSTRUCTIONS, read_annotations, tasks
from asrd.lab.diagnose.attention import attention_redistribution
from asrd.lab.diagnose.displacement import Displacement, DisplacementWatcher
from asrd.lab.diagnose.persistence import LONGEST, wrong_persistence
from asrd.lab.diagnose.report import Report
from asrd.lab.diagnose.samples import Sample, packaged_samples, read_samples
from asrd.lab.diagnose.visible import visible_behaviour
from asrd.lab.tasks import LEVELS, TASKS, find_task
from asrd.models import packaged
from asrd.models.source import PACKAGED_NAMES


def add(commands: Any) -> None:
    """Register the command and its subcommands."""
    top = commands.add_parser(
        "diagnose",
        help="diagnostics: attention, errors, runtime, visible positions, stability",
        description="The paper's diagnostics. Each prints a table and a summary.",
    )
    what = top.add_subparsers(dest="what", metavar="WHAT", required=True)
    _add_attention(what)
    _add_errors(what)
    _add_runtime(what)
    _add_visible(what)
    _add_stability(what)


def _new(what: Any, name: str, run: Callable[..., Any], n: int, batch: int | None, short: str, long: str) -> Any:
    command = what.add_parser(name, help=short, description=long)
    command.add_argument("--n", type=int, default=n, help=f"prompts or problems (default: {n})")
    command.add_argument("--level", choices=LEVELS, help="difficulty (default: the hardest of the model's task)")
    if batch is not None:
        command.add_argument("--batch-size", type=int, default=batch, help=f"(default: {batch})")
    command.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="a setting of AsrdConfig")
    command.add_argument("--out", type=Path, help="folder for JSON, CSV, Markdown and plots")
    command.set_defaults(run=run)
    return command


def _add_attention(what: Any) -> None:
    command = _new(
        what, "attention", run_attention, 16, 8,
        "mean attention between masks, pending tokens and anchors, by layer, with guidance and probe on and off",
        "States of real decodes are given to the model with and without guidance and probe. The model runs in eager"
        " attention; --attn is ignored.",
    )  # fmt: skip
    command.add_argument("--every", type=int, default=1, help="compare every N-th step (default: 1)")
    _add_prompts(command)
    add_model(command)


def _add_errors(what: Any) -> None:
    command = _new(
        what, "errors", run_errors, 32, 32,
        "error rate, long-span ratio R, contamination of anchors by window",
        "On the packaged task the errors are exact. For a benchmark of your own: --prompts FILE --tasks TASKS.json"
        " writes the texts for an annotator; --annotations FILLED.json reads them annotated.",
    )  # fmt: skip
    command.add_argument("--decoders", default=",".join(errors.DECODERS), help="(default: %(default)s)")
    command.add_argument("--windows", default="1,2,3,4", help="k of the decoders with anchors (default: %(default)s)")
    command.add_argument("--annotations", type=Path, help="read an annotated file instead of decoding")
    command.add_argument("--tasks", type=Path, help="write texts for an annotator to this file")
    command.add_argument("--kind", choices=INSTRUCTIONS, default="math", help="kind of annotator's prompt")
    _add_prompts(command)
    add_model(command)


def _add_runtime(what: Any) -> None:
    command = _new(
        what, "runtime", run_runtime, 6, None,
        "time of a step by part: embed, forward, LM head, statistics, commit, cache",
        "Every decoder decodes every prompt, one at a time. Run it on an idle machine."
        " --set kv_cache=dual adds a row with the cache for each decoder that supports one.",
    )  # fmt: skip
    command.add_argument("--decoders", default=",".join(runtime.DECODERS), help="(default: %(default)s)")
    _add_prompts(command)
    add_model(command)


def _add_visible(what: Any) -> None:
    command = _new(
        what, "visible", run_visible, 16, 32,
        "is a model suited to revocation? predictions at right and planted wrong visible tokens",
        "A few prompts with answers are enough: --prompts FILE of JSON lines with \"prompt\" and \"answer\"; packaged"
        " models use their own problems.",
    )  # fmt: skip
    command.add_argument("--draws", type=int, default=8, help="partially masked canvases per prompt (default: 8)")
    _add_prompts(command)
    add_model(command)


def _add_stability(what: Any) -> None:
    command = _new(
        what, "stability", run_stability, 24, 24,
        "displacement bounds on real states; how many steps wrong predictions last",
        "On the packaged task, where it is known which predictions are wrong.",
    )  # fmt: skip
    here = [name for name in PACKAGED_NAMES if packaged(name) is not None and name != "tiny-sudoku"]
    command.add_argument("--models", default=",".join(here), help="names or folders (default: %(default)s)")
    command.add_argument("--windows", default="1,2,3,4", help="k of the decodes whose wrong anchors are counted")
    command.add_argument("--longest", type=int, default=LONGEST, help=f"largest number of steps (default: {LONGEST})")
    add_model(command)


def _add_prompts(command: argparse.ArgumentParser) -> None:
    command.add_argument("--prompts", type=Path, help='JSON list or lines with "prompt" and "answer"')


def run_attention(arguments: argparse.Namespace) -> None:
    """Attention between roles."""
    settings = _begin(arguments)
    arguments.attn = "eager"  # other implementations do not return attentions
    model, tokenizer = load_model(arguments)
    samples = _samples(arguments, tokenizer)
    found = attention_redistribution(
        model, samples, settings, tokenizer, arguments.batch_size, arguments.every, quiet=not sys.stderr.isatty()
    )
    _finish(arguments, reports.attention_report(found, _about(arguments, settings), _title(arguments, samples)))


def run_errors(arguments: argparse.Namespace) -> None:
    """Errors of finished texts: exact, from annotations, or written out for annotation."""
    settings, quiet = _begin(arguments), not sys.stderr.isatty()
    if arguments.annotations is not None:
        if arguments.tasks is not None:
            raise ValueError("--annotations and --tasks: one reads what the other writes; give one of the two")
        found = errors.annotated_errors(read_annotations(arguments.annotations))
        _finish(arguments, reports.errors_report(found, _about(arguments, settings), arguments.annotations.name))
        return
    decoders, windows = _decoders(arguments), _windows(arguments)
    model, tokenizer = load_model(arguments)
    samples = _samples(arguments, tokenizer)
    if arguments.tasks is not None:
        texts = errors.tasks_of(model, samples, tokenizer, decoders, windows, settings, arguments.batch_size, quiet)
        content = tasks(arguments.kind, _about(arguments, settings), texts)
        arguments.tasks.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{len(texts)} texts for an annotator are in {arguments.tasks}; then: --annotations {arguments.tasks}")
        return
    problems = [sample.problem for sample in samples if sample.problem is not None]
    if len(problems) != len(samples):
        raise ValueError(
            "--prompts without --tasks: wrong tokens are known for the packaged problems only; write texts for an"
            " annotator with --tasks FILE, then read them with --annotations FILE"
        )
    found = errors.packaged_errors(model, problems, decoders, windows, settings, arguments.batch_size, quiet)
    _finish(arguments, reports.errors_report(found, _about(arguments, settings), _title(arguments, samples)))


def run_runtime(arguments: argparse.Namespace) -> None:
    """Time of a step by part."""
    settings, decoders = _begin(arguments), _decoders(arguments)
    model, tokenizer = load_model(arguments)
    samples = _samples(arguments, tokenizer)
    found = runtime.runtime_breakdown(model, samples, decoders, settings, tokenizer, quiet=not sys.stderr.isatty())
    _finish(arguments, reports.runtime_report(found, _about(arguments, settings), _title(arguments, samples)))


def run_visible(arguments: argparse.Namespace) -> None:
    """Predictions at right and planted wrong visible tokens."""
    settings = _begin(arguments)
    model, tokenizer = load_model(arguments)
    samples = _samples(arguments, tokenizer, need_answers=True)
    found = visible_behaviour(
        model, samples, settings, tokenizer, arguments.draws, arguments.batch_size, quiet=not sys.stderr.isatty()
    )
    _finish(arguments, reports.visible_report(found, _about(arguments, settings), _title(arguments, samples)))


def run_stability(arguments: argparse.Namespace) -> None:
    """Displacement bounds and persistence of wrong predictions, model by model."""
    settings, quiet = _begin(arguments), not sys.stderr.isatty()
    windows = _windows(arguments)
    arguments.level = TASKS[0].level(arguments.level)
    samples = packaged_samples(arguments.n, arguments.level)
    problems = [sample.problem for sample in samples if sample.problem is not None]
    moved: dict[str, tuple[Displacement, Displacement]] = {}
    lasting, contaminated = {}, {}
    names = arguments.models.split(",")
    for name in names:
        arguments.model = name
        model, tokenizer = load_model(arguments)
        if find_task(tokenizer) is not TASKS[0]:
            raise ValueError(
                f"--models {name}: expected a model of the packaged word problems, for which wrong tokens are known"
            )
        watchers: list[DisplacementWatcher] = []

        def watch(context: Any, watchers: list[DisplacementWatcher] = watchers) -> list[DisplacementWatcher]:
            watchers.append(DisplacementWatcher(context))
            return watchers[-1:]

        lasting[name] = wrong_persistence(
            model, samples, settings, tokenizer, arguments.longest, arguments.batch_size, quiet, watch
        )
        moved[name] = (
            Displacement.joined([watcher.guidance for watcher in watchers]),
            Displacement.joined([watcher.probe for watcher in watchers]),
        )
        contaminated[name] = errors.packaged_errors(
            model, problems, ("asrd",), windows, settings, arguments.batch_size, quiet
        )
    about = _about(arguments, settings) | {"model": names}
    title = f"{', '.join(names)}, {arguments.n} {arguments.level} problems"
    _finish(arguments, reports.stability_report(moved, lasting, contaminated, about, title))


def _begin(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check the arguments before a model is loaded; returns the settings."""
    for name in ("n", "batch_size", "draws", "every"):
        if getattr(arguments, name, 1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: expected at least 1")
    settings = dict(parse_setting(item) for item in arguments.set)
    for name, value in settings.items():
        check(name, value)
    for name in ("decoder", "return_dict_in_generate"):
        if name in settings:
            raise ValueError(f"--set {name}: set by the diagnosis itself")
    limit_threads()
    return settings


def _samples(arguments: argparse.Namespace, tokenizer: Any, need_answers: bool = False) -> list[Sample]:
    if arguments.prompts is not None:
        return read_samples(arguments.prompts, tokenizer, need_answers, arguments.n)
    task = find_task(tokenizer)
    if task is None:
        raise ValueError(
            f"--model {arguments.model}: the packaged problems do not fit its tokenizer; give --prompts FILE,"
            ' a JSON list or JSON lines with "prompt" and "answer"'
        )
    arguments.level = task.level(arguments.level)
    return packaged_samples(arguments.n, arguments.level, task)


def _decoders(arguments: argparse.Namespace) -> list[str]:
    names = [name.strip() for name in arguments.decoders.split(",")]
    for name in names:
        find_decoder(name)
    return names


def _windows(arguments: argparse.Namespace) -> list[int]:
    try:
        windows = [int(k) for k in arguments.windows.split(",")]
    except ValueError:
        windows = [0]
    if min(windows) < 1:
        raise ValueError(f"--windows {arguments.windows}: expected integers of at least 1, such as 1,2,3,4")
    return windows


def _title(arguments: argparse.Namespace, samples: list[Sample]) -> str:
    which = f"prompts of {arguments.prompts.name}" if arguments.prompts is not None else f"{arguments.level} problems"
    return f"{arguments.model}, {len(samples)} {which}"


def _about(arguments: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    about = {"command": shlex.join(["asrd", *sys.argv[1:]]), "model": arguments.model, "settings": settings}
    return about | {"threads": torch.get_num_threads(), "torch": torch.__version__}


def _finish(arguments: argparse.Namespace, report: Report) -> None:
    report.show()
    if arguments.out is not None:
        files = report.save(arguments.out)
        print(f"{', '.join(file.name for file in files)} are in {arguments.out}")
