"""`asrd serve`: an OpenAI-compatible server with a live page, on this machine or on Ray."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

from asrd.cli.loading import load_arguments, load_plugins, model_for_others
from asrd.cli.serve_options import LIMITS, api_key, settings_of_server
from asrd.serve.limits import Limits
from asrd.serve.plan import Plan


def run(arguments: argparse.Namespace) -> None:
    """Serve until interrupted."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise ValueError("asrd serve needs FastAPI and uvicorn: pip install 'asrd[serve]'") from None
    from asrd.serve.run import make_server

    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    load_plugins(arguments.plugin)
    plan = plan_of(arguments)
    if arguments.ray in (None, "local"):
        check_port(arguments.host, arguments.port)
    if arguments.ray is not None:
        serve_on_ray(arguments, plan)
        return
    service, app = plan.make()
    server = make_server(app, service, arguments.host, arguments.port)
    server.run()
    if server.engine_failed:
        sys.exit(1)


def check_port(host: str, port: int) -> None:
    """Raise ValueError if the address is taken or not of this machine, before a model is loaded in vain."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ValueError(f"--host {host} --port {port} cannot be used: {error.strerror or error}") from None


def plan_of(arguments: argparse.Namespace) -> Plan:
    """What the command line says."""
    limits = {field: getattr(arguments, option[2:].replace("-", "_")) for option, (field, *_) in LIMITS.items()}
    return Plan(
        model=arguments.model,
        name=arguments.name or served_name(arguments.model),
        load=load_arguments(arguments),
        slots=arguments.slots,
        limits=Limits(**limits),
        settings=settings_of_server(arguments),
        api_key=api_key(arguments),
        anyone=arguments.allow_anonymous,
        log_prompts=arguments.log_prompts,
        page=not arguments.no_page,
    )


def served_name(model: str) -> str:
    """What clients call a model: as it was given, a Hub id whole; a folder by its name."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def serve_on_ray(arguments: argparse.Namespace, plan: Plan) -> None:
    """The same app as replicas on a cluster."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise ValueError("--ray needs Ray: pip install 'asrd[ray]'") from None
    from asrd.serve.ray_serve import connect, deploy, wait_for_signal

    own = arguments.ray == "local"
    plan = replace(plan, model=model_for_others(plan.model, here=own))
    most = max(arguments.replicas, arguments.max_replicas or 0)
    connect(arguments.ray, cpus=max(os.cpu_count() or 1, int(most * arguments.cpus) + 1))
    where = {"host": arguments.host, "port": arguments.port}
    deploy(plan, arguments.replicas, arguments.max_replicas, **where, cpus=arguments.cpus, gpus=arguments.gpus)
    whose = "" if own else " on the cluster's head node"
    print(f"{plan.name} is served at http://{arguments.host}:{arguments.port}{whose}", flush=True)
    wait_for_signal(own)
