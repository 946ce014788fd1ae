"""`make_app`: the routes, as a FastAPI app behind the gate. The same app runs under uvicorn and in Ray Serve."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from asrd.serve.errors import ApiError
from asrd.serve.fields import read_order
from asrd.serve.gate import Gate
from asrd.serve.page import live_page
from asrd.serve.replies import Reply
from asrd.serve.service import Service
from asrd.serve.wire import EventStream, whole_answer

log = logging.getLogger("asrd.serve")


def make_app(
    service: Service, api_key: str | None = None, anyone: bool = False, log_prompts: bool = False, page: bool = True
) -> FastAPI:
    """The app of a service; it starts the engine's thread when it starts, and ends it when it ends.

    anyone: without a key, answer to every host name, not to loopback names only
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    app = FastAPI(title="asrd", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.service = service
    _add_routes(app, service, log_prompts)
    if page:
        html, policy = live_page()

        async def show(_: Request) -> Response:
            return HTMLResponse(html, headers={"Content-Security-Policy": policy})

        app.add_route("/", show, ["GET"])
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _own_error)
    limits = service.limits
    app.add_middleware(Gate, key=api_key, body=limits.body, seconds=limits.receive_seconds, anyone=anyone)
    return app


def _add_routes(app: FastAPI, service: Service, log_prompts: bool) -> None:
    def endpoint(chat: bool) -> Callable[[Request], Any]:
        name = "chat" if chat else "completions"

        async def answer(request: Request) -> Response:
            try:
                response = await _answer(service, request, chat, log_prompts)
            except ApiError as error:
                service.metrics.requests.labels(name, str(error.status)).inc()
                raise
            service.metrics.requests.labels(name, str(response.status_code)).inc()
            return response

        return answer

    async def health(_: Request) -> Response:
        """Is the engine running?"""
        ready = service.worker.healthy and not service.draining
        state = "ok" if ready else "shutting down" if service.draining else "the engine is not running"
        return JSONResponse({"status": state}, 200 if ready else 503)

    async def models(_: Request) -> Response:
        """The one model that there is."""
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        """The model of that name."""
        if request.path_params["name"] != service.name:
            raise ApiError(404, f"there is no such model: this server has {service.name!r}", "model", "model_not_found")
        return JSONResponse(_model(service))

    async def metrics(_: Request) -> Response:
        """For Prometheus."""
        content, kind = service.metrics.text()
        return Response(content, media_type=kind)

    app.add_route("/v1/chat/completions", endpoint(chat=True), ["POST"])
    app.add_route("/v1/completions", endpoint(chat=False), ["POST"])
    app.add_route("/v1/models", models, ["GET"])
    app.add_route("/v1/models/{name:path}", model, ["GET"])
    app.add_route("/health", health, ["GET"])
    app.add_route("/metrics", metrics, ["GET"])


async def _answer(service: Service, request: Request, chat: bool, log_prompts: bool) -> Response:
    body = parse(await request.body())
    order = read_order(body, chat, service.name, service.limits)
    service.admit(1)
    prompts = await service.encode(order)
    if len(prompts) * order.n > service.limits.choices:
        most = service.limits.choices
        raise ApiError(400, f"{len(prompts)} prompts with n={order.n}: this server gives {most} choices at most", "n")
    if log_prompts:
        log.info("prompt: %s", json.dumps(order.prompt, ensure_ascii=False))
    reply = Reply(service, order, prompts)
    try:
        await reply.start()
    except BaseException:
        reply.close()
        raise
    if order.stream:
        return EventStream(reply)
    found = await whole_answer(reply, request)
    return Response(status_code=499) if found is None else JSONResponse(found)


def parse(body: bytes) -> Any:
    """A request's JSON; raises ApiError."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8: byte {error.start} cannot be read") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:
        said = str(error) if isinstance(error, ApiConstant) else "it is nested too deeply or has a number too long"
        raise ApiError(400, f"the body is not JSON: {said}") from None


class ApiConstant(ValueError):
    """NaN or an infinity, which JSON does not have."""


def _no_constant(name: str) -> Any:
    raise ApiConstant(f"{name} is not a number in JSON")


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "asrd",
        "asrd": service.facts,
    }


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, error.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router says, as OpenAI's error object."""
    assert isinstance(error, HTTPException)
    words = {
        404: "there is nothing here; there are /v1/chat/completions, /v1/completions, /v1/models, /health and /metrics",
        405: f"{request.method} is not for this address",
    }
    said = ApiError(error.status_code, words.get(error.status_code, str(error.detail)), None, "not_found")
    return JSONResponse(said.body, error.status_code, error.headers)


async def _own_error(_: Request, error: Exception) -> Response:
    """A fault of ours: logged by the server, not told to the client."""
    return JSONResponse(ApiError(500, "the server failed").body, 500)
