"""The options of `asrd serve` and `asrd batch`, and what is wrong with them. Imports nothing heavy."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from asrd.cli.settings import add_model, add_settings, at_least, settings_of
from asrd.files import check_folder, read_text

LIMITS = {  # option: field of Limits, type, default, help
    "--max-body": ("body", int, 1 << 20, "bytes of a request"),
    "--max-prompt-tokens": ("prompt_tokens", int, None, "tokens of a prompt; default: what the context leaves"),
    "--max-tokens": ("max_tokens", int, 4096, "max_tokens that a request may ask for"),
    "--max-choices": ("choices", int, 16, "choices of a request, prompts times n"),
    "--waiting": ("waiting", int, 64, "requests that may wait for a slot; more are answered with 429"),
    "--timeout": ("seconds", float, 300.0, "seconds from a request to the end of its answer"),
    "--grace": ("grace", float, 30.0, "seconds that running answers have after a signal to stop"),
}


def add_serve(commands: Any) -> None:
    """Register `asrd serve`."""
    command = commands.add_parser(
        "serve",
        help="answer OpenAI's chat and completion requests over HTTP",
        description="An OpenAI-compatible server with a live page at /. Needs: pip install 'asrd[serve]'.",
        epilog="examples: asrd serve --model tiny; ASRD_API_KEY=... asrd serve --model DIR --host 0.0.0.0",
    )
    command.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help="the same as --model")
    command.add_argument("--host", default="127.0.0.1", help="address to bind to (default: 127.0.0.1)")
    command.add_argument("--port", type=int, default=8000, help="(default: 8000)")
    command.add_argument(
        "--name", "--served-model-name", help="the model's name for clients (default: --model, of a folder its name)"
    )
    command.add_argument("--slots", type=int, default=16, help="answers that decode at a time (default: 16)")
    command.add_argument("--kv-cache", choices=["prefix", "dual"], default=None, help="KV cache of all requests")
    add_model(command)
    add_settings(command)
    ray = command.add_argument_group("Ray")
    ray.add_argument(
        "--ray", nargs="?", const="local", metavar="ADDRESS", help="serve on Ray: a cluster's address, or one made here"
    )
    ray.add_argument("--replicas", type=int, default=1, help="engines (default: 1)")
    ray.add_argument("--max-replicas", type=int, default=None, help="let Ray add replicas up to this number under load")
    _add_resources(ray, "a replica")
    _add_safety(command)
    command.set_defaults(run="asrd.cli.serve:run", check=_check_serve)


def _add_safety(command: argparse.ArgumentParser) -> None:
    safety = command.add_argument_group("safety")
    safety.add_argument("--api-key", default=None, help="key that clients must send; ASRD_API_KEY keeps it out of ps")
    safety.add_argument("--api-key-file", type=Path, default=None, help="file with the key")
    safety.add_argument(
        "--allow-anonymous", action="store_true", help="serve other machines, or other host names, without a key"
    )
    safety.add_argument("--log-prompts", action="store_true", help="log prompts (they are not, by default)")
    safety.add_argument("--no-page", action="store_true", help="no live page at /")
    for option, (_, kind, default, about) in LIMITS.items():
        shown = "" if default is None else f" (default: {default:g})"
        safety.add_argument(option, type=kind, default=default, help=about + shown)


def _add_resources(group: Any, whose: str) -> None:
    group.add_argument("--cpus", type=float, default=1.0, help=f"processors of {whose} (default: 1)")
    group.add_argument("--gpus", type=float, default=0.0, help=f"GPUs of {whose} (default: 0)")


def _check_serve(arguments: argparse.Namespace) -> None:
    settings_of_server(arguments)
    at_least(arguments, slots=1, replicas=1, max_replicas=1, port=1, cpus=0, gpus=0)
    at_least(arguments, max_body=1, max_prompt_tokens=1, max_tokens=1, max_choices=1, waiting=0, grace=0)
    if arguments.port > 65535:
        raise ValueError(f"--port {arguments.port}: expected at most 65535")
    if arguments.timeout <= 0:
        raise ValueError(f"--timeout {arguments.timeout:g}: expected more than 0")
    if arguments.ray is None and (arguments.replicas != 1 or arguments.max_replicas is not None):
        raise ValueError("--replicas and --max-replicas are for --ray")
    if arguments.ray is not None and arguments.plugin:
        raise ValueError("--plugin and --ray: install the decoder on the cluster instead (entry point asrd.decoders)")
    check_binding(arguments.host, api_key(arguments), arguments.allow_anonymous)


def check_binding(host: str, key: str | None, anonymous: bool) -> None:
    """Raise ValueError if the server would be open to others without a key, and nobody said so."""
    if key is not None and len(key) < 8:
        raise ValueError("the API key has less than 8 characters: take a longer one")
    if key is None and not anonymous and not is_loopback(host):
        raise ValueError(
            f"--host {host} is open to others: give an API key (--api-key-file or ASRD_API_KEY), or say"
            " --allow-anonymous"
        )


def is_loopback(host: str) -> bool:
    """Does an address to bind to belong to this machine alone?"""
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def api_key(arguments: argparse.Namespace) -> str | None:
    """The key of file, option or environment."""
    if arguments.api_key_file is None:
        return arguments.api_key or os.environ.get("ASRD_API_KEY") or None
    key = read_text(arguments.api_key_file).strip()
    if not key:
        raise ValueError(f"--api-key-file {arguments.api_key_file} is empty")
    return key


def settings_of_server(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of the engine."""
    settings = settings_of(arguments)
    return settings | ({} if arguments.kv_cache is None else {"kv_cache": arguments.kv_cache})


def add_batch(commands: Any) -> None:
    """Register `asrd batch`."""
    command = commands.add_parser(
        "batch",
        help="decode a file of prompts on a Ray cluster",
        description="Decode every prompt of a file with Ray Data workers. Needs: pip install 'asrd[ray]'."
        " DIR/results.jsonl gets each result as soon as it is there; the same command goes on after an interruption,"
        " and in the end the file is in the order of the prompts.",
        epilog="example: asrd batch prompts.jsonl --out DIR --ray local --workers 2",
    )
    command.add_argument("file", type=Path, help="a prompt per line; in .jsonl a string, or an object with settings")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of results.jsonl")
    command.add_argument("--ray", default="local", metavar="ADDRESS", help="cluster, or local to start one (default)")
    command.add_argument("--workers", type=int, default=1, help="each has the model and an engine (default: 1)")
    command.add_argument("--slots", type=int, default=16, help="prompts that a worker decodes at a time (default: 16)")
    command.add_argument("--batch", type=int, default=64, help="prompts handed to a worker at a time (default: 64)")
    command.add_argument("--raw", action="store_true", help="do not apply the tokenizer's chat template")
    _add_resources(command, "a worker")
    add_model(command)
    add_settings(command)
    command.set_defaults(run="asrd.cli.batch:run", check=_check_batch)


def _check_batch(arguments: argparse.Namespace) -> None:
    settings_of(arguments)
    at_least(arguments, workers=1, slots=1, batch=1, cpus=0, gpus=0)
    if not arguments.file.is_file():
        raise ValueError(f"{arguments.file}: there is no such file")
    if arguments.plugin:
        raise ValueError("--plugin: install the decoder on the cluster instead (entry point asrd.decoders)")
    check_folder(arguments.out, "--out")
