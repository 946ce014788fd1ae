"""`ApiError`: what is wrong with a request, as OpenAI's error object and an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = {  # of a status; any other of 400 to 499 is an invalid request
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


class ApiError(Exception):
    """Ends a request with `status` and OpenAI's error object.

    param    the field that is wrong, if one is
    code     OpenAI's word for it, where it has one
    headers  of the answer
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, _printable(message, 2000), code
        self.param = None if param is None else _printable(param, 200)
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _printable(text: str, most: int) -> str:
    """Text that may repeat what a client has sent, as it can be sent back: valid Unicode, and not longer than that."""
    return text[:most].encode("utf-8", "replace").decode("utf-8")


def bad(param: str, message: str) -> ApiError:
    """A field has a value that cannot be used."""
    return ApiError(400, message, param, "invalid_value")


def refused(param: str, message: str) -> ApiError:
    """A field asks for something that this server does not do."""
    return ApiError(400, message, param, "unsupported_parameter")
