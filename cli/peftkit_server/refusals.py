"""Refused requests: the error, its HTTP status and its response. Imports no model code."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from peftkit.errors import OutputError, PeftkitError


class RequestError(PeftkitError):
    """A request cannot be served.

    Args:
        status: HTTP status.
        code: OpenAI's error code.
        param: The invalid field.
    """

    def __init__(
        self,
        problem: str,
        *,
        found: str = "",
        fix: str = "",
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(problem, found=found, fix=fix)
        self.status, self.code, self.param = status, code, param


def status_of(error: PeftkitError) -> int:
    """Return the HTTP status of an error: 400 by the client, 500 by the server, 503 a full disk."""
    if isinstance(error, RequestError):
        return error.status
    if isinstance(error, OutputError):
        return 503
    return 400 if error.exit_code == 2 else 500


def error_fields(error: PeftkitError) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    status = status_of(error)
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    is_clients = status < 500 or status == 507  # 507: the client stores too much
    kind = kinds.get(status, "invalid_request_error" if is_clients else "server_error")
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None),
        }
    }


def refusal(error: PeftkitError) -> JSONResponse:
    """Return the response for an error."""
    status = status_of(error)
    headers = {
        401: {"WWW-Authenticate": "Bearer"},
        408: {"Connection": "close"},
        429: {"Retry-After": "1"},
    }
    return JSONResponse(error_fields(error), status, headers.get(status))
