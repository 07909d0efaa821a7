"""Pagination of lists, and request bodies in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from peftkit_server.body import bounded_body
from peftkit_server.limits import Limits
from peftkit_server.refusals import RequestError
from peftkit_server.threads import DaemonThreads
from peftkit_server.validation import read_body

M = TypeVar("M", bound=BaseModel)


class Page(NamedTuple):
    """The requested page of a list.

    Attributes:
        after: Id of the last item of the previous page.
    """

    limit: int
    after: str | None

    @classmethod
    def of(cls, request: Request, *, max_limit: int = 100, default: int = 20) -> Page:
        """Return the page of a request.

        Raises:
            RequestError: The limit is not a number from 1 to `max_limit`.
        """
        limit = request.query_params.get("limit", str(default))
        is_number = limit.isascii() and limit.isdigit() and len(limit) < 10
        if not (is_number and 1 <= int(limit) <= max_limit):
            raise RequestError(f"limit must be a number from 1 to {max_limit:,}.", param="limit")
        return cls(int(limit), request.query_params.get("after"))

    def response(self, items: Sequence[dict[str, Any]]) -> Response:
        """Return the page of a list of documents, in the list's order.

        Raises:
            RequestError: `after` is not in the list.
        """
        ids = [item["id"] for item in items]
        if self.after is not None and self.after not in ids:
            raise RequestError(f"there is no '{self.after[:80]}' in this list.", param="after")
        start = 0 if self.after is None else ids.index(self.after) + 1
        data = items[start : start + self.limit]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        has_more = start + self.limit < len(items)
        return JSONResponse({"object": "list", "data": data, "has_more": has_more, **ends})


async def body_of(request: Request, kind: type[M], limits: Limits, threads: DaemonThreads) -> M:
    """Return the validated body of a request.

    Raises:
        RequestError: The body is too long, or as `read_body`.
    """
    data = await bounded_body(request, limits.max_body)
    return await threads.call(partial(read_body, data, kind), request)
