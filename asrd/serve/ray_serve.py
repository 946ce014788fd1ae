"""The app on Ray Serve: as many replicas as wanted, each with a model and an engine of its own. Needs `asrd[ray]`.

Ray starts, watches and replaces the replicas and spreads requests over them; the app is the very one of `app`.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

from asrd.serve.plan import Plan

APP = "asrd"
ENVIRONMENT = {  # of a cluster that is started here, unless the user's says otherwise
    "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",  # on, Ray's proxy leaves the replicas of other nodes idle
    "RAY_worker_niceness": "0",  # Ray's 15 leaves next to nothing for a worker beside other busy processes
    "RAY_USAGE_STATS_ENABLED": "0",
}


def connect(address: str | None, cpus: int) -> None:
    """Join the Ray cluster at `address`, or start one on this machine with so many processors (None, "local")."""
    import ray

    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if address in (None, "local"):  # said to Ray, too: without an address it would join one that it finds here
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    else:
        ray.init(address=address, **quiet)


def deploy(
    plan: Plan,
    replicas: int,
    max_replicas: int | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    cpus: float = 1.0,
    gpus: float = 0.0,
) -> Any:
    """Start the replicas behind Ray's HTTP proxy, on the cluster that is connected; returns once they answer.

    max_replicas: more than `replicas` lets Ray add some while requests wait, and remove them again
    cpus, gpus: that a replica needs
    """
    from ray import serve

    @serve.deployment
    @serve.ingress()
    class Replica:
        """One model and its engine."""

        def __init__(self, plan: Plan) -> None:
            self.service, self.routes = plan.make()

        def __serve_build_asgi_app__(self) -> Any:
            return self.routes

        def check_health(self) -> None:
            """Ray asks regularly, and replaces a replica that raises."""
            if not self.service.worker.healthy:
                raise RuntimeError("the engine is not running")

    room = plan.slots + plan.limits.waiting
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": cpus, "num_gpus": gpus},
        "max_ongoing_requests": room + 64,  # the app itself says 429 before Ray would queue
        "health_check_period_s": 5,
        "health_check_timeout_s": 30,
        "graceful_shutdown_timeout_s": plan.limits.grace,
        "max_constructor_retry_count": 1,  # before the first replica is there; later ones are tried again
    }
    if max_replicas is not None and max_replicas > replicas:
        scaling = {"min_replicas": replicas, "max_replicas": max_replicas, "target_ongoing_requests": plan.slots}
        options |= {"autoscaling_config": scaling}
    else:
        options |= {"num_replicas": replicas}
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    _check_address(host, port)
    deployment: Any = Replica  # Ray's decorators say too little of what they return
    try:
        return serve.run(deployment.options(**options).bind(plan), name=APP, route_prefix="/")
    except RuntimeError:
        reason = _why_not()
        serve.delete(APP)
        raise ValueError(reason) from None


def _why_not() -> str:
    """What the first replica said when it could not be made."""
    from ray import serve

    app = serve.status().applications[APP]
    return sentence_of("\n".join(part.message for part in app.deployments.values()) or app.message)


def sentence_of(trace: str) -> str:
    """The last error in the text of a traceback, without its type."""
    return re.split(r"^(?:\w+\.)*\w+(?:Error|Exception): ", trace, flags=re.MULTILINE)[-1].strip()


def _check_address(host: str, port: int) -> None:
    """Raise ValueError if Ray Serve has run on the cluster before, at another address: it would stay there, perhaps
    open to others."""
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    found = client.http_config
    if (found.host, found.port) != (host, port):
        raise ValueError(
            f"Ray Serve already runs on this cluster, at {found.host}:{found.port}, not at {host}:{port}: give that"
            " --host and --port, or end it (serve shutdown)"
        )


def wait_for_signal(own: bool) -> None:
    """Until the process is told to stop; then the replicas may end what they do. own: the cluster was started for them;
    on another one, nothing but them is ended."""
    from ray import serve

    stopped = False

    def stop(_: int, __: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while not stopped:
        signal.sigtimedwait({signal.SIGUSR2}, 0.5)  # sleeps; a handler above ends it early
    with suppress(TimeoutError):  # after 60 seconds
        serve.delete(APP)  # waits for what runs, which a shutdown does not
    if own:
        serve.shutdown()
