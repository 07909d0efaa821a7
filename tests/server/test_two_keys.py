"""Every route of the server with two keys: none reaches the other's data or delays its requests."""

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.routing import Route

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

from peftkit.errors import ConfigError
from peftkit_server.access import owner_of
from peftkit_server.refusals import public
from peftkit_server.schedule import Call, Schedule
from peftkit_server.tinker.futures import failure
from tests.helpers.jobs import FILES, JOBS, Client, chats, hyper, serving
from tests.helpers.wire_client import API, datum, message
from tests.helpers.wire_client import Client as Tinker

ANN, BOB = "tml-ann", "tml-bob"
RESPONSES = "/v1/responses"
ASKED = {"input": "x", "max_output_tokens": 1}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}

WITHOUT_IDS = {
    *("GET /health", "GET /metrics", "GET /v1/models", "POST /v1/files", "GET /v1/files"),
    *(f"GET {JOBS}", f"POST {JOBS[:-5]}/alpha/graders/validate"),
    *(f"POST {API}/{name}" for name in ("client/config", "client/dynamic_config", "telemetry")),
    *(f"POST {API}/create_session", f"POST {API}/sessions/{{id}}/finish"),  # a constant reply
    *(f"GET {API}/{name}" for name in ("healthz", "get_server_capabilities")),
    *(f"GET {API}/{name}" for name in ("training_runs", "checkpoints")),
    # refused by name: they are of other models
    *(f"POST /v1/{name}" for name in ("embeddings", "rerank", "score", "classify")),
    "POST /v1/audio/transcriptions",
}
"""Routes that take no id, of a file, job, model, session, sampler or result."""


class Ids(NamedTuple):
    """Ids of one key's data."""

    file: str
    result: str
    job: str
    model: str
    checkpoint: str
    session: str
    tenant: str
    weights: str
    sampler: str
    future: str
    response: str


class Sent(NamedTuple):
    """A request: the route, the path, its JSON or its bytes."""

    route: str
    path: str
    json: Any = None
    data: bytes | None = None


def made(client: Client, key: str) -> Ids:
    """Make data of all kinds with a key."""
    client.headers["Authorization"] = f"Bearer {key}"
    done = client.until(client.job(chats(), method=hyper(n_epochs=2))["id"])
    (checkpoint, *_) = client.get(f"{JOBS}/{done['id']}/checkpoints").json()["data"][::-1]
    tinker = Tinker(client, key)
    model = tinker.model()
    future = model.submit([datum([5, 6, 7, 8])])
    tinker.retrieve(future)
    path = model.call("save_weights", path="x")["path"]
    return Ids(
        done["training_file"],
        done["result_files"][0],
        done["id"],
        done["fine_tuned_model"],
        checkpoint["fine_tuned_model_checkpoint"],
        tinker.session,
        model.id,
        path,
        tinker.sampler(path),
        future,
        client.post(RESPONSES, json={"model": "base", **ASKED}).json()["id"],
    )


