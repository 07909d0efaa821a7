"""The report of runs at a local address, for as long as they go on and after."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from peftkit.errors import OutputError
from peftkit.report.history import read_histories
from peftkit.report.page import page

HOST = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """Answers GET / with the report, or 304 where a browser has it already.

    Args:
        runs: Folders of runs. port: 0 picks a free one.

    Raises:
        DataError: A folder holds no run.
        OutputError: The port is taken.
    """

    def __init__(self, runs: Sequence[str | Path], port: int = 0) -> None:
        self.runs = [run.folder for run in read_histories(runs)]
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise OutputError(
                f"cannot listen at {HOST}:{port}.",
                found=str(error),
                fix="Choose another --port; 0 picks a free one.",
            ) from None

    @property
    def address(self) -> str:
        """Where a browser finds it."""
        return f"http://{HOST}:{self.server_port}/"

    def version(self) -> str:
        """Return what changes whenever the report would."""
        found = [(str(f), f.stat().st_mtime_ns) for run in self.runs for f in run.glob("*.json*")]
        states = [run.state() for run in read_histories(self.runs)]
        return hashlib.sha256(repr((sorted(found), states)).encode()).hexdigest()[:16]


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 10.0

    def do_GET(self) -> None:
        hosts = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        if self.headers.get("Host") not in hosts:  # another site's name for this address
            self.send_error(403)
        elif self.path != "/":
            self.send_error(404)
        else:
            version = f'"{self.server.version()}"'
            known = self.headers.get("If-None-Match") == version
            text = "" if known else page(read_histories(self.server.runs), live=True)
            body = text.encode()
            self.send_response(304 if known else 200)
            self.send_header("ETag", version)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests."""
