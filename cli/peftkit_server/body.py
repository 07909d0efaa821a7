"""Bodies of requests, up to a limit: bytes, and forms with a file."""

from __future__ import annotations

from typing import BinaryIO

from starlette.requests import ClientDisconnect, Request

from peftkit_server.multipart import Form, FormError
from peftkit_server.refusals import RequestError


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


async def uploaded_form(request: Request, file: BinaryIO, limit: int) -> Form:
    """Write the file of a multipart form; return the form with its other fields.

    Raises:
        RequestError: It is not a form with a file, the file is longer than the limit, or the client
            disconnected.
    """
    try:
        form = Form(request.headers.get("content-type", ""), file, limit)
        async for chunk in request.stream():
            form.feed(chunk)
        form.close()
    except ClientDisconnect:
        raise RequestError("the client disconnected during the upload.") from None
    except FormError as error:
        status = 413 if error.is_too_long else 400
        raise RequestError(
            error.problem, found=error.found, status=status, param=error.part
        ) from None
    return form
