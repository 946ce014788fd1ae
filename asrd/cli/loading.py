"""What a command needs before it decodes: decoders of plugins, the model, and a task that fits its tokenizer."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from asrd.decoders import DECODERS
from asrd.lab.tasks import Problem, Task, find_task
from asrd.memory import keep_freed_memory
from asrd.models import load
from asrd.models.source import PACKAGED_NAMES, read_json, resolve


def load_plugins(files: list[Path]) -> None:
    """Run Python files, each of which registers at least one decoder."""
    for number, file in enumerate(files):
        before = dict(DECODERS)
        name = f"asrd_plugin_{number}_{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None or not file.is_file():
            raise ValueError(f"--plugin {file}: expected a Python file, whose name ends in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where the source of its classes is looked for
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
            line = f", line {lines[-1]}" if lines else ""
            raise ValueError(f"--plugin {file}{line}: {type(error).__name__}: {error}") from error
        if before == DECODERS:
            raise ValueError(
                f'--plugin {file} registers no decoder: it needs a line asrd.decoders.DECODERS["name"] = YourDecoder'
            )


def load_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `asrd.load` is given besides the model."""
    return {
        "dtype": arguments.dtype,
        "device_map": arguments.device,
        "attn_implementation": arguments.attn,
        "trust_remote_code": arguments.trust_remote_code,
    }


def model_for_others(model: str, here: bool) -> str:
    """--model for processes that run elsewhere: a folder by its whole path. here: they see the files that this one
    sees, so that a model that is not there is said at once."""
    if here:
        read_json(resolve(model), "config.json", {}, required=True)
    path = Path(model).expanduser()
    return str(path.resolve()) if model not in PACKAGED_NAMES and path.is_dir() else model


def load_model(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer of the command line."""
    if not sys.stderr.isatty() or arguments.model in PACKAGED_NAMES:
        disable_progress_bar()
    keep_freed_memory()
    try:
        return load(arguments.model, **load_arguments(arguments))
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device that does not exist
        raise ValueError(f"{arguments.model} cannot be loaded with --device {arguments.device}: {error}") from error


def require_tokenizer(arguments: argparse.Namespace, tokenizer: Any) -> None:
    """Raise ValueError if the model has none."""
    if tokenizer is None:
        raise ValueError(f"{arguments.model} has no tokenizer, so text cannot be turned into ids; use it from Python")


def require_packaged_task(arguments: argparse.Namespace, tokenizer: Any, instead: str) -> Task:
    """The packaged task in the words of this tokenizer, else ValueError. Sets the level if none is given."""
    task = find_task(tokenizer)
    if task is None:
        raise ValueError(f"--model {arguments.model}: the packaged problems do not fit its tokenizer; {instead}")
    arguments.level = task.level(getattr(arguments, "level", None))
    return task


def problem_number(task: Task, number: int, level: str) -> Problem:
    """One of the problems of a demo."""
    return next(itertools.islice(task.shown(level, 0), number, None))


def limit_threads() -> None:
    """Use half of the processors: small models gain nothing from more, and lose much if one of them is busy."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
