"""Requests to /v1/audio/transcriptions. Source: OpenAI's API reference."""

from __future__ import annotations

from typing import Any, BinaryIO, ClassVar, Literal

from starlette.requests import Request

from peftkit_server.body import uploaded_form
from peftkit_server.predictions.bodies import ModelBody
from peftkit_server.requests import validated


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
    form = await uploaded_form(request, file, max_bytes)
    fields: dict[str, Any] = dict(form.fields)
    return validated(fields, TranscriptionBody)
