"""Options that several commands share: which model, and the settings of `AsrdConfig` by name."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from asrd.config import ALIASES, FIELDS, check
from asrd.decoders import find_decoder
from asrd.models import load

_COMMON = {
    "max_new_tokens": int,
    "block_length": int,
    "threshold": float,
    "temperature": float,
    "seed": int,
    "decoder": str,
}


def add_model(command: argparse.ArgumentParser) -> None:
    """--model, --dtype, --device, --attn."""
    group = command.add_argument_group("model")
    group.add_argument(
        "--model", default="tiny", help="folder, Hub id, or a packaged model such as tiny (default: tiny)"
    )
    group.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, float16, float64")
    group.add_argument("--device", default=None, help="device map, such as cpu, cuda, cuda:1 or auto")
    group.add_argument("--attn", default="auto", help="attention: auto, sdpa, eager, flash_attention_2")
    group.add_argument("--trust-remote-code", action="store_true", help="run the checkpoint's own code if it needs it")


def load_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `asrd.load` is given besides the model."""
    return {
        "dtype": arguments.dtype,
        "device_map": arguments.device,
        "attn_implementation": arguments.attn,
        "trust_remote_code": arguments.trust_remote_code,
    }


def load_model(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer of the command line."""
    if not sys.stderr.isatty():
        disable_progress_bar()
    try:
        return load(arguments.model, **load_arguments(arguments))
    except (RuntimeError, AssertionError) as error:  # what torch raises for a device that does not exist
        raise ValueError(f"{arguments.model} cannot be loaded with --device {arguments.device}: {error}") from error


def limit_threads() -> None:
    """Use half of the processors: small models gain nothing from more, and lose much if one of them is busy."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))


def add_settings(command: argparse.ArgumentParser) -> None:
    """The common settings by name, and --set for all of them."""
    group = command.add_argument_group("decoding")
    for name, kind in _COMMON.items():
        field = FIELDS[name]
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, default=None, help=f"{field.expects} (default: {field.default})")
    group.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any other setting of AsrdConfig, such as --set alpha=0.2 --set scope=sequence; may be repeated",
    )


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings given on the command line, checked."""
    settings = {name: getattr(arguments, name) for name in _COMMON if getattr(arguments, name) is not None}
    for item in arguments.set:
        key, value = parse_setting(item)
        settings[key] = value
    for name, value in settings.items():
        check(name, value)
    find_decoder(settings.get("decoder", "asrd"))
    return settings


def parse_setting(item: str) -> tuple[str, Any]:
    """KEY=VALUE with VALUE as JSON where it is JSON (numbers, true, null, lists), else as text."""
    key, equals, text = item.partition("=")
    key = ALIASES.get(key.strip().replace("-", "_"), key.strip().replace("-", "_"))
    if not equals or key not in FIELDS:
        known = ", ".join(sorted(FIELDS))
        raise ValueError(f"--set {item}: expected KEY=VALUE with KEY one of {known}")
    return key, parse_value(text)


def parse_value(text: str) -> Any:
    """A value of the command line."""
    lowered = {"true": True, "false": False, "none": None}.get(text.strip().lower(), ...)
    if lowered is not ...:
        return lowered
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text.strip()
