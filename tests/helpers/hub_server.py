"""A model hub on the loopback: the few endpoints that huggingface_hub calls, in memory."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest


class Repo:
    """A repository: its commits, each a name-to-bytes mapping."""

    def __init__(self, private: bool = False) -> None:
        self.private = private
        self.commits: dict[str, dict[str, bytes]] = {}
        self.main = self.commit({})

    def commit(self, files: dict[str, bytes]) -> str:
        """Add a commit on the main branch."""
        digest = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[digest] = files
        self.main = digest
        return digest


class Hub:
    """All repositories, what was asked, and how the next requests fail.

    Attributes:
        requests: "METHOD /path" of each request, in order.
        failing: Beginning of a request to the status that answers it.
        blobs: Large files by their sha256, uploaded and not yet in a commit or so.
        breaking: Name of a file to the number of bytes after which its next answer breaks off.
        ranges: Name of a file and where in it an answer began, in order.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.failing: dict[str, int] = {}
        self.blobs: dict[str, bytes] = {}
        self.breaking: dict[str, int] = {}
        self.ranges: list[tuple[str, int]] = []
        self.url = ""


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Stay quiet."""

        def answer(
            self, content: Any = None, status: int = 200, headers: dict[str, str] | None = None
        ) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content or {}).encode()
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            if "Content-Length" not in (headers or {}):
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def missing(self, code: str, status: int = 404) -> None:
            self.answer({"error": code}, status, {"X-Error-Code": code})

        def handle_one(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            path = unquote(urlsplit(self.path).path)
            request = f"{self.command} {path}"
            hub.requests.append(request)
            for start, status in hub.failing.items():
                if request.startswith(start):
                    self.answer({"error": "told to fail"}, status)
                    return
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "validate-yaml"]:
                self.answer()
            elif parts[:3] == ["api", "repos", "create"]:
                self.create(json.loads(body))
            elif parts[:2] == ["api", "models"]:
                self.model("/".join(parts[2:4]), parts[4:], body)
            elif "info/lfs" in path:
                self.lfs(json.loads(body))
            elif parts[0] == "upload":
                hub.blobs[parts[1]] = body
                self.answer()
            else:
                self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

        do_GET = do_HEAD = do_POST = do_PUT = handle_one

        def create(self, request: dict[str, Any]) -> None:
            name = f"{request.get('organization') or 'me'}/{request['name']}"
            hub.repos[name] = Repo(request.get("visibility") == "private")
            self.answer({"url": f"{hub.url}/{name}", "id": name, "name": name})

        def model(self, name: str, rest: list[str], body: bytes) -> None:
            repo = hub.repos.get(name)
            if repo is None:
                self.missing("RepoNotFound")
            elif not rest or rest[0] == "revision":
                self.info(repo, name, rest[1] if rest else "main")
            elif rest[0] == "tree":
                self.tree(repo, rest[1], "/".join(rest[2:]))
            elif rest[0] == "preupload":
                self.preupload(json.loads(body))
            elif rest[0] == "commit":
                self.commit(repo, name, body)

        def info(self, repo: Repo, name: str, revision: str) -> None:
            commit = repo.main if revision == "main" else revision
            if commit not in repo.commits:
                self.missing("RevisionNotFound")
                return
            files = repo.commits[commit]
            siblings = [{"rfilename": n, "size": len(data)} for n, data in files.items()]
            self.answer({"id": name, "sha": commit, "private": repo.private, "siblings": siblings})

        def tree(self, repo: Repo, revision: str, folder: str) -> None:
            if folder:
                self.missing("EntryNotFound")
                return
            files = repo.commits[repo.main if revision == "main" else revision]
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hash_of(data)}
                for name, data in files.items()
            ]
            self.answer(json.dumps(entries).encode())

        def preupload(self, request: dict[str, Any]) -> None:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in request["files"]
            ]
            self.answer({"files": files})

        def lfs(self, request: dict[str, Any]) -> None:
            objects = [
                {**o, "actions": {"upload": {"href": f"{hub.url}/upload/{o['oid']}"}}}
                for o in request["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})

        def commit(self, repo: Repo, name: str, body: bytes) -> None:
            files = dict(repo.commits[repo.main])
            for line in body.splitlines():
                item = json.loads(line)
                value = item["value"]
                if item["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "lfsFile":
                    files[value["path"]] = hub.blobs[value["oid"]]
                elif item["key"] == "deletedFile":
                    del files[value["path"]]
            commit = repo.commit(files)
            url = f"{hub.url}/{name}/commit/{commit}"
            self.answer({"commitUrl": url, "commitOid": commit, "success": True})

        def resolve(self, name: str, revision: str, file: str) -> None:
            repo = hub.repos.get(name)
            if repo is None:
                self.missing("RepoNotFound")
                return
            commit = repo.main if revision == "main" else revision
            data = repo.commits[commit].get(file)
            if data is None:
                self.missing("EntryNotFound")
                return
            headers = {"ETag": f'"{hash_of(data)}"', "X-Repo-Commit": commit}
            start = int(self.headers.get("Range", "bytes=0-")[6:].rstrip("-"))
            if self.command == "HEAD":
                self.answer(data, headers=headers)
                return
            hub.ranges.append((file, start))
            whole = f"bytes {start}-{len(data) - 1}/{len(data)}"
            headers |= {"Content-Range": whole} if start else {}
            headers["Content-Length"] = str(len(data) - start)
            end = start + hub.breaking.pop(file, len(data))
            self.close_connection = end < len(data)
            self.answer(data[start:end], 206 if start else 200, headers)

    return Handler


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve a hub on a free port of the loopback."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def joined_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """Serve a hub that this process is logged in to, with a cache of its own."""
    # what a process that a user starts finds in its environment
    constants = huggingface_hub.constants
    for name, value in (
        ("HF_HUB_OFFLINE", False), ("HF_HUB_CACHE", str(cache)), ("HF_HUB_DISABLE_XET", True),
    ):  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running
        huggingface_hub.close_session()
