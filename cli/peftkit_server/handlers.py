"""Errors of requests as responses."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from peftkit.errors import PeftkitError
from peftkit_server.endpoints import COMPLETING, PREDICTING
from peftkit_server.refusals import RequestError, refusal


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
