"""Requests to /v1/audio/transcriptions. Source: OpenAI's API reference."""

from __future__ import annotations

from typing import Any, BinaryIO, ClassVar, Literal

from starlette.requests import ClientDisconnect, Request

from peftkit.files.multipart import Form, FormError
from peftkit.serve.predictions.bodies import ModelBody
from peftkit.serve.refusals import RequestError
from peftkit.serve.requests import validated


class TranscriptionBody(ModelBody):
    """The fields of a form, as text, without its file."""

    UNSUPPORTED: ClassVar[frozenset[str]] = frozenset(
        {
            *("chunking_strategy", "include[]", "known_speaker_names[]", "language", "prompt"),
            "timestamp_granularities[]",
        }
    )

    response_format: Literal["json", "text"] = "json"
    stream: Literal["false", "False"] | None = None
    temperature: Literal["0", "0.0"] | None = None


async def read_audio(request: Request, file: BinaryIO, max_bytes: int) -> TranscriptionBody:
    """Write the form's file; return its other fields.

    Raises:
        RequestError: It is not a form with a file, the file is too long, or a field is invalid.
    """
    try:
        form = Form(request.headers.get("content-type", ""), file, max_bytes)
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
    fields: dict[str, Any] = dict(form.fields)
    return validated(fields, TranscriptionBody)
