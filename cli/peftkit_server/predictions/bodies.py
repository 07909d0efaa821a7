"""Request bodies for embeddings, ranks, classes and transcriptions.

Source: OpenAI's API reference for embeddings and transcriptions, Jina's and Cohere's for rerank,
Jina's for classify, vLLM's for score.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from peftkit_server.validation import NullIsUnset

MAX_INPUTS = 2048
"""Most texts of a request, as in OpenAI's API."""
_Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class ModelBody(NullIsUnset):
    """Fields of all requests."""

    IGNORED = ("user",)
    model: str


class EmbeddingsBody(ModelBody):
    """A request to /v1/embeddings."""

    input: str | _Texts
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _is_text(cls, value: Any) -> Any:
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, int | list):
            raise ValueError(
                "token ids are not supported, send texts (LangChain: check_embedding_ctx_length="
                "False)"
            )
        return value

    @property
    def texts(self) -> list[str]:
        """The texts of the request."""
        return [self.input] if isinstance(self.input, str) else self.input


class _Document(NullIsUnset):
    text: str


class RerankBody(ModelBody):
    """A request to /v1/rerank."""

    query: str
    documents: Annotated[
        list[str | _Document], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
    ]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The query with each document."""
        texts = (each if isinstance(each, str) else each.text for each in self.documents)
        return [(self.query, text) for text in texts]


class ScoreBody(ModelBody):
    """A request to /v1/score: a query and texts, or pairs."""

    text_1: str | _Texts
    text_2: str | _Texts

    @field_validator("text_2")
    @classmethod
    def _has_as_many(cls, value: Any, info: Any) -> Any:
        first = info.data.get("text_1")
        if isinstance(first, list) and (not isinstance(value, list) or len(value) != len(first)):
            raise ValueError("text_1 and text_2 must have the same length, or text_1 is one text")
        return value

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Pairs of a query and a text."""
        texts = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        queries = [self.text_1] * len(texts) if isinstance(self.text_1, str) else self.text_1
        return list(zip(queries, texts, strict=True))


class ClassifyBody(ModelBody):
    """A request to /v1/classify."""

    input: (
        str
        | Annotated[
            list[str | Annotated[list[str], Field(min_length=2, max_length=2)]],
            Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True),
        ]
    )

    @property
    def texts(self) -> list[str | tuple[str, str]]:
        """The texts, or pairs of texts."""
        inputs = [self.input] if isinstance(self.input, str) else self.input
        return [each if isinstance(each, str) else (each[0], each[1]) for each in inputs]


class TranscriptionBody(ModelBody):
    """The fields of a form, as text, without its file."""

    UNSUPPORTED = (
        *("chunking_strategy", "include[]", "known_speaker_names[]", "language", "prompt"),
        "timestamp_granularities[]",
    )

    response_format: Literal["json", "text"] = "json"
    stream: Literal["false", "False"] | None = None
    temperature: Literal["0", "0.0"] | None = None
