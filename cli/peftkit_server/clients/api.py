"""Routes of the further chat APIs; they share the server's prompts, limits and worker."""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from peftkit.errors import PeftkitError
from peftkit.files.strict_json import Json
from peftkit_server.body import bounded_body
from peftkit_server.clients.messages import (
    CountBody,
    MessagesBody,
    MessagesReply,
    message_error,
)
from peftkit_server.clients.responses_body import ResponsesBody
from peftkit_server.clients.responses_reply import ResponsesReply
from peftkit_server.completions import ChatService, ParsedRequest
from peftkit_server.limits import Limits
from peftkit_server.refusals import RequestError, status_of
from peftkit_server.validation import read_body

Endpoint = Callable[[Request], Awaitable[Response]]


def client_routes(service: ChatService, limits: Limits) -> Sequence[BaseRoute]:
    """Return the routes of /v1/responses and /v1/messages."""
    responses, messages = _Responses(service, limits), _Messages(service, limits)
    return [
        Route("/v1/responses", partial(service.respond, parse=responses.parsed), methods=["POST"]),
        Route("/v1/responses/{id}", responses.retrieve),
        Route("/v1/responses/{id}", responses.delete, methods=["DELETE"]),
        *(
            Route(path, _in_format(endpoint), methods=["POST"])
            for path, endpoint in (
                ("/v1/messages", partial(service.respond, parse=messages.parsed)),
                ("/v1/messages/count_tokens", messages.count),
            )
        ),
    ]


class _Responses:
    """Responses with their conversations, by owner and id; the oldest are dropped first."""

    def __init__(self, service: ChatService, limits: Limits) -> None:
        self._service, self._max_bytes = service, limits.response_bytes
        self._max_key_bytes = limits.share(limits.response_bytes)
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._sizes: Counter[str] = Counter()  # by owner
        self._lock = threading.Lock()

    def parsed(self, data: bytes, owner: str) -> ParsedRequest:
        body = read_body(data, ResponsesBody)
        before = body.previous_response_id
        earlier = self._get(owner, before)["messages"] if before is not None else []
        chat = body.chat(earlier)

        def keep(response: dict[str, object], message: dict[str, object]) -> None:
            if body.store is not False:
                self._keep(owner, response, [*earlier, *body.turns(), message])

        return self._service.chat_request(chat, owner)._replace(reply=ResponsesReply(body, keep))

    async def retrieve(self, request: Request) -> Response:
        kept = self._get(request.state.owner, request.path_params["id"])
        return JSONResponse(kept["response"])

    async def delete(self, request: Request) -> Response:
        owner, id = request.state.owner, request.path_params["id"]
        self._get(owner, id)
        with self._lock:
            self._drop((owner, id))
        return JSONResponse({"id": id, "object": "response", "deleted": True})

    def _keep(self, owner: str, response: Json, messages: list[Json]) -> None:
        """Keep a response with the messages of its conversation, its own included."""
        data = json.dumps({"response": response, "messages": messages}).encode()
        with self._lock:
            self._kept[owner, response["id"]] = data
            self._sizes[owner] += len(data)
            while self._sizes[owner] > self._max_key_bytes:
                self._drop(next(key for key in self._kept if key[0] == owner))
            while self._sizes.total() > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def _get(self, owner: str, id: str) -> Json:
        """Return "response" and the "messages" up to it, without instructions.

        Raises:
            RequestError: There is none with this id, or no longer.
        """
        with self._lock:
            data = self._kept.get((owner, id))
        if data is None:
            raise RequestError(
                f"there is no response '{id[:80]}'.",
                found="The server keeps the latest responses in memory, without `store: false`.",
                fix="Send the whole conversation as input.",
                status=404,
                code="previous_response_not_found",
                param="previous_response_id",
            )
        kept: Json = json.loads(data)
        return kept

    def _drop(self, key: tuple[str, str]) -> None:
        self._sizes[key[0]] -= len(self._kept.pop(key, b""))
        self._sizes += Counter()  # drops owners without responses


class _Messages:
    def __init__(self, service: ChatService, limits: Limits) -> None:
        self._service, self._limits = service, limits

    def parsed(self, data: bytes, owner: str) -> ParsedRequest:
        body = read_body(data, MessagesBody)
        parsed = self._service.chat_request(body.chat(), owner)
        return parsed._replace(reply=MessagesReply(body.model))

    async def count(self, request: Request) -> Response:
        data = await bounded_body(request, self._limits.max_body)

        def count() -> int:
            body = read_body(data, CountBody)
            return len(self._service.chat_request(body.chat(), request.state.owner).prompts[0])

        return JSONResponse({"input_tokens": await self._service.in_turn(count, request)})


def _in_format(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint whose errors have Anthropic's format."""

    async def respond(request: Request) -> Response:
        try:
            return await endpoint(request)
        except PeftkitError as error:
            headers = {"Retry-After": "1"} if status_of(error) == 429 else None
            return JSONResponse(message_error(error), status_of(error), headers)

    return respond