def requests(theirs: Ids, mine: Ids) -> Iterator[Sent]:
    """Yield requests that name another key's data; those that delete something come last."""
    models = (theirs.model, theirs.checkpoint, theirs.weights)
    for model in models:
        turns = [{"role": "user", "content": "x"}]
        yield Sent("GET /v1/models/{name:path}", f"/v1/models/{model}")
        asked = {"model": model, "max_tokens": 1}
        yield Sent(
            "POST /v1/chat/completions", "/v1/chat/completions", {**asked, "messages": turns}
        )
        yield Sent("POST /v1/completions", "/v1/completions", {**asked, "prompt": [5]})
        yield Sent("POST /v1/messages", "/v1/messages", {**asked, "messages": turns})
        count = "/v1/messages/count_tokens"
        yield Sent(f"POST {count}", count, {"model": model, "messages": turns})
        yield Sent(f"POST {RESPONSES}", RESPONSES, {"model": model, **ASKED})
        generate = "/inference/v1/generate"
        yield Sent(f"POST {generate}", generate, {**asked, "token_ids": [5]})
        yield Sent(f"POST {JOBS}", JOBS, {"model": model, "training_file": mine.file})
    continued = {"model": "base", **ASKED, "previous_response_id": theirs.response}
    yield Sent(f"POST {RESPONSES}", RESPONSES, continued)
    yield Sent(f"GET {RESPONSES}/{{id}}", f"{RESPONSES}/{theirs.response}")
    for file in (theirs.file, theirs.result):
        yield Sent("GET /v1/files/{id}", f"{FILES}/{file}")
        yield Sent("GET /v1/files/{id}/content", f"{FILES}/{file}/content")
    yield Sent(f"POST {JOBS}", JOBS, {"model": "base", "training_file": theirs.file})
    valid = {"training_file": mine.file, "validation_file": theirs.file}
    yield Sent(f"POST {JOBS}", JOBS, {"model": "base", **valid})
    for tail in ("", "/events", "/checkpoints"):
        yield Sent(f"GET {JOBS}/{{id}}{tail}", f"{JOBS}/{theirs.job}{tail}")
    for action in ("cancel", "pause", "resume"):
        yield Sent(f"POST {JOBS}/{{id}}/{action}", f"{JOBS}/{theirs.job}/{action}")
    judge = {"type": "score_model", "name": "j", "model": theirs.model, "range": [0, 1]}
    judge["input"] = [{"role": "user", "content": "x"}]
    run = f"{JOBS[:-5]}/alpha/graders/run"
    yield Sent(f"POST {run}", run, {"grader": judge, "model_sample": "x"})
    yield from tinker_requests(theirs, mine)
    for file in (theirs.file, theirs.result):
        yield Sent("DELETE /v1/files/{id}", f"{FILES}/{file}")
    yield Sent(f"DELETE {RESPONSES}/{{id}}", f"{RESPONSES}/{theirs.response}")
    for model in models:
        yield Sent("DELETE /v1/models/{name:path}", f"/v1/models/{model}")


def tinker_requests(theirs: Ids, mine: Ids) -> Iterator[Sent]:
    session, operation = {"session_id": theirs.session}, {"model_id": theirs.tenant, "seq_id": 3}
    my_session, path = {"session_id": mine.session}, theirs.weights
    sample = {"sampling_session_id": theirs.sampler, "prompt": PROMPT, "sampling_params": {}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("session_heartbeat", session),
        ("create_model", {**session, "model_seq_id": 9, "base_model": "base"}),
        ("create_model", {**session, "model_seq_id": 0, "base_model": "base"}),
        ("get_info", {"model_id": theirs.tenant}),
        ("optim_step", {**operation, "adam_params": {}}),
        ("save_weights", {**operation, "seq_id": 4, "path": "y"}),
        ("save_weights_for_sampler", {**operation, "seq_id": 5, "path": "y"}),
        ("weights_info", {"tinker_path": path}),
        ("load_weights", {**my_session, "model_seq_id": 8, "path": path, "optimizer": True}),
        ("load_weights", {**session, "model_seq_id": 8, "path": mine.weights, "optimizer": True}),
        (
            "create_sampling_session",
            {**my_session, "sampling_session_seq_id": 8, "model_path": path},
        ),
        (
            "create_sampling_session",
            {**session, "sampling_session_seq_id": 9, "base_model": "base"},
        ),
        ("asample", {**sample, "seq_id": 0}),
        ("retrieve_future", {"request_id": theirs.future}),
        ("cancel_future", {"request_id": theirs.future}),
    ]
    for name, body in bodies:
        yield Sent(f"POST {API}/{name}", f"{API}/{name}", body)
    forward = f"{API}/forward_backward"
    data = message(theirs.tenant, 6, [datum([5, 6, 7])])
    yield Sent(f"POST {forward}", forward, data=data)
    yield Sent(f"GET {API}/samplers/{{id}}", f"{API}/samplers/{theirs.sampler}")
    runs = f"{API}/training_runs"
    yield Sent(f"GET {runs}/{{id}}", f"{runs}/{theirs.tenant}")
    yield Sent(f"GET {runs}/{{id}}/checkpoints", f"{runs}/{theirs.tenant}/checkpoints")
    saved = f"{runs}/{theirs.tenant}/checkpoints/weights/x"
    yield Sent(f"POST {API}/unload_model", f"{API}/unload_model", {"model_id": theirs.tenant})
    yield Sent(f"DELETE {runs}/{{id}}/checkpoints/{{use}}/{{name}}", saved)


