"""The application that serves one predictor: routes, answers, limits and access."""

from __future__ import annotations

import base64
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from peftkit.errors import PeftkitError
from peftkit.files.strict_json import Json
from peftkit_server.access import Gate
from peftkit_server.body import DiskRoom, bounded_body, declared_bytes, uploaded_form
from peftkit_server.limits import Limits
from peftkit_server.predictions.bodies import (
    ClassifyBody,
    EmbeddingsBody,
    RerankBody,
    ScoreBody,
    TranscriptionBody,
)
from peftkit_server.predictions.predictor import Predictor
from peftkit_server.quotas import Intake
from peftkit_server.refusals import RequestError, refuse, refuse_route, wrong_routes
from peftkit_server.schedule import Share
from peftkit_server.threads import DaemonThreads
from peftkit_server.validation import read_body, validated


def make_predictor_app(
    predictor: Predictor, name: str, *, keys: Sequence[str] = (), limits: Limits | None = None
) -> Starlette:
    """Return the application that serves a predictor under a model name.

    Args:
        keys: Accepted keys, as in `make_app`.
    """
    limits = limits or Limits()
    service = _Service(predictor, name, limits, partial(limits.share, num_keys=len(keys)))
    endpoints = {
        "/v1/embeddings": service.embed,
        "/v1/rerank": service.rerank,
        "/v1/score": service.score,
        "/v1/classify": service.classify,
    }
    app = Starlette(
        routes=[
            Route("/health", service.health),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            *(
                Route(path, partial(service.respond, parse=endpoints[path]), methods=["POST"])
                for path in predictor.endpoints
                if path in endpoints
            ),
            *(
                Route(path, service.transcribe, methods=["POST"])
                for path in predictor.endpoints
                if path not in endpoints
            ),
            *wrong_routes(predictor.endpoints),
        ],
        middleware=[Middleware(Gate, keys=keys), Middleware(Intake, limits=service.limits)],
        exception_handlers={PeftkitError: refuse, HTTPException: refuse_route},
    )
    app.state.threads = service.threads
    return app


class _Service:
    def __init__(self, predictor: Predictor, name: str, limits: Limits, share: Share) -> None:
        self._predictor, self._name, self.limits = predictor, name, limits
        self._began, self._disk = int(time.time()), DiskRoom()
        self.threads = DaemonThreads(1, "peftkit-predictions", share, max_calls=limits.max_waiting)

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "fallbacks": []})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def model(self, request: Request) -> Response:
        self._check(request.path_params["name"])
        return JSONResponse(self._described())

    async def respond(
        self, request: Request, parse: Callable[[bytes], dict[str, object]]
    ) -> Response:
        """Return the response to a request; the requests of each owner wait for each other."""
        data = await bounded_body(request, self.limits.max_body)
        answer = await self.threads.call(partial(parse, data), request)
        return JSONResponse({"id": uuid.uuid4().hex, "model": self._name, **answer})

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

    def embed(self, data: bytes) -> Json:
        body = read_body(data, EmbeddingsBody)
        number = self._counted(body.model, body.texts)
        vectors = self._predictor.embed(body.texts, body.dimensions)
        encode = _base64 if body.encoding_format == "base64" else list
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": encode(vector)}
                for index, vector in enumerate(vectors)
            ],
            "usage": _usage(number),
        }

    def rerank(self, data: bytes) -> dict[str, object]:
        body = read_body(data, RerankBody)
        number = self._counted(body.model, body.pairs)
        scores = self._predictor.rank(body.pairs)
        results: list[Json] = []
        for index in sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]:
            document = {"document": {"text": body.pairs[index][1]}} if body.return_documents else {}
            results.append({"index": index, "relevance_score": scores[index], **document})
        return {"object": "list", "results": results, "usage": _usage(number)}

    def score(self, data: bytes) -> dict[str, object]:
        body = read_body(data, ScoreBody)
        number = self._counted(body.model, body.pairs)
        scores = self._predictor.rank(body.pairs)
        return {
            "object": "list",
            "created": int(time.time()),
            "data": [
                {"object": "score", "index": index, "score": score}
                for index, score in enumerate(scores)
            ],
            "usage": _usage(number),
        }

    def classify(self, data: bytes) -> dict[str, object]:
        body = read_body(data, ClassifyBody)
        number = self._counted(body.model, body.texts)
        answers: list[Json] = []
        for index, classes in enumerate(self._predictor.classify(body.texts)):
            label, score = next(iter(classes.items()))
            listed = [{"label": name, "score": value} for name, value in classes.items()]
            answer = {"prediction": label, "score": score, "predictions": listed}
            answers.append({"object": "classification", "index": index, **answer})
        return {"object": "list", "data": answers, "usage": _usage(number)}

    def _counted(self, model: str, prompts: Sequence[str | tuple[str, str]]) -> int:
        self._check(model)
        return self._predictor.count(prompts)

    def _check(self, model: str) -> None:
        if model != self._name:
            raise RequestError(
                f"there is no model '{model[:80]}'.",
                found=f"The model is: {self._name}.",
                status=404,
                code="model_not_found",
                param="model",
            )

    def _described(self) -> dict[str, object]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._began,
            "owned_by": "peftkit",
            "root": self._predictor.base_name,
            "task": self._predictor.kind,
            "endpoints": list(self._predictor.endpoints),
        }


def _usage(number: int) -> dict[str, int]:
    return {"prompt_tokens": number, "total_tokens": number}


def _base64(vector: Sequence[float]) -> str:
    """Return a vector as little-endian float32 in base64, as in OpenAI's API."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
