"""The server of the chat view: adapters of one base, in a process that the page can end.

The process runs `peftkit serve`'s server on a loopback port with a key of its own. Its model leaves
the memory when the chat is closed.
"""

from __future__ import annotations

import asyncio
import secrets
import warnings
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from peftkit.execution.children import spawn_context
from peftkit_server.refusals import RequestError
from peftkit_studio.drafting import end_with_parent

MAX_HEAD = 1 << 16
CONNECT_SECONDS = 10.0
CLOSED = {"state": "closed", "text": "", "models": [], "ids": []}


class ChatServer:
    """Starts and ends the process, and passes requests to it.

    Attributes:
        status: `state` (closed, loading, ready or failed), `text` (the current stage or the error),
            `models`, the `ids` of their runs, and the name of the `base`.
    """

    def __init__(self) -> None:
        self._process: Any = None
        self._pipe: Any = None
        self._key, self._port = "", 0
        self.status: dict[str, Any] = dict(CLOSED)

    def open(self, ids: list[str], folders: Mapping[str, Path]) -> None:
        """Start a server of these adapters, in place of the current one."""
        self.close()
        self._key, self._port = secrets.token_urlsafe(24), 0
        context = spawn_context()
        self._pipe, sender = context.Pipe(duplex=False)
        paths = {name: str(path) for name, path in folders.items()}
        self._process = context.Process(target=_serve, args=(paths, self._key, sender))
        self._process.start()
        sender.close()
        models = ["base", *folders]
        self.status = {"state": "loading", "text": "Loading PyTorch", "models": models, "ids": ids}

    def close(self) -> None:
        """End the process."""
        process, self._process, self._pipe = self._process, None, None
        if process is not None:
            process.kill()  # it stores nothing
            process.join()
        self.status = dict(CLOSED)

    def poll(self) -> None:
        """Read the messages of the process, and notice its end."""
        try:
            while self._pipe is not None and self._pipe.poll():
                message = self._pipe.recv()
                self._port = message.pop("port", self._port)
                self.status = {**self.status, **message}
        except (EOFError, OSError):
            self._pipe = None
        if self._process is not None and not self._process.is_alive():
            self._process = None
            if self.status["state"] != "failed":
                text = "The server's process ended; the memory may be too small."
                self.status = {**self.status, "state": "failed", "text": text}

    async def forward(self, body: bytes) -> tuple[int, str, AsyncIterator[bytes]]:
        """Send a request of chat completions; return status, content type and streamed body.

        Raises:
            RequestError: No chat is open, or its process ends.
        """
        if self.status["state"] != "ready":
            raise RequestError("no chat is open.", fix="Choose a run to chat with.", status=409)
        head = (
            "POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1\r\n"  # 1.0: without chunks
            f"Authorization: Bearer {self._key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        try:
            connection = asyncio.open_connection("127.0.0.1", self._port, limit=MAX_HEAD)
            reader, writer = await asyncio.wait_for(connection, CONNECT_SECONDS)
            writer.write(head.encode() + body)
            await writer.drain()
            lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            found = f"{type(error).__name__}: {error}"
            raise RequestError("the chat does not answer.", found=found, status=502) from None
        fields = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)

        async def stream() -> AsyncIterator[bytes]:
            try:
                while chunk := await reader.read(1 << 16):
                    yield chunk
            finally:
                writer.close()  # the server then stops generating

        return int(lines[0].split()[1]), fields.get("content-type", "application/json"), stream()


def _serve(folders: dict[str, str], key: str, pipe: Any) -> None:
    from peftkit.events import Event, Notice, Stage
    from peftkit_server.server import serve_adapters

    end_with_parent()
    warnings.simplefilter("ignore")

    def report(event: Event) -> None:
        if isinstance(event, Stage | Notice):
            pipe.send({"text": event.text})

    def announce(url: str, bank: Any) -> None:
        port = int(url.rpartition(":")[2])
        pipe.send({"state": "ready", "text": "", "port": port, "base": bank.base.name})

    try:
        serve_adapters(folders, port=0, key=key, on_event=report, on_ready=announce)
    except Exception as error:  # the page shows it
        pipe.send({"state": "failed", "text": str(error) or type(error).__name__})