def send(client: Client, key: str, sent: Sent) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    if sent.data is not None:
        headers["Content-Type"] = "application/x-protobuf"
    method = sent.route.partition(" ")[0]
    body = {"content": sent.data} if sent.data is not None else {"json": sent.json}
    return client.request(method, sent.path, headers=headers, **body)


def listed(client: Client, key: str) -> str:
    """Return all lists of a key as a text."""
    headers = {"Authorization": f"Bearer {key}"}
    paths = ("/v1/models", FILES, JOBS, f"{API}/training_runs", f"{API}/checkpoints")
    return "".join(client.get(path, headers=headers).text for path in paths)


def routes_of(client: Client) -> set[str]:
    """Return the method and the path of all routes of a client's server."""
    return {
        f"{method} {route.path}"
        for route in client.app.routes  # type: ignore[attr-defined]
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }


@pytest.mark.smoke
def test_no_key_reaches_the_data_of_another(model_folder: Path, tmp_path: Path):
    with serving(model_folder, tmp_path / "server", keys=(ANN, BOB)) as client:
        ann, bob = made(client, ANN), made(client, BOB)
        everything = [*requests(ann, bob)]
        assert {send(client, "no key", each).status_code for each in everything} == {401}
        assert {each.route for each in everything} == routes_of(client) - WITHOUT_IDS
        for each in everything:
            refused = send(client, BOB, each)
            # a judge is the base only; graders name its names
            expected = (400,) if each.route.endswith("graders/run") else (404, 410)
            assert refused.status_code in expected, (each, refused.status_code, refused.text)
            if each.data is None:
                error = refused.json()["error"]["message"]
                known = f"{each} {ann.weights if ann.tenant in str(each) else ''}"
                others = [id for id in ann if id not in known]
                assert not any(id in error for id in others), (each, error)
        seen = listed(client, BOB)
        assert not any(id in seen for id in ann)
        assert all(id in listed(client, ANN) for id in (ann.file, ann.job, ann.model, ann.weights))
        missing = {
            each.route
            for each in requests(ann, ann)
            if send(client, ANN, each).status_code in (404, 410)
        }
    # with her own key she reached all of it, except what an earlier request has deleted
    assert missing <= {"DELETE /v1/models/{name:path}"}
    kept = b"".join(path.read_bytes() for path in client.folder.rglob("*") if path.is_file())
    rows = sqlite3.connect(client.folder / "server.sqlite").execute("SELECT * FROM documents")
    kept += "".join(str(row) for row in rows).encode()
    assert not any(key.encode() in kept for key in (ANN, BOB))  # the keys themselves


WITHOUT_WORK = {
    *("GET /health", "GET /metrics"),
    *("embeddings", "rerank", "score", "classify", "audio/transcriptions"),
    *("client/config", "client/dynamic_config", "telemetry", "sessions/{id}/finish", "healthz"),
    *("cancel", "pause", "resume"),
}
"""Ends of routes with a constant reply or a single write; GET and DELETE of OpenAI's are, too."""


def has_work(route: str) -> bool:
    """Return whether the server computes a reply, and so needs the turn of the request's key."""
    method, path = route.split()
    is_read = method != "POST" and not path.startswith(API)
    return not (is_read or route.endswith(tuple(WITHOUT_WORK)))


def of_all_routes(client: Client) -> dict[str, Sent]:
    """Return a request to each route, with ids of nothing."""
    ids = Ids(*(f"file-{n}" for n in range(11)))
    sent = {each.route: each for each in requests(ids, ids)}
    form = b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\n{}\r\n--x--\r\n'
    for route in routes_of(client) - {*sent}:
        path = route.split()[1].replace("{id}", "x")
        sent[route] = Sent(route, path, {}, form if route == "POST /v1/files" else None)
    assert {*sent} == routes_of(client)
    return sent


