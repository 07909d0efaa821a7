"""Requests to /v1/audio/transcriptions. Source: OpenAI's API reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO, Literal

from starlette.requests import Request

from peftkit_server.body import uploaded_form
from peftkit_server.predictions.bodies import ModelBody
from peftkit_server.validation import validated


class TranscriptionBody(ModelBody):
    """The fields of a form, as text, without its file."""

    UNSUPPORTED = (
        *("chunking_strategy", "include[]", "known_speaker_names[]", "language", "prompt"),
        "timestamp_granularities[]",
    )

    response_format: Literal["json", "text"] = "json"
    stream: Literal["false", "False"] | None = None
    temperature: Literal["0", "0.0"] | None = None


async def read_audio(
    request: Request, file: BinaryIO, max_bytes: int, check: Callable[[str], None]
) -> TranscriptionBody:
    """Write the form's file; return its other fields.

    Args:
        check: Called with the name of the model, before the file if the form has this order.

    Raises:
        RequestError: It is not a form with a file, the file is too long, or a field is invalid.
    """
    form = await uploaded_form(
        request,
        file,
        max_bytes,
        on_file=lambda sent: check(sent["model"]) if "model" in sent else None,
    )
    fields: dict[str, Any] = dict(form.fields)
    body = validated(fields, TranscriptionBody)
    check(body.model)
    return body
