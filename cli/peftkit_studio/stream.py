"""The stream of changes to the open tabs, as server-sent events.

The stream has no history: a tab that reconnects receives the whole state first, and misses nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from peftkit_server.refusals import RequestError

POLL_SECONDS = 1.0
PINGS = 20
"""Polls between two pings, which keep a stream without changes open."""
MAX_STREAMS, MAX_QUEUE = 32, 100
"""Open tabs, and unsent changes of a tab before its stream is closed; the tab then reconnects."""


class Stream:
    """Sends the parts of a state that changed to all open tabs.

    Args:
        state: Returns the state, by the name of the part.
        housekeeping: Called in each poll, also without tabs.
    """

    def __init__(self, state: Callable[[], dict[str, Any]], housekeeping: Callable[[], None]):
        self._state, self._housekeeping = state, housekeeping
        self._queues: set[asyncio.Queue[str]] = set()
        self._sent: dict[str, Any] = {}

    async def poll(self) -> None:
        """Send changes each second; without tabs, read nothing."""
        count = 0
        while True:
            await asyncio.sleep(POLL_SECONDS)
            count += 1
            try:
                self._housekeeping()
                changes = self._changes() if self._queues else {}
            except Exception:  # for example a folder that was removed: the next poll may succeed
                logging.getLogger(__name__).exception("the folder cannot be read")
                continue
            text = _events(changes) or (": ping\n\n" if count % PINGS == 0 else "")
            for queue in list(self._queues) if text else ():
                is_full = queue.qsize() >= MAX_QUEUE
                if is_full:
                    self._queues.discard(queue)
                queue.put_nowait("" if is_full else text)  # "" ends the stream

    def _changes(self) -> dict[str, Any]:
        state, sent = self._state(), self._sent
        self._sent = state
        return {name: value for name, value in state.items() if value != sent.get(name)}

    async def events(self, request: Request) -> Response:
        """Stream the whole state, then each part that changes."""
        if len(self._queues) >= MAX_STREAMS:
            raise RequestError("too many tabs are open.", status=429)
        queue: asyncio.Queue[str] = asyncio.Queue()
        queue.put_nowait(_events(self._state()))
        self._queues.add(queue)

        async def stream() -> AsyncIterator[str]:
            try:
                while text := await queue.get():
                    yield text
            finally:
                self._queues.discard(queue)

        return StreamingResponse(stream(), media_type="text/event-stream")


def _events(state: dict[str, Any]) -> str:
    return "".join(f"event: {name}\ndata: {json.dumps(value)}\n\n" for name, value in state.items())
