"""Routes and request handlers of Tinker's API, /api/v1.

No handler returns a 5xx status: Tinker's clients would retry such a request for minutes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from peftkit.errors import PeftkitError
from peftkit.files.strict_json import Json
from peftkit_server.body import bounded_body
from peftkit_server.refusals import RequestError, refusal
from peftkit_server.threads import DaemonThreads
from peftkit_server.tinker import bodies
from peftkit_server.tinker.bodies import (
    Body,
    OperationBody,
    RequestContext,
    digest_of,
)
from peftkit_server.tinker.service import Service
from peftkit_server.tinker.wire import parsed
from peftkit_server.training import Dialect, Training
from peftkit_server.validation import fields_of, validated

HOLD_SECONDS = 20.0
"""Seconds of a poll before the reply `try_again`; clients give up after 45."""
FLAGS = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": 5_000_000,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
    "create_model_via_load_weights": True,
}
"""Feature flags for clients; tinker 0.25 reads the last one."""

_LOG = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]


def dialect(training: Training) -> Dialect:
    """Return Tinker's API."""
    api = _Api(training)
    return Dialect(api.routes(), on_stop=api.changes.shutdown)


class _Api:
    """Makes the handlers of all routes from the methods of the service."""

    def __init__(self, training: Training) -> None:
        self._service, self._threads = Service(training), training.threads
        self._limits = training.limits
        self.changes = DaemonThreads(1, "peftkit-tinker")  # they run one after the other

    def routes(self) -> list[BaseRoute]:
        """Return the routes of the API."""
        service, json, operation = self._service, self._json, self._operation
        runs, bodiless = service.runs, self._bodiless
        posts: dict[str, Handler] = {
            **{path: self._fixed({}) for path in ("client/dynamic_config", "sessions/{id}/finish")},
            "client/config": self._fixed(FLAGS),
            "telemetry": self._fixed({"status": "accepted"}),
            "create_session": json(bodies.NewSession, service.sessions.create),
            "session_heartbeat": json(bodies.OfSession, service.sessions.heartbeat),
            "create_model": json(bodies.NewModel, service.create_model),
            "load_weights": json(bodies.Load, service.load_weights),
            "get_info": json(bodies.OfModel, service.get_info),
            "unload_model": json(bodies.OfModel, service.unload),
            "weights_info": json(bodies.OfPath, runs.weights_info),
            "create_sampling_session": json(bodies.NewSampler, service.create_sampler),
            "asample": json(bodies.Sample, service.samplers.sample),
            "cancel_future": json(bodies.OfFuture, service.cancel),
            "retrieve_future": self._retrieve,
            "forward_backward": self._forward_backward,
            "optim_step": operation(bodies.Step, service.step),
            "save_weights": operation(bodies.Save, service.save),
            "save_weights_for_sampler": operation(bodies.SaveForSampler, service.save_for_sampler),
        }
        gets: dict[str, Handler] = {
            "healthz": self._fixed({"status": "ok"}),
            "get_server_capabilities": bodiless(service.capabilities),
            "samplers/{id}": bodiless(service.samplers.get),
            "training_runs": bodiless(runs.all, "training_runs"),
            "training_runs/{id}": bodiless(runs.get),
            "training_runs/{id}/checkpoints": bodiless(runs.checkpoints, "checkpoints"),
            "checkpoints": bodiless(runs.checkpoints, "checkpoints"),
        }
        deletes = {"training_runs/{id}/checkpoints/{use}/{name}": bodiless(runs.delete_checkpoint)}
        return [
            Route(f"/api/v1/{path}", _guarded(handler), methods=[method])
            for method, handlers in (("POST", posts), ("GET", gets), ("DELETE", deletes))
            for path, handler in handlers.items()
        ]

    def _fixed(self, reply: Json) -> Handler:
        """Return a handler with a constant reply."""

        async def handle(request: Request) -> Response:
            await bounded_body(request, self._limits.tinker_body)
            return JSONResponse(reply)

        return handle

    def _json(self, kind: type[Body], of: Callable[[Any, RequestContext], Json]) -> Handler:
        """Return a handler of a JSON body."""

        async def handle(request: Request) -> Response:
            context = await self._context(request)
            body = await self._threads.call(partial(validated, context.fields, kind), request)
            return JSONResponse(await self.changes.call(partial(of, body, context), request))

        return handle

    def _operation(
        self, kind: type[OperationBody], of: Callable[[Any, Any], Callable[[], Any]]
    ) -> Handler:
        """Return a handler of a model's operation; an invalid body fails the operation.

        The request succeeds then, and the operation uses up its number.
        """

        async def handle(request: Request) -> Response:
            context = await self._context(request)
            place = {name: context.fields.get(name) for name in ("model_id", "seq_id")}

            def prepare(model: Any) -> Callable[[], object]:
                return of(validated(context.fields, kind), model)

            return await self._submitted(request, place, context, prepare)

        return handle

    async def _submitted(
        self, request: Request, place: Json, context: RequestContext, prepare: Any
    ) -> Response:
        ordered = validated(place, OperationBody)
        submit = partial(self._service.submit, ordered, context, prepare)
        return JSONResponse(await self._threads.call(submit, request))

    async def _forward_backward(self, request: Request) -> Response:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError("the server does not support compressed bodies.", status=415)
        if "json" in request.headers.get("content-type", ""):
            fix = "Use tinker 0.25 or newer."
            raise RequestError("forward_backward requires protobuf.", fix=fix, status=415)
        data = await bounded_body(request, self._limits.tinker_datums)
        message = await self._threads.call(partial(parsed, "ForwardBackward", data), request)
        place = {"model_id": message.model_id, "seq_id": message.seq_id}
        digest = digest_of(message.SerializeToString(deterministic=True))
        context = RequestContext(request.state.owner, digest, len(data))
        forward = partial(self._service.forward, message)
        return await self._submitted(request, place, context, forward)

    async def _retrieve(self, request: Request) -> Response:
        context = await self._context(request)
        body = await self._threads.call(
            partial(validated, context.fields, bodies.OfFuture), request
        )
        pending = self._service.pending(body, context)
        pending.check()
        await asyncio.wait([asyncio.wrap_future(pending.future)], timeout=HOLD_SECONDS)
        result = pending.future.result() if pending.future.done() else None
        if result is None:
            reply = {"type": "try_again", "request_id": pending.id, "queue_state": "active"}
            return JSONResponse(reply, 408)
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        return JSONResponse(result)

    def _bodiless(self, of: Callable[..., Any], name: str = "") -> Handler:
        """Return a handler of requests without a body.

        Args:
            name: Field of a paginated list; "": the reply is not a list.
        """

        async def handle(request: Request) -> Response:
            owner = request.state.owner
            result = await self._threads.result(partial(of, owner, **request.path_params), owner)
            return JSONResponse(_page(request, name, result) if name else result)

        return handle

    async def _context(self, request: Request) -> RequestContext:
        data = await bounded_body(request, self._limits.tinker_body)
        key, owner = request.headers.get("x-idempotency-key", ""), request.state.owner

        def read() -> RequestContext:
            fields = fields_of(data)
            return RequestContext(owner, digest_of(fields), len(data), fields, key[:200])

        return await self._threads.call(read, request)  # parsing does not block the event loop


def _page(request: Request, name: str, items: list[Any]) -> dict[str, object]:
    numbers = {}
    for key, default in (("offset", 0), ("limit", 100)):
        text = request.query_params.get(key, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise RequestError(f"{key} is {text[:20]!r}.", fix="Use a number.")
        numbers[key] = int(text)
    page = items[numbers["offset"] :][: min(numbers["limit"], 1000)]
    return {name: page, "cursor": {**numbers, "total_count": len(items)}}


def _guarded(handler: Handler) -> Handler:
    """Return a handler that returns a 4xx status for every exception."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError:
            raise
        except PeftkitError as error:
            return refusal(RequestError(str(error)))
        except Exception as error:
            _LOG.exception("%s failed", request.url.path)
            return refusal(RequestError(f"the server failed: {type(error).__name__}: {error}"))

    return handle
