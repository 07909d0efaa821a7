"""Refused requests: the error, its HTTP status and its response. Imports no model code."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from peftkit.errors import OutputError, PeftkitError
from peftkit_server.endpoints import COMPLETING, PREDICTING


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


_hidden: dict[str, str] = {}
"""Folders of the operator, with the names that clients read instead."""
_PATH = r"(?:[\\/][^\s\\/'\"`,;:()]+)*[\\/]?"
"""The rest of a path in a message."""
_UPLOADED = re.compile(r"(?:\bfiles[\\/])?\b(file-[0-9a-f]{24})\.jsonl(?::(\d+)(?::\d+)?)?")


def hide(*folders: str | Path) -> None:
    """Show the last names of the operator's folders instead of their paths, in all messages."""
    for folder in map(Path, folders):
        paths = (folder, folder.resolve()) if folder.is_absolute() else (folder.resolve(),)
        _hidden.update({str(path): folder.name for path in paths if path.is_dir()})


def public(error: object) -> str:
    """Return the message of an error as it may leave the process, without the operator's folders.

    Below the folders of `hide`, the rest of a path remains; below the folders of the process (home,
    temporary files, Python, the working folder), only its last name.
    """
    text, sep = str(error), re.escape(os.sep)
    for folder in sorted(_hidden, key=len, reverse=True):
        text = text.replace(folder, _hidden[folder])
    for folder in (tempfile.gettempdir(), sys.prefix, os.getcwd(), os.path.expanduser("~")):
        if folder.strip(os.sep):  # not the root, of which all paths of URLs are
            pattern = rf"(?<![\w.]){re.escape(folder)}(?={sep}){_PATH}"
            text = re.sub(pattern, lambda found: Path(found[0]).name, text)
    return _UPLOADED.sub(lambda found: found[1] + (f", line {found[2]}" * bool(found[2])), text)


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
            "message": public(error),
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


async def refuse(request: Request, error: Exception) -> Response:
    """Return the response for an error of the package."""
    assert isinstance(error, PeftkitError)
    return refusal(error)


async def refuse_route(request: Request, error: Exception) -> Response:
    """Return the response for an unknown path or method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is not supported: {error.detail}."
    return refusal(RequestError(message, status=error.status_code))


def wrong_routes(supported: Sequence[str]) -> list[Route]:
    """Return routes for the paths of other models, which report the supported paths."""
    predicting = {path for each in PREDICTING.values() for path in each}
    paths = (*COMPLETING, *sorted(predicting))

    async def respond(request: Request) -> Response:
        raise RequestError(
            f"the models of this server do not support {request.url.path}.",
            fix=f"Use {', '.join(supported)}.",
            code="unsupported_endpoint",
            param="model",
        )

    return [Route(path, respond, methods=["POST"]) for path in paths if path not in supported]
