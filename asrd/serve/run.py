"""The app under uvicorn: on loopback unless told otherwise, and with a shutdown that lets running answers end."""

from __future__ import annotations

from types import FrameType
from typing import Any

from asrd.serve.gate import is_loopback
from asrd.serve.service import Service

HEADER_BYTES = 16 << 10  # of a request's line and headers


def check_binding(host: str, api_key: str | None, anyone: bool) -> None:
    """Raise ValueError if the server would be open to others without a key, and nobody said so."""
    if api_key is not None and len(api_key) < 8:
        raise ValueError("the API key has less than 8 characters: take a longer one")
    if api_key is None and not anyone and not is_loopback(host):
        raise ValueError(
            f"--host {host} is open to others: give an API key (--api-key-file or ASRD_API_KEY), or say"
            " --allow-anonymous"
        )


def make_server(app: Any, service: Service, host: str, port: int, access_log: bool = True) -> Any:
    """A uvicorn server of the app; `run` serves until a signal to stop: then no new request is taken, and running ones
    may end within the grace."""
    import uvicorn

    class Server(uvicorn.Server):
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
