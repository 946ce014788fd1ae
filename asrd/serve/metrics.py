"""Prometheus metrics of a service, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asrd.many import Result
    from asrd.serve.service import Service

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """What /metrics shows."""

    def __init__(self, service: Service) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        into: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("asrd_requests", "answered requests", ["endpoint", "status"], **into)
        self.latency = Histogram("asrd_request_seconds", "from request to answer", buckets=SECONDS, **into)
        self.first = Histogram("asrd_first_text_seconds", "from request to the first text", buckets=SECONDS, **into)
        self.prompt = Counter("asrd_prompt_tokens", "tokens of prompts", **into)
        self.completion = Counter("asrd_completion_tokens", "tokens of answers", **into)
        self.steps = Counter("asrd_forward_passes", "forward passes, summed over answers", **into)
        names = {"drafted": "committed", "revoked": "revoked", "anchors": "promoted to anchors", "edited": "edited"}
        self.counts = {name: Counter(f"asrd_{name}_tokens", f"tokens {what}", **into) for name, what in names.items()}
        self.cancelled = Counter("asrd_cancelled", "answers that nobody waited for any more", **into)
        self.unfaithful = Counter("asrd_unfaithful_streams", "streams whose text was not that of the answer", **into)
        shown: dict[str, tuple[str, Callable[[], float]]] = {
            "asrd_running": ("answers being decoded", lambda: min(service.inflight, service.slots)),
            "asrd_waiting": ("answers that wait for a slot", lambda: service.waiting),
            "asrd_slots": ("answers that can be decoded at a time", lambda: service.slots),
            "asrd_engine_forwards": ("forward passes of the engine", lambda: service.worker.usage.forwards),
            "asrd_engine_rows": ("rows in them", lambda: service.worker.usage.rows),
            "asrd_engine_wasted": ("share of their positions that was padding", lambda: service.worker.usage.wasted),
        }
        for name, (about, value) in shown.items():
            Gauge(name, about, **into).set_function(value)

    def ended(self, result: Result) -> None:
        """An answer is there, or was cancelled."""
        self.steps.inc(result.forwards)
        self.cancelled.inc(result.finish_reason == "cancelled")
        for name, counter in self.counts.items():
            counter.inc(getattr(result, name))

    def text(self) -> tuple[bytes, str]:
        """The metrics as Prometheus reads them, and their content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        content: Any = generate_latest(self.registry)
        return content, CONTENT_TYPE_LATEST
