"""Sessions of Tinker's clients."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

from peftkit_server.quotas import Quotas
from peftkit_server.refusals import RequestError
from peftkit_server.store import Store, new_id
from peftkit_server.tinker.bodies import NewSession, OfSession, RequestContext, check_metadata
from peftkit_server.tinker.futures import ReplyCache

KIND = "tinker.session"
"""Kind of the store's documents."""


class Sessions:
    """The sessions of all clients; each model and each sampler belongs to one."""

    def __init__(self, store: Store, quotas: Quotas) -> None:
        self._store, self._quotas = store, quotas
        self._replies: defaultdict[str, ReplyCache[dict[str, Any]]] = defaultdict(ReplyCache)
        self._heartbeats: dict[str, float] = {}

    def create(self, body: NewSession, context: RequestContext) -> dict[str, object]:
        """Create a session."""
        key, replies = context.key or new_id(""), self._replies[context.owner]
        reply = replies.get(key, context.digest)
        if reply is None:
            check_metadata({**body.user_metadata, "tags": body.tags}, self._quotas.limits)
            id = new_id("")
            document = {"session_id": id, "created": time.time(), **body.model_dump()}
            with self._store.lock:
                self._quotas.check_record(context.owner)
                self._store.put(KIND, id, document, owner=context.owner)
            reply = {"type": "create_session", "session_id": id}
            replies.put(key, context.digest, reply)
        return reply

    def heartbeat(self, body: OfSession, context: RequestContext) -> dict[str, object]:
        """Record a heartbeat.

        Raises:
            RequestError: 410: the session does not exist.
        """
        self.check(body.session_id, context.owner, status=410)
        self._heartbeats[body.session_id] = time.time()
        return {"type": "session_heartbeat"}

    def check(self, id: str, owner: str, *, status: int = 404) -> None:
        """Raise unless a session exists.

        Raises:
            RequestError: The session does not exist, or has another owner.
        """
        if self._store.get(KIND, id, owner) is None:
            raise RequestError(f"there is no session {id}.", status=status)

    def last_heartbeat(self, id: str) -> float:
        """Return the time of a session's last heartbeat; 0: there was none."""
        return self._heartbeats.get(id, 0.0)
