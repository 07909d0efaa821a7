"""Clients' files: uploaded, listed, read, deleted, and visible to their owner only."""

import asyncio
import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai.types import FileDeleted, FileObject

from tests.helpers.jobs import FILES, JOBS, chats, hyper
from tests.helpers.serving import refusal, scope_of


def test_a_file_is_read_as_it_was_uploaded_and_is_there_after_a_restart(served):
    data = b'{"messages": []}\r\n--not a boundary\n' * 9
    with served() as client:
        id = client.upload(data, "../rows.jsonl")
    with served() as client:
        found = FileObject.model_validate(client.get(f"{FILES}/{id}").json(), strict=True)
        assert (found.filename, found.bytes) == ("../rows.jsonl", len(data))
        assert (found.purpose, found.status) == ("fine-tune", "processed")
        assert client.get(f"{FILES}/{id}/content").content == data
        assert [path.name for path in (client.folder / "files").iterdir()] == [f"{id}.jsonl"]
        gone = client.delete(f"{FILES}/{id}").json()
        assert FileDeleted.model_validate(gone, strict=True).deleted
        for request in (client.get, client.delete):
            assert refusal(request(f"{FILES}/{id}"), 404)["code"] == "file_not_found"
        assert not any((client.folder / "files").iterdir())


def test_files_are_listed_page_by_page(client):
    ids = [client.upload(b"{}") for _ in range(5)][::-1]
    first = client.get(FILES, params={"limit": 2}).json()
    assert [one["id"] for one in first["data"]] == ids[:2]
    assert (first["has_more"], first["first_id"], first["last_id"]) == (True, *ids[:2])
    rest = client.get(FILES, params={"after": ids[1], "purpose": "fine-tune"}).json()
    assert [one["id"] for one in rest["data"]] == ids[2:]
    assert rest["has_more"] is False
    oldest = client.get(FILES, params={"order": "asc", "limit": 1}).json()
    assert oldest["data"][0]["id"] == ids[-1]
    assert client.get(FILES, params={"purpose": "fine-tune-results"}).json()["data"] == []
    for wrong in (
        *({"limit": limit} for limit in ("0", "x", "²", "0" * 8 + "10", "0" * 8 + "1" * 5000)),
        {"after": "file-x"},
    ):
        assert refusal(client.get(FILES, params=wrong))["param"] == next(iter(wrong))


def test_a_full_disk_hides_its_path(client, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("peftkit.files.disk.os.fsync", full)
    refused = client.post(FILES, files={"file": ("a.jsonl", b"{}")}, data={"purpose": "fine-tune"})
    monkeypatch.undo()
    assert refused.status_code == 503
    message = refused.json()["error"]["message"]
    assert "disk is full" in message
    assert str(client.folder) not in message
    assert client.get(FILES).json()["data"] == []


@pytest.mark.parametrize(
    ("form", "param", "status"),
    [
        ({"data": {"purpose": "batch"}}, "purpose", 400),
        ({"data": {}}, "purpose", 400),
        ({"data": {"purpose": "fine-tune", "expires_after[seconds]": "3600"}}, "expires", 400),
        ({"data": {"purpose": "fine-tune"}, "files": {"other": b"x"}}, "file", 400),
        ({"data": {"purpose": "fine-tune"}, "files": {"file": b"x" * 2000}}, "file", 413),
    ],
)
def test_an_upload_that_is_refused_leaves_nothing(served, form, param, status):
    with served(limits={"upload_bytes": 1000}) as client:
        error = refusal(client.post(FILES, **{"files": {"file": b"x"}, **form}), status)
        assert error["param"].startswith(param)
        assert client.get(FILES).json()["data"] == []
        assert not any((client.folder / "files").iterdir())


@pytest.mark.parametrize(
    "id", ["..%2f..%2fserver.sqlite", "%2e%2e", "file-x", "file-x%00", "x" * 500]
)
def test_names_never_become_paths(client, id):
    for path in (f"{FILES}/{id}", f"{FILES}/{id}/content", f"{JOBS}/{id}", f"{JOBS}/{id}/events"):
        assert client.get(path).status_code == 404
    assert client.delete(f"{FILES}/{id}").status_code == 404
    body = {"model": "base", "training_file": "../server.sqlite"}
    assert client.post(JOBS, json=body).status_code == 404


def test_what_a_killed_server_left_of_an_upload_is_removed(served):
    with served() as client:
        id = client.upload(b"{}")
        folder: Path = client.folder / "files"
    for name in (".file-1.jsonl.tmp-9", "file-2.jsonl"):  # incomplete, and not acknowledged
        (folder / name).touch()
    with served():
        assert [path.name for path in folder.iterdir()] == [f"{id}.jsonl"]


@pytest.mark.parametrize("is_declared", [True, False])
@pytest.mark.parametrize("limits", [{"key_files": 2}, {"key_bytes": 2500}, {}])
def test_parallel_uploads_keep_to_the_quotas(served, limits, is_declared):
    """All uploads have begun, or are refused, before one of them ends."""
    number, begun, ended, statuses = 8, asyncio.Event(), list[int](), list[int]()
    head = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
    head += b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    parts = (head + b"x" * 500, b"x" * 500 + b"\r\n--x--\r\n")

    def note() -> None:
        ended.append(1)
        if len(ended) == number:
            begun.set()

    async def upload(app: Any) -> None:
        left = [*parts]

        async def receive() -> dict[str, Any]:
            if len(left) == 1:
                note()
                await begun.wait()
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

        async def send(message: Any) -> None:
            if "status" in message:
                statuses.append(message["status"])
                if not begun.is_set():
                    note()

        headers = {"content-type": "multipart/form-data; boundary=x"}
        if is_declared:
            headers["content-length"] = str(sum(map(len, parts)))
        await app(scope_of(FILES, headers), receive, send)

    async def all_of_them(app: Any) -> None:
        await asyncio.gather(*(upload(app) for _ in range(number)))

    with served(limits=limits) as client:
        client.portal.call(all_of_them, client.app)
        sizes = [file["bytes"] for file in client.get(FILES).json()["data"]]
        files = [*(client.folder / "files").iterdir()]
    assert {*statuses} <= {200, 507}
    assert len(sizes) == len(files) == statuses.count(200)
    if "key_bytes" in limits and not is_declared:  # each may need the room that another holds
        assert sum(sizes) <= 2500
    else:
        assert len(sizes) == (2 if limits else number)
    assert all(size == 1000 for size in sizes)


@pytest.mark.parametrize(
    ("limit", "code"),
    [("key_jobs", "queue_full"), ("key_models", "key_models"), ("key_records", "key_records")],
)
def test_parallel_jobs_keep_to_the_quotas(served, limit, code):
    gate = threading.Event()
    with served(limits={limit: 2}) as client:
        client.app.state.worker.call(lambda: gate.wait(60))
        body = {"model": "base", "training_file": client.upload(chats()), "method": hyper()}
        with ThreadPoolExecutor(8) as threads:
            done = [*threads.map(lambda n: client.post(JOBS, json=body), range(8))]
        gate.set()
        for job in done:
            if job.status_code == 200:
                client.post(f"{JOBS}/{job.json()['id']}/cancel")
    refused = [each.json()["error"]["code"] for each in done if each.status_code != 200]
    assert refused == [code] * 6
