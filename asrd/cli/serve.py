"""`asrd serve`: an OpenAI-compatible server with a live page, on this machine or on Ray."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

from asrd.cli.settings import add_model, add_settings, load_arguments, settings_of
from asrd.config import check

LIMITS = {  # option: field of Limits, type, default, help
    "--max-body": ("body", int, 1 << 20, "bytes of a request"),
    "--max-prompt-tokens": ("prompt_tokens", int, None, "tokens of a prompt; default: what the context leaves"),
    "--max-tokens": ("max_tokens", int, 4096, "max_tokens that a request may ask for"),
    "--max-choices": ("choices", int, 16, "choices of a request, prompts times n"),
    "--waiting": ("waiting", int, 64, "requests that may wait for a slot; more are answered with 429"),
    "--timeout": ("seconds", float, 300.0, "seconds from a request to the end of its answer"),
    "--grace": ("grace", float, 30.0, "seconds that running answers have after a signal to stop"),
}


def add(commands: Any) -> None:
    """Register the command."""
    command = commands.add_parser(
        "serve",
        help="answer OpenAI's chat and completion requests over HTTP",
        description="An OpenAI-compatible server with a live page at /. Needs: pip install 'asrd[serve]'.",
        epilog="examples: asrd serve --model tiny; ASRD_API_KEY=... asrd serve --model DIR --host 0.0.0.0",
    )
    command.add_argument("--host", default="127.0.0.1", help="address to bind to (default: 127.0.0.1)")
    command.add_argument("--port", type=int, default=8000, help="(default: 8000)")
    command.add_argument(
        "--name", default=None, help="the model's name for clients (default: the last part of --model)"
    )
    command.add_argument("--slots", type=int, default=16, help="answers that decode at a time (default: 16)")
    command.add_argument("--kv-cache", choices=["prefix", "dual"], default=None, help="KV cache of all requests")
    add_model(command)
    add_settings(command)
    ray = command.add_argument_group("Ray")
    ray.add_argument(
        "--ray",
        nargs="?",
        const="local",
        default=None,
        metavar="ADDRESS",
        help="serve on Ray: a cluster's address, or nothing to start one here",
    )
    ray.add_argument("--replicas", type=int, default=1, help="engines (default: 1)")
    ray.add_argument("--max-replicas", type=int, default=None, help="let Ray add replicas up to this number under load")
    ray.add_argument("--cpus", type=float, default=1.0, help="processors of a replica (default: 1)")
    ray.add_argument("--gpus", type=float, default=0.0, help="GPUs of a replica (default: 0)")
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
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Serve until interrupted."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ValueError("asrd serve needs FastAPI and uvicorn: pip install 'asrd[serve]'") from None
    from asrd.serve.plan import Plan
    from asrd.serve.run import check_binding, make_server

    key = api_key(arguments)
    check_binding(arguments.host, key, arguments.allow_anonymous)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    plan = Plan(
        model=arguments.model,
        name=served_name(arguments),
        load=load_arguments(arguments),
        slots=arguments.slots,
        limits=limits_of(arguments),
        settings=settings_of_server(arguments),
        api_key=key,
        anyone=arguments.allow_anonymous,
        log_prompts=arguments.log_prompts,
        page=not arguments.no_page,
    )
    if arguments.ray is not None:
        serve_on_ray(arguments, plan)
        return
    service, app = plan.make()
    make_server(app, service, arguments.host, arguments.port).run()


def serve_on_ray(arguments: argparse.Namespace, plan: Any) -> None:
    """The same app as replicas on a cluster."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise ValueError("--ray needs Ray: pip install 'asrd[ray]'") from None
    from asrd.serve.ray_serve import connect, deploy, wait_for_signal

    most = max(arguments.replicas, arguments.max_replicas or 0)
    connect(arguments.ray, cpus=max(os.cpu_count() or 1, int(most * arguments.cpus) + 1))
    deploy(
        plan,
        arguments.replicas,
        arguments.max_replicas,
        arguments.host,
        arguments.port,
        arguments.cpus,
        arguments.gpus,
    )
    print(f"{plan.name} is served at http://{arguments.host}:{arguments.port}", flush=True)
    wait_for_signal()


def api_key(arguments: argparse.Namespace) -> str | None:
    """The key of file, option or environment."""
    if arguments.api_key_file is not None:
        key = arguments.api_key_file.read_text(encoding="utf-8").strip()
        if not key:
            raise ValueError(f"--api-key-file {arguments.api_key_file} is empty")
        return str(key)
    return arguments.api_key or os.environ.get("ASRD_API_KEY") or None


def limits_of(arguments: argparse.Namespace) -> Any:
    """The limits of the command line."""
    from asrd.serve.limits import Limits

    given = {field: getattr(arguments, option[2:].replace("-", "_")) for option, (field, *_) in LIMITS.items()}
    return Limits(**given)


def settings_of_server(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of the engine."""
    settings = settings_of(arguments)
    if arguments.kv_cache is not None:
        check("kv_cache", arguments.kv_cache)
        settings["kv_cache"] = arguments.kv_cache
    return settings


def served_name(arguments: argparse.Namespace) -> str:
    """What clients call the model."""
    return arguments.name or Path(arguments.model).name or arguments.model