class Turns:
    """Records who is served between the arrival and the turn of each piece of work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
        self.arrived, self.before, self.gate = Counter[str](), list[int](), threading.Event()
        counts: dict[int, Counter[str]] = {}
        since: dict[int, int] = {}
        put, take, run = Schedule.put, Schedule.take, Call.run

        def recorded_put(schedule: Schedule[Any], item: Any) -> None:
            served = counts.setdefault(id(schedule), Counter())
            if item.owner != first:
                since[id(item)] = served[first]
            self.arrived[item.owner] += 1
            put(schedule, item)

        def recorded_take(schedule: Schedule[Any], *args: Callable[[Any], bool]) -> Any:
            item = take(schedule, *args)
            if item is not None:
                served = counts[id(schedule)]
                served[item.owner] += 1
                if item.owner != first:
                    self.before.append(served[first] - since.pop(id(item)))
            return item

        def gated_run(call: Call) -> Callable[[], None]:
            assert call.owner != first or self.gate.wait(60)
            return run(call)

        monkeypatch.setattr(Schedule, "put", recorded_put)
        monkeypatch.setattr(Schedule, "take", recorded_take)
        monkeypatch.setattr(Call, "run", gated_run)


def test_no_key_delays_another_on_any_route(model_folder: Path, tmp_path: Path, monkeypatch):
    """One key sends requests to all routes before another chats: it waits for a single turn."""
    ann, bob = owner_of(ANN), owner_of(BOB)
    number = 3
    with serving(model_folder, tmp_path / "server", keys=(ANN, BOB)) as client:
        flood = of_all_routes(client)
        turns = Turns(monkeypatch, ann)
        client.app.state.worker.call(lambda: turns.gate.wait(60), ann)  # type: ignore[attr-defined]
        clients: list[threading.Thread] = []
        chat = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        path, statuses, unlike = "/v1/chat/completions", list[tuple[str, int]](), list[str]()

        def start(key: str, sent: Sent) -> threading.Thread:
            def run() -> None:
                statuses.append((key, send(client, key, sent).status_code))

            clients.append(threading.Thread(target=run))
            clients[-1].start()
            return clients[-1]

        for route, sent in sorted(flood.items()):
            arrived = turns.arrived[ann]
            new = [start(ANN, sent) for _ in range(number)]
            while turns.arrived[ann] < arrived + number and any(each.is_alive() for each in new):
                time.sleep(0.001)
            unlike += [route] * ((turns.arrived[ann] > arrived) != has_work(route))
        start(BOB, Sent(f"POST {path}", path, chat))
        while not turns.arrived[bob]:
            time.sleep(0.001)
        turns.gate.set()
        for thread in clients:
            thread.join()
    assert not unlike
    assert (BOB, 200) in statuses
    assert len(turns.before) >= 3  # its prompt, twice, and its completion
    assert max(turns.before) <= 1


def test_no_route_names_the_operator_s_folders(model_folder: Path, tmp_path: Path, monkeypatch):
    """Whatever fails in the work of a request, its message has no folder of the server."""
    paths = [tmp_path / "server" / "x.json", model_folder / "x.json", Path.home() / "x.json"]
    text = f"{', '.join(map(str, paths))} are damaged."

    def fail(call: Call) -> Callable[[], None]:
        return lambda: call.future.set_exception(ConfigError(text))

    with serving(model_folder, tmp_path / "server", keys=(ANN, BOB)) as client:
        every = of_all_routes(client)
        with monkeypatch.context() as patched:
            patched.setattr(Call, "run", fail)
            replies = {route: send(client, ANN, sent).text for route, sent in every.items()}
    shown = f"server/x.json, {model_folder.name}/x.json, x.json are damaged."
    assert {route for route in every if shown in replies[route]} == {*filter(has_work, every)}
    assert failure(ConfigError(text))["error"] == shown
    assert failure(ValueError(text))["error"] == f"ValueError: {shown}"
    own = "there is no model '/v1/x', nor /etc/passwd."  # texts of a client remain
    assert public(own) == own
