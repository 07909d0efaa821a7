"""The bytes of a request's body, up to a limit."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from peftkit.serve.refusals import RequestError


async def bounded_body(request: Request, limit: int) -> bytes:
    """Return a request's body.

    Raises:
        RequestError: The body has more bytes than the limit, or the client disconnected.
    """
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise RequestError(
                    "the request is too long.", found=f"The limit is {limit:,} bytes.", status=413
                )
    except ClientDisconnect:
        raise RequestError("the client disconnected before the end of its request.") from None
    return bytes(body)
