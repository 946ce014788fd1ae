"""The app under uvicorn: on loopback unless told otherwise, and with a shutdown that lets running answers end."""

from __future__ import annotations

import logging
from types import FrameType
from typing import Any

from asrd.serve.service import Service

log = logging.getLogger("asrd.serve")

HEADER_BYTES = 16 << 10  # of a request's line and headers


def make_server(app: Any, service: Service, host: str, port: int, access_log: bool = True) -> Any:
    """A uvicorn server of the app; `run` serves until a signal to stop: then no new request is taken, and running ones
    may end within the grace. It also ends, with `engine_failed` set, when the engine does not recover, so that whoever
    watches the process can start it anew."""
    import uvicorn

    class Server(uvicorn.Server):
        engine_failed = False

        async def on_tick(self, counter: int) -> bool:
            """Called ten times a second: is it time to end?"""
            if not service.worker.healthy and not service.draining:
                log.error("the engine does not recover: the server ends")
                self.engine_failed = service.draining = True
            return self.engine_failed or await super().on_tick(counter)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Refuse what comes from now on."""
            service.draining = True
            super().handle_exit(sig, frame)

    return Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            http="h11",  # the one of uvicorn's parsers that limits headers
            h11_max_incomplete_event_size=HEADER_BYTES,
            ws="none",
            timeout_keep_alive=10,
            timeout_graceful_shutdown=max(1, round(service.limits.grace)),
            access_log=access_log,
            server_header=False,
            log_level="info" if access_log else "warning",
        )
    )
