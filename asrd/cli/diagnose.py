"""`asrd diagnose`: attention, errors, runtime, visible, stability; each prints a table and writes files with --out."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch

from asrd.cli.diagnose_options import STABILITY_MODELS, windows_of
from asrd.cli.loading import limit_threads, load_model, load_plugins, require_packaged_task
from asrd.cli.settings import listed, parse_setting
from asrd.decoders import find_decoder
from asrd.files import write_text
from asrd.lab.diagnose import errors, reports, runtime
from asrd.lab.diagnose.annotations import read_annotations, tasks
from asrd.lab.diagnose.attention import attention_redistribution
from asrd.lab.diagnose.context import with_plain_drafts
from asrd.lab.diagnose.displacement import Displacement, DisplacementWatcher
from asrd.lab.diagnose.persistence import wrong_persistence
from asrd.lab.diagnose.report import Report
from asrd.lab.diagnose.samples import Sample, packaged_samples, read_samples
from asrd.lab.diagnose.visible import visible_behaviour
from asrd.lab.tables import counted
from asrd.lab.tasks import TASKS, find_task


def run_attention(arguments: argparse.Namespace) -> None:
    """Attention between roles."""
    settings = _begin(arguments)
    arguments.attn = "eager"  # other implementations do not return attentions
    model, tokenizer = load_model(arguments)
    samples = _samples(arguments, tokenizer)
    found = attention_redistribution(
        model, samples, settings, tokenizer, arguments.batch_size, arguments.every, quiet=False
    )
    _finish(arguments, reports.attention_report(found, _about(arguments, settings), _title(arguments, samples)))


def run_errors(arguments: argparse.Namespace) -> None:
    """Errors of finished texts: exact, from annotations, or written out for annotation."""
    settings = _begin(arguments)
    if arguments.annotations is not None:
        found = errors.annotated_errors(read_annotations(arguments.annotations))
        _finish(arguments, reports.errors_report(found, _about(arguments, settings), arguments.annotations.name))
        return
    if arguments.eval is not None:
        from asrd.eval.annotation import annotation_samples

        _write_tasks(arguments, settings, annotation_samples(arguments.eval, arguments.kind, arguments.n))
        return
    windows = windows_of(arguments)
    model, tokenizer = load_model(arguments)
    decoders = _decoders(arguments, model, errors.DECODERS, errors.BLOCK_DECODERS)
    samples = _samples(arguments, tokenizer)
    if arguments.tasks is not None:
        texts = errors.tasks_of(
            model, samples, tokenizer, decoders, windows, settings, arguments.batch_size, quiet=False
        )
        _write_tasks(arguments, settings, texts)
        return
    problems = [sample.problem for sample in samples if sample.problem is not None]
    if len(problems) != len(samples):
        raise ValueError(
            "--prompts without --tasks: wrong tokens are known for the packaged problems only; write texts for an"
            " annotator with --tasks FILE, then read them with --annotations FILE"
        )
    found = errors.packaged_errors(model, problems, decoders, windows, settings, arguments.batch_size, quiet=False)
    _finish(arguments, reports.errors_report(found, _about(arguments, settings), _title(arguments, samples)))


def _write_tasks(arguments: argparse.Namespace, settings: dict[str, Any], texts: list[dict[str, Any]]) -> None:
    content = tasks(arguments.kind, _about(arguments, settings), texts)
    write_text(arguments.tasks, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(texts)} texts for an annotator are in {arguments.tasks}; then: --annotations {arguments.tasks}")


def run_runtime(arguments: argparse.Namespace) -> None:
    """Time of a step by part."""
    settings = _begin(arguments)
    model, tokenizer = load_model(arguments)
    decoders = _decoders(arguments, model, runtime.DECODERS, runtime.BLOCK_DECODERS)
    samples = _samples(arguments, tokenizer)
    found = runtime.runtime_breakdown(model, samples, decoders, settings, tokenizer, quiet=False)
    _finish(arguments, reports.runtime_report(found, _about(arguments, settings), _title(arguments, samples)))


def run_visible(arguments: argparse.Namespace) -> None:
    """Predictions at right and planted wrong visible tokens."""
    settings = _begin(arguments)
    model, tokenizer = load_model(arguments)
    samples = _samples(arguments, tokenizer, need_answers=True)
    found = visible_behaviour(model, samples, settings, tokenizer, arguments.draws, arguments.batch_size, quiet=False)
    _finish(arguments, reports.visible_report(found, _about(arguments, settings), _title(arguments, samples)))


def run_stability(arguments: argparse.Namespace) -> None:
    """Displacement bounds and persistence of wrong predictions, model by model."""
    settings = _begin(arguments)
    windows = windows_of(arguments)
    arguments.level = TASKS[0].level(arguments.level)
    samples = packaged_samples(arguments.n, arguments.level)
    problems = [sample.problem for sample in samples if sample.problem is not None]
    moved: dict[str, tuple[Displacement, Displacement]] = {}
    lasting, contaminated = {}, {}
    names = listed(arguments.models or arguments.model or STABILITY_MODELS)
    for name in names:
        arguments.model = name
        model, tokenizer = load_model(arguments)
        if find_task(tokenizer) is not TASKS[0]:
            raise ValueError(
                f"--models {name}: expected a model of the packaged task, for which wrong tokens are known"
            )
        watchers: list[DisplacementWatcher] = []

        def watch(context: Any, watchers: list[DisplacementWatcher] = watchers) -> list[DisplacementWatcher]:
            watchers.append(DisplacementWatcher(context))
            return watchers[-1:]

        lasting[name] = wrong_persistence(
            model, samples, settings, tokenizer, arguments.longest, arguments.batch_size, False, watch
        )
        moved[name] = (
            Displacement.joined([watcher.guidance for watcher in watchers]),
            Displacement.joined([watcher.probe for watcher in watchers]),
        )
        contaminated[name] = errors.packaged_errors(
            model, problems, ("asrd",), windows, with_plain_drafts(model, settings), arguments.batch_size, quiet=False
        )
    about = _about(arguments, settings) | {"model": names}
    title = f"{', '.join(names)}, {counted(arguments.n, f'{arguments.level} problem')}"
    _finish(arguments, reports.stability_report(moved, lasting, contaminated, about, title))


def _begin(arguments: argparse.Namespace) -> dict[str, Any]:
    """What comes before a model is loaded; returns the settings."""
    load_plugins(arguments.plugin)
    limit_threads()
    return dict(parse_setting(item) for item in arguments.set)


def _samples(arguments: argparse.Namespace, tokenizer: Any, need_answers: bool = False) -> list[Sample]:
    if arguments.prompts is not None:
        return read_samples(arguments.prompts, tokenizer, need_answers, arguments.n)
    task = require_packaged_task(
        arguments, tokenizer, 'give --prompts FILE, a JSON list or JSON lines with "prompt" and "answer"'
    )
    return packaged_samples(arguments.n, arguments.level, task)


def _decoders(arguments: argparse.Namespace, model: Any, usual: Sequence[str], on_blocks: Sequence[str]) -> list[str]:
    if arguments.decoders is None:
        return list(usual if getattr(model.config, "asrd_block_length", None) is None else on_blocks)
    names = listed(arguments.decoders)
    for name in names:
        find_decoder(name)
    return names


def _title(arguments: argparse.Namespace, samples: list[Sample]) -> str:
    if arguments.prompts is not None:
        return f"{arguments.model}, {counted(len(samples), 'prompt')} of {arguments.prompts.name}"
    return f"{arguments.model}, {counted(len(samples), f'{arguments.level} problem')}"


def _about(arguments: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    about = {"command": shlex.join(["asrd", *sys.argv[1:]]), "model": arguments.model, "settings": settings}
    return about | {"threads": torch.get_num_threads(), "torch": torch.__version__}


def _finish(arguments: argparse.Namespace, report: Report) -> None:
    report.show()
    if arguments.out is not None:
        files = report.save(arguments.out)
        print(f"{', '.join(file.name for file in files)} are in {arguments.out}")
