"""Responses in memory, which `previous_response_id` continues."""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from typing import Any

from peftkit_server.refusals import RequestError


class KeptResponses:
    """Conversations by owner and response id; the oldest are dropped first.

    Args:
        max_bytes: Most bytes of all conversations as JSON.
        max_key_bytes: Most bytes of the conversations of one owner.
    """

    def __init__(self, max_bytes: int, max_key_bytes: int) -> None:
        self._max_bytes, self._max_key_bytes = max_bytes, max_key_bytes
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._sizes: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all conversations."""
        return sum(self._sizes.values())

    def put(self, owner: str, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep a response with the messages of its conversation, its own included."""
        data = json.dumps({"response": response, "messages": messages}).encode()
        with self._lock:
            self._kept[owner, response["id"]] = data
            self._sizes[owner] += len(data)
            while self._sizes[owner] > self._max_key_bytes:
                self._drop(next(key for key in self._kept if key[0] == owner))
            while self.num_bytes > self._max_bytes:
                self._drop(next(iter(self._kept)))

    def response(self, owner: str, id: str) -> dict[str, Any]:
        """Return a response.

        Raises:
            RequestError: There is none with this id, or no longer.
        """
        response: dict[str, Any] = self._get(owner, id)["response"]
        return response

    def messages(self, owner: str, id: str) -> list[dict[str, Any]]:
        """Return the conversation up to a response, without instructions; errors as `response`."""
        messages: list[dict[str, Any]] = self._get(owner, id)["messages"]
        return messages

    def delete(self, owner: str, id: str) -> None:
        """Drop a response; errors as `response`."""
        self._get(owner, id)
        with self._lock:
            self._drop((owner, id))

    def _get(self, owner: str, id: str) -> dict[str, Any]:
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
        kept: dict[str, Any] = json.loads(data)
        return kept

    def _drop(self, key: tuple[str, str]) -> None:
        data = self._kept.pop(key, b"")
        self._sizes[key[0]] -= len(data)
        if not self._sizes[key[0]]:
            del self._sizes[key[0]]
