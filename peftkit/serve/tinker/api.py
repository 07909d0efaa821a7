"""Tinker's interface, /api/v1: its paths, and what all of them have in common.

Nothing answers with a 5xx, after which clients ask again for minutes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from peftkit.errors import PeftkitError
from peftkit.serve.answers import refusal
from peftkit.serve.body import bounded_body
from peftkit.serve.requests import RequestError
from peftkit.serve.tinker import bodies
from peftkit.serve.tinker.bodies import Body, RequestContext, checked, digest_of, fields_of
from peftkit.serve.tinker.service import Service
from peftkit.serve.tinker.wire import parsed
from peftkit.serve.training import Dialect, Training

HOLD_SECONDS = 20.0
"""How long a client waits for a result before it is told to ask again; it gives up after 45."""
MAX_BODY, MAX_PROTOBUF = 16 << 20, 64 << 20
"""Bytes of a request: of JSON, and of datums."""
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
"""What clients may do with this server; 0.25 reads the last one."""

_LOG = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]


def dialect(training: Training) -> Dialect:
    """Return Tinker's interface."""
    return Dialect(_routes(Service(training)))


def _routes(service: Service) -> list[BaseRoute]:
    posts: dict[str, Handler] = {
        **{path: _fixed({}) for path in ("client/dynamic_config", "sessions/{id}/finish")},
        "client/config": _fixed(FLAGS),
        "telemetry": _fixed({"status": "accepted"}),
        "create_session": _json(bodies.NewSession, service.create_session),
        "session_heartbeat": _json(bodies.OfSession, service.heartbeat),
        "create_model": _json(bodies.NewModel, service.create_model),
        "load_weights": _json(bodies.Load, service.load_weights),
        "get_info": _json(bodies.OfModel, service.get_info),
        "unload_model": _json(bodies.OfModel, service.unload),
        "weights_info": _json(bodies.OfPath, service.weights_info),
        "create_sampling_session": _json(bodies.NewSampler, service.create_sampler),
        "asample": _json(bodies.Sample, service.samplers.sample),
        "cancel_future": _json(bodies.OfFuture, service.cancel),
        "retrieve_future": _retrieve(service),
        "forward_backward": _forward_backward(service),
        "optim_step": _operation(service, bodies.Step, service.step),
        "save_weights": _operation(service, bodies.Save, service.save),
        "save_weights_for_sampler": _operation(
            service, bodies.SaveForSampler, service.save_for_sampler
        ),
    }
    gets: dict[str, Handler] = {
        "healthz": _fixed({"status": "ok"}),
        "get_server_capabilities": _listing(service.capabilities),
        "samplers/{id}": _listing(service.samplers.get),
        "training_runs": _listing(service.runs, "training_runs"),
        "training_runs/{id}": _listing(service.run),
        "training_runs/{id}/checkpoints": _listing(service.checkpoints, "checkpoints"),
        "checkpoints": _listing(service.checkpoints, "checkpoints"),
    }
    deletes = {"training_runs/{id}/checkpoints/{use}/{name}": _listing(service.delete_checkpoint)}
    return [
        Route(f"/api/v1/{path}", _guarded(handler), methods=[method])
        for method, handlers in (("POST", posts), ("GET", gets), ("DELETE", deletes))
        for path, handler in handlers.items()
    ]


def _fixed(reply: dict[str, Any]) -> Handler:
    """Return a handler with one reply, whatever it is context."""

    async def handle(request: Request) -> Response:
        await bounded_body(request, MAX_BODY)
        return JSONResponse(reply)

    return handle


def _json(kind: type[Body], of: Callable[[Any, RequestContext], dict[str, Any]]) -> Handler:
    """Return a handler of a JSON body."""

    async def handle(request: Request) -> Response:
        context = await _asked(request)
        body = await run_in_threadpool(checked, context.fields, kind)
        return JSONResponse(of(body, context))

    return handle


def _operation(
    service: Service, kind: type[bodies.OperationBody], of: Callable[[Any, Any], Callable[[], Any]]
) -> Handler:
    """Return a handler of an operation of a model, whose body may be wrong: then it fails."""

    async def handle(request: Request) -> Response:
        context = await _asked(request)
        place = {name: context.fields.get(name) for name in ("model_id", "seq_id")}

        def prepare(model: Any) -> Callable[[], Any]:
            return of(checked(context.fields, kind), model)

        ordered = checked(place, bodies.OperationBody)
        return JSONResponse(await run_in_threadpool(service.submit, ordered, context, prepare))

    return handle


def _forward_backward(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError("compressed bodies are not read here.", status=415)
        if "json" in request.headers.get("content-type", ""):
            fix = "Use tinker 0.25 or newer."
            raise RequestError("forward_backward is read as protobuf.", fix=fix, status=415)
        data = await bounded_body(request, MAX_PROTOBUF)
        message = await run_in_threadpool(parsed, "ForwardBackward", data)
        place = checked(
            {"model_id": message.model_id, "seq_id": message.seq_id}, bodies.OperationBody
        )
        digest = digest_of(message.SerializeToString(deterministic=True))
        context = RequestContext(_owner(request), digest, len(data))
        return JSONResponse(
            await run_in_threadpool(
                service.submit, place, context, lambda model: service.forward(message, model)
            )
        )

    return handle


def _retrieve(service: Service) -> Handler:
    async def handle(request: Request) -> Response:
        context = await _asked(request)
        body = await run_in_threadpool(checked, context.fields, bodies.OfFuture)
        pending = service.pending(body, context)
        pending.check()
        await asyncio.wait([asyncio.wrap_future(pending.future)], timeout=HOLD_SECONDS)
        result = pending.future.result() if pending.future.done() else None
        if result is None:
            reply = {"type": "try_again", "request_id": pending.id, "queue_state": "active"}
            return JSONResponse(reply, 408)
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        return JSONResponse(result)

    return handle


def _listing(of: Callable[..., Any], name: str = "") -> Handler:
    """Return a handler without a body.

    Args:
        name: Of the list that is returned, of which clients ask for parts; "": it is none.
    """

    async def handle(request: Request) -> Response:
        found = await run_in_threadpool(of, _owner(request), **request.path_params)
        return JSONResponse(_page(request, name, found) if name else found)

    return handle


def _page(request: Request, name: str, found: list[Any]) -> dict[str, Any]:
    numbers = {}
    for key, default in (("offset", 0), ("limit", 100)):
        text = request.query_params.get(key, str(default))
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            raise RequestError(f"{key} is {text[:20]!r}.", fix="Give a number.")
        numbers[key] = int(text)
    part = found[numbers["offset"] :][: min(numbers["limit"], 1000)]
    return {name: part, "cursor": {**numbers, "total_count": len(found)}}


def _owner(request: Request) -> str:
    return str(request.state.owner)


async def _asked(request: Request) -> RequestContext:
    data, key = await bounded_body(request, MAX_BODY), request.headers.get("x-idempotency-key", "")

    def read() -> RequestContext:
        fields = fields_of(data)
        return RequestContext(_owner(request), digest_of(fields), len(data), fields, key[:200])

    return await run_in_threadpool(read)  # others have their turn meanwhile


def _guarded(handler: Handler) -> Handler:
    """Return a handler that refuses where it would fail."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=400)
        except RequestError:
            raise
        except PeftkitError as error:
            return refusal(RequestError(str(error)))
        except Exception as error:
            _LOG.exception("%s failed", request.url.path)
            return refusal(RequestError(f"the server failed: {type(error).__name__}: {error}"))

    return handle
