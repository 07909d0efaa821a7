"""Clients' files: uploaded rows, and the results of jobs; pages of lists."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from peftkit.files.disk import replacing, sha256_of, write_bytes_atomic
from peftkit_server.body import DiskRoom, Form, declared_bytes, uploaded_form
from peftkit_server.quotas import FILE
from peftkit_server.refusals import RequestError
from peftkit_server.store import new_id
from peftkit_server.training import Training
from peftkit_server.tuning.progress import JOB
from peftkit_server.tuning.rows import JobError
from peftkit_server.validation import Strict, validated

KIND, PURPOSE, RESULTS = FILE, "fine-tune", "fine-tune-results"


class UploadBody(Strict):
    """The fields of an upload, without its file. Files do not expire."""

    UNSUPPORTED = ("expires_after[anchor]", "expires_after[seconds]")
    purpose: Literal["fine-tune"]


def page_of(
    request: Request, items: Sequence[dict[str, Any]], *, max_limit: int = 100, default: int = 20
) -> Response:
    """Return the requested page of a list of documents, in the list's order.

    Raises:
        RequestError: The limit is no number from 1 to `max_limit`, or `after` is not in the list.
    """
    limit = request.query_params.get("limit", str(default))
    is_number = limit.isascii() and limit.isdigit() and len(limit) < 10
    if not (is_number and 1 <= int(limit) <= max_limit):
        raise RequestError(f"limit must be a number from 1 to {max_limit:,}.", param="limit")
    ids, after = [item["id"] for item in items], request.query_params.get("after")
    if after is not None and after not in ids:
        raise RequestError(f"there is no '{after[:80]}' in this list.", param="after")
    start = 0 if after is None else ids.index(after) + 1
    data = items[start : start + int(limit)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    has_more = start + len(data) < len(items)
    return JSONResponse({"object": "list", "data": data, "has_more": has_more, **ends})


class Files:
    """The files of a server, in a folder; a file's name is its id."""

    def __init__(self, training: Training) -> None:
        self._store, self.folder = training.store, training.folder.resolve() / "files"
        self._quotas, self._max_bytes = training.quotas, training.limits.upload_bytes
        self._threads, self._disk = training.threads, DiskRoom()
        self.folder.mkdir(exist_ok=True)

    def tidy(self) -> None:
        """Remove incomplete uploads of a killed server."""
        ids = {file["id"] for file in self._store.all(KIND)}
        for path in self.folder.iterdir():
            if path.stem not in ids:
                path.unlink()

    def path(self, id: str) -> Path:
        return self.folder / f"{id}.jsonl"

    def get(self, id: str, owner: str, param: str | None = None) -> dict[str, Any]:
        """Return a file's document, as clients receive it.

        Raises:
            RequestError: The file does not exist, or has another owner.
        """
        file = self._store.get(KIND, id, owner)
        if file is None or not self.path(id).is_file():
            raise RequestError(
                f"there is no file '{id[:80]}'.", status=404, code="file_not_found", param=param
            )
        return file

    def add(self, content: bytes, name: str, purpose: str, owner: str) -> str:
        """Write a file; return its id."""
        id = new_id("file-")
        write_bytes_atomic(content, self.path(id))
        self._put(id, sha256_of(self.path(id)), len(content), name, purpose, owner)
        return id

    def check(self, id: str) -> None:
        """Compare a file with its hash.

        Raises:
            JobError: The file is damaged or missing.
        """
        file, path = self._store.get(KIND, id), self.path(id)
        if file is None or not path.is_file() or file["sha256"] != sha256_of(path):
            problem = "damaged" if path.is_file() else "missing"
            raise JobError("file_damaged", f"The file {id} is {problem} on the server.")

    def _put(
        self, id: str, digest: str, size: int, name: str, purpose: str, owner: str
    ) -> dict[str, Any]:
        """Store the document of a file that is on the disk."""
        body = {
            "sha256": digest,
            "id": id,
            "object": "file",
            "bytes": size,
            "created_at": int(time.time()),
            "filename": name,
            "purpose": purpose,
            "status": "processed",
        }
        self._store.put(KIND, id, body, owner=owner)
        return body

    # HTTP handlers.

    async def upload(self, request: Request) -> Response:
        owner, id = request.state.owner, new_id("file-")
        size, path = declared_bytes(request, self._max_bytes), self.path(id)
        upload = await self._threads.result(lambda: self._quotas.reserve_file(owner, size), owner)

        async def reserve(size: int) -> None:
            if size > upload.size:
                await self._threads.result(lambda: self._quotas.grow(upload, size), owner)

        def stored(form: Form, stack: ExitStack) -> dict[str, Any]:
            stack.close()  # syncs the file to the disk
            fields = sha256_of(path), form.num_bytes, form.filename or "", PURPOSE, owner
            return self._quotas.settle(upload, lambda: self._put(id, *fields))

        try:
            with self._disk.reserved(self.folder, size), ExitStack() as stack:
                file = stack.enter_context(replacing(path, self._max_bytes))
                form = await uploaded_form(request, file, self._max_bytes, reserve=reserve)
                validated(form.fields, UploadBody)
                return JSONResponse(await self._threads.result(lambda: stored(form, stack), owner))
        finally:
            self._quotas.release(upload)

    def listed(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        files = self._store.all(KIND, request.state.owner)
        files = [file for file in files if purpose in (None, file["purpose"])]
        if request.query_params.get("order", "desc") != "asc":
            files.reverse()
        return page_of(request, files, max_limit=10_000, default=10_000)

    def retrieve(self, request: Request) -> Response:
        return JSONResponse(self.get(request.path_params["id"], request.state.owner))

    def content(self, request: Request) -> Response:
        file = self.get(request.path_params["id"], request.state.owner)
        try:
            self.check(file["id"])
        except JobError as error:
            raise RequestError(error.problem, fix="Upload it again.", status=500) from None
        return FileResponse(self.path(file["id"]), media_type="application/octet-stream")

    def delete(self, request: Request) -> Response:
        id = self.get(request.path_params["id"], request.state.owner)["id"]
        for document in self._store.all(JOB, request.state.owner):
            job = document["response"]
            if id in (job["training_file"], job["validation_file"]) and not job["finished_at"]:
                text = f"the file is in use by the job {job['id']}."
                raise RequestError(text, fix="Cancel the job first.", code="file_in_use")
        self._store.discard([(KIND, id)], lambda: self.path(id).unlink(missing_ok=True))
        return JSONResponse({"id": id, "object": "file", "deleted": True})
