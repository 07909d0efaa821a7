"""Lists as clients get them, page by page, and requests as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from peftkit.serve.body import bounded_body
from peftkit.serve.requests import RequestError, read_body

MAX_BODY = 1 << 20
"""Bytes of a request without a file."""
M = TypeVar("M", bound=BaseModel)


class Page(NamedTuple):
    """Which part of a list a client asks for.

    Attributes:
        after: Id of the last one that it has.
    """

    limit: int
    after: str | None

    @classmethod
    def of(cls, request: Request, *, most: int = 100, usual: int = 20) -> Page:
        """Return the page of a request.

        Raises:
            RequestError: The limit is none.
        """
        given = request.query_params.get("limit", str(usual))
        is_short = given.isascii() and given.isdigit() and len(given) < 10
        if not (is_short and 1 <= int(given) <= most):
            raise RequestError(f"limit is a number from 1 to {most:,}.", param="limit")
        return cls(int(given), request.query_params.get("after"))

    def response(self, items: Sequence[dict[str, Any]]) -> Response:
        """Return a page of documents with ids, in their order.

        Raises:
            RequestError: There is no document to begin after.
        """
        ids = [one["id"] for one in items]
        if self.after is not None and self.after not in ids:
            raise RequestError(f"there is no '{self.after[:80]}' in this list.", param="after")
        start = 0 if self.after is None else ids.index(self.after) + 1
        shown = items[start : start + self.limit]
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
        more = start + self.limit < len(items)
        return JSONResponse({"object": "list", "data": shown, "has_more": more, **ends})


async def body_of(request: Request, kind: type[M]) -> M:
    """Return the fields of a request.

    Raises:
        RequestError: They are too long, or as `read_body`.
    """
    try:
        data = await bounded_body(request, MAX_BODY)
    except ClientDisconnect:
        raise RequestError("the request was cut short.") from None
    return await asyncio.to_thread(read_body, data, kind)
