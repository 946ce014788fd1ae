"""Options that several commands share, and settings by name. Imports nothing heavy: a wrong value is said at once."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from asrd.settings import ALIASES, FIELDS, check, did_you_mean

DECODER_NAMES = ("asrd", "standard", "threshold", "factor", "wino", "saber", "loo", "native", "random-revocation")
_COMMON = {
    "max_new_tokens": int,
    "block_length": int,
    "threshold": float,
    "temperature": float,
    "seed": int,
    "decoder": str,
}


def add_model(command: argparse.ArgumentParser, default: str | None = "tiny") -> None:
    """--model, --dtype, --device, --attn, --plugin."""
    group = command.add_argument_group("model")
    usual = "" if default is None else f" (default: {default})"
    group.add_argument("--model", default=default, help=f"folder, Hub id, or a packaged model such as tiny{usual}")
    group.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, float16, float64")
    group.add_argument("--device", default=None, help="device map, such as cpu, cuda, cuda:1 or auto")
    group.add_argument("--attn", default="auto", help="attention: auto, sdpa, eager, flash_attention_2")
    group.add_argument("--trust-remote-code", action="store_true", help="run the checkpoint's own code if it needs it")
    group.add_argument(
        "--plugin", metavar="FILE", type=Path, action="append", default=[],
        help='a Python file that registers decoders: asrd.decoders.DECODERS["name"] = YourDecoder; may be repeated',
    )  # fmt: skip


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
        if settings.get(key, value) != value:
            raise ValueError(f"--set {item}: {key} is also given as {settings[key]!r}; give it once")
        settings[key] = value
    for name, value in settings.items():
        check(name, value)
    if "decoder" in settings:
        check_decoders(arguments, [settings["decoder"]])
    return settings


def check_decoders(arguments: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise ValueError for a decoder that there cannot be; those of plugins are known when these have been run."""
    if arguments.plugin:
        return
    registered = getattr(sys.modules.get("asrd.decoders"), "DECODERS", DECODER_NAMES)  # by the program that calls this
    known = [*registered, *(entry.name for entry in metadata.entry_points(group="asrd.decoders"))]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"decoder={unknown[0]!r} is unknown: expected one of {', '.join(map(repr, known))}, or one of your own"
            " with --plugin FILE"
        )


def listed(text: str) -> list[str]:
    """A,B,C."""
    return [name.strip() for name in text.split(",")]


def parse_setting(item: str) -> tuple[str, Any]:
    """KEY=VALUE with VALUE as JSON where it is JSON (numbers, true, null, lists), else as text."""
    key, equals, text = item.partition("=")
    key = ALIASES.get(key.strip().replace("-", "_"), key.strip().replace("-", "_"))
    if not equals:
        raise ValueError(f"--set {item}: expected KEY=VALUE, such as threshold=0.5")
    if key not in FIELDS:
        raise ValueError(f"--set {item}: expected KEY=VALUE with a setting as KEY{did_you_mean(key)}")
    return key, parse_value(text)


def parse_sweep(item: str) -> tuple[str, list[Any]]:
    """KEY=A,B,C."""
    key, equals, text = item.partition("=")
    key = ALIASES.get(key.strip().replace("-", "_"), key.strip().replace("-", "_"))
    if not equals or not text:
        raise ValueError(f"--sweep {item}: expected KEY=A,B,C, such as threshold=0.5,0.7,0.9")
    if key not in FIELDS:
        raise ValueError(f"--sweep {item}: expected KEY=A,B,C with a setting as KEY{did_you_mean(key)}")
    if key in ("decoder", "return_dict_in_generate"):
        raise ValueError(f"--sweep {item}: set by the comparison itself (--decoders)")
    return key, [parse_value(value) for value in text.split(",")]


def parse_value(text: str) -> Any:
    """A value of the command line."""
    lowered = {"true": True, "false": False, "none": None}.get(text.strip().lower(), ...)
    if lowered is not ...:
        return lowered
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text.strip()


def at_least(arguments: argparse.Namespace, **lowest: int) -> None:
    """Raise ValueError if one of these options is given and lower."""
    for name, low in lowest.items():
        value = getattr(arguments, name, None)
        if value is not None and value < low:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least {low}")
