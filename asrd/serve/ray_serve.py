"""The app on Ray Serve: as many replicas as wanted, each with a model and an engine of its own. Needs `asrd[ray]`.

Ray starts, watches and replaces the replicas and spreads requests over them; the app is the very one of `app`.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

from asrd.serve.plan import Plan

APP = "asrd"
SPREAD = "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING"  # on, Ray's proxy leaves the replicas of other nodes idle


def connect(address: str | None, cpus: int) -> None:
    """Join the Ray cluster at `address`, or start one on this machine with so many processors (None, "local")."""
    import ray

    if ray.is_initialized():
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "warning"}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(SPREAD, "0")
    if address in (None, "local"):
        ray.init(num_cpus=cpus, include_dashboard=False, **quiet)
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
    }
    if max_replicas is not None and max_replicas > replicas:
        scaling = {"min_replicas": replicas, "max_replicas": max_replicas, "target_ongoing_requests": plan.slots}
        options |= {"autoscaling_config": scaling}
    else:
        options |= {"num_replicas": replicas}
    serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    deployment: Any = Replica  # Ray's decorators say too little of what they return
    return serve.run(deployment.options(**options).bind(plan), name=APP, route_prefix="/")


def wait_for_signal() -> None:
    """Until the process is told to stop; then the replicas may end what they do."""
    from ray import serve

    stopped = False

    def stop(_: int, __: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    while not stopped:
        signal.sigtimedwait({signal.SIGUSR2}, 0.5)  # sleeps; a handler above ends it early
    serve.shutdown()
