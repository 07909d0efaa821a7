"""Routes for adapters that embed, rank or classify texts, or transcribe audio; their bodies.

Source: OpenAI's API reference for embeddings and transcriptions, Jina's and Cohere's for rerank,
Jina's for classify, vLLM's for score.
"""

from __future__ import annotations

import base64
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from peftkit.errors import PeftkitError
from peftkit_server.access import Gate
from peftkit_server.body import DiskRoom, bounded_body, declared_bytes, uploaded_form
from peftkit_server.limits import Limits
from peftkit_server.predictions.predictor import Predictor
from peftkit_server.quotas import Intake
from peftkit_server.refusals import RequestError, refuse, refuse_route, wrong_routes
from peftkit_server.threads import DaemonThreads
from peftkit_server.validation import NullIsUnset, read_body, validated

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
    def prompts(self) -> list[str]:
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
    def prompts(self) -> list[tuple[str, str]]:
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
    def prompts(self) -> list[tuple[str, str]]:
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
    def prompts(self) -> list[str | tuple[str, str]]:
        """The texts, or pairs of texts."""
        inputs = [self.input] if isinstance(self.input, str) else self.input
        return [each if isinstance(each, str) else (each[0], each[1]) for each in inputs]


TextsBody = EmbeddingsBody | RerankBody | ScoreBody | ClassifyBody


class TranscriptionBody(ModelBody):
    """The fields of a form, as text, without its file."""

    UNSUPPORTED = (
        *("chunking_strategy", "include[]", "known_speaker_names[]", "language", "prompt"),
        "timestamp_granularities[]",
    )

    response_format: Literal["json", "text"] = "json"
    stream: Literal["false", "False"] | None = None
    temperature: Literal["0", "0.0"] | None = None


def make_predictor_app(
    predictor: Predictor, name: str, *, keys: Sequence[str] = (), limits: Limits | None = None
) -> Starlette:
    """Return the application that serves a predictor under a model name.

    Args:
        keys: Accepted keys, as in `make_app`.
    """
    service = _Service(predictor, name, replace(limits or Limits(), num_keys=len(keys)))
    respond = service.respond
    endpoints = {
        "/v1/embeddings": partial(respond, kind=EmbeddingsBody, answer=service.embed),
        "/v1/rerank": partial(respond, kind=RerankBody, answer=service.rerank),
        "/v1/score": partial(respond, kind=ScoreBody, answer=service.score),
        "/v1/classify": partial(respond, kind=ClassifyBody, answer=service.classify),
    }
    app = Starlette(
        routes=[
            Route("/health", service.health),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            *(
                Route(path, endpoints.get(path, service.transcribe), methods=["POST"])
                for path in predictor.endpoints
            ),
            *wrong_routes(predictor.endpoints),
        ],
        middleware=[Middleware(Gate, keys=keys), Middleware(Intake, limits=service.limits)],
        exception_handlers={PeftkitError: refuse, HTTPException: refuse_route},
    )
    app.state.threads = service.threads
    return app


class _Service:
    def __init__(self, predictor: Predictor, name: str, limits: Limits) -> None:
        self._predictor, self._name, self.limits = predictor, name, limits
        self._began, self._disk = int(time.time()), DiskRoom()
        self.threads = DaemonThreads(
            1, "peftkit-predictions", limits.share, max_calls=limits.max_waiting
        )

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "fallbacks": []})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        self._check(request.path_params["name"])
        return JSONResponse(self._described())

    async def respond(
        self, request: Request, kind: type[TextsBody], answer: Callable[[Any], dict[str, Any]]
    ) -> Response:
        """Return the response to a request; the requests of each owner wait for each other."""
        data = await bounded_body(request, self.limits.max_body)

        def answered() -> dict[str, Any]:
            body = read_body(data, kind)
            self._check(body.model)
            number = self._predictor.count(body.prompts)
            usage = {"prompt_tokens": number, "total_tokens": number}
            return {"object": "list", **answer(body), "usage": usage}

        fields = await self.threads.call(answered, request)
        return JSONResponse({"id": uuid.uuid4().hex, "model": self._name, **fields})

    async def transcribe(self, request: Request) -> Response:
        """Return the transcript of the audio file of a form.

        The place in the queue, the model and the room on the disk are checked before the file.
        """
        size = declared_bytes(request, self.limits.upload_bytes)
        with (
            self.threads.place(request.state.owner),
            TemporaryDirectory(prefix="peftkit-") as folder,
            self._disk.reserved(Path(folder), size),
        ):
            path = Path(folder, "audio")
            with path.open("wb") as file:
                form = await uploaded_form(
                    request,
                    file,
                    self.limits.upload_bytes,
                    on_file=lambda sent: self._check(sent["model"]) if "model" in sent else None,
                )
            body = validated(form.fields, TranscriptionBody)
            self._check(body.model)
            transcribe = partial(self._predictor.transcribe, path)
            text = await self.threads.run(transcribe, request)
        if body.response_format == "text":
            return PlainTextResponse(f"{text}\n")
        return JSONResponse({"text": text})

    def embed(self, body: EmbeddingsBody) -> dict[str, Any]:
        vectors = self._predictor.embed(body.prompts, body.dimensions)
        encode = _base64 if body.encoding_format == "base64" else list
        return {
            "data": [
                {"object": "embedding", "index": index, "embedding": encode(vector)}
                for index, vector in enumerate(vectors)
            ]
        }

    def rerank(self, body: RerankBody) -> dict[str, Any]:
        pairs, results = body.prompts, list[dict[str, Any]]()
        scores = self._predictor.rank(pairs)
        for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]:
            document = {"document": {"text": pairs[index][1]}} if body.return_documents else {}
            results.append({"index": index, "relevance_score": scores[index], **document})
        return {"results": results}

    def score(self, body: ScoreBody) -> dict[str, Any]:
        return {
            "created": int(time.time()),
            "data": [
                {"object": "score", "index": index, "score": score}
                for index, score in enumerate(self._predictor.rank(body.prompts))
            ],
        }

    def classify(self, body: ClassifyBody) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []
        for index, classes in enumerate(self._predictor.classify(body.prompts)):
            label, score = next(iter(classes.items()))
            listed = [{"label": name, "score": value} for name, value in classes.items()]
            answer = {"prediction": label, "score": score, "predictions": listed}
            answers.append({"object": "classification", "index": index, **answer})
        return {"data": answers}

    def _check(self, model: str) -> None:
        if model != self._name:
            raise RequestError(
                f"there is no model '{model[:80]}'.",
                found=f"The model is: {self._name}.",
                status=404,
                code="model_not_found",
                param="model",
            )

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._began,
            "owned_by": "peftkit",
            "root": self._predictor.base_name,
            "task": self._predictor.kind,
            "endpoints": list(self._predictor.endpoints),
        }


def _base64(vector: Sequence[float]) -> str:
    """Return a vector as little-endian float32 in base64, as in OpenAI's API."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
