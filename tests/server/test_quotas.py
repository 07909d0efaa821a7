"""No key holds what the keys share, and no key reaches the data of another."""

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from peftkit.errors import ConfigError
from peftkit.inference.engine import Limits as EngineLimits
from peftkit.inference.engine import Request
from peftkit.inference.sampling import Sampling
from peftkit_server import access
from peftkit_server.app import make_app
from peftkit_server.batch import admitted
from peftkit_server.generation import Generation
from peftkit_server.limits import DEFAULTS, NAMES, Limits, parse_limits
from peftkit_server.quotas import Intake
from peftkit_server.schedule import Schedule
from tests.helpers.serving import HERE, refusal, scope_of

ANN, BOB = ({"Authorization": f"Bearer {name}"} for name in ("key-ann", "key-bob"))
KEYS = ("key-ann", "key-bob")
CHAT: Any = {"model": "base", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@contextmanager
def blocked(app: Any) -> Iterator[None]:
    """Keep the worker from its work within the context."""
    gate = threading.Event()
    app.state.worker.call(lambda: gate.wait(60))
    try:
        yield
    finally:
        gate.set()


def test_limits_are_set_by_name():
    values = parse_limits(["key_files=50", "key-bytes=1.5k", "key_share=0.25", "upload_bytes=2M"])
    assert values == {
        "key_files": 50,
        "key_bytes": 1536,
        "key_share": 0.25,
        "upload_bytes": 2 << 20,
    }
    assert Limits(**values, num_keys=2).share(100) == 25
    assert Limits(num_keys=1).share(100) == DEFAULTS.share(100) == 100
    assert Limits(num_keys=2).share(1) == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("key_file=5", "there is no limit 'key_file'"),
        ("key_file=5", "key_files"),
        ("max_batch=5", "--max-batch 5"),
        ("key_files=0", "whole number"),
        ("key_files=1.5", "whole number"),
        ("key_files", "whole number"),
        ("key_files=-3", "whole number"),
        ("key_files=1e9", "whole number"),
        ("key_share=1.5", "from 0 to 1"),
        ("key_share=0", "from 0 to 1"),
    ],
)
def test_a_wrong_limit_is_refused(setting, message):
    with pytest.raises(ConfigError) as refused:
        parse_limits([setting])
    assert message in str(refused.value)
    assert all(name in str(refused.value) for name in NAMES) or "there is no" not in message


def test_the_page_of_limits_lists_all_of_them():
    text = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", text, re.MULTILINE)
    assert [name for name, _ in rows] == list(NAMES)
    assert {name: float(value) for name, value in rows} == {
        name: getattr(DEFAULTS, name) for name in NAMES
    }


@pytest.mark.smoke
def test_one_key_leaves_places_in_the_queue(bank):
    app = make_app(bank, keys=KEYS, limits=Limits(max_batch=2, max_waiting=4, key_share=0.5))
    statuses: list[int] = []
    with TestClient(app, base_url=HERE) as client:

        def send(headers: dict[str, str]) -> None:
            statuses.append(
                client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code
            )

        with blocked(app):
            threads = [threading.Thread(target=send, args=(ANN,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            while app.state.worker.batch.num_waiting < 3:  # half of the queue, and of the batch
                time.sleep(0.01)
            error = refusal(client.post("/v1/chat/completions", json=CHAT, headers=ANN), 429)
            assert error["code"] == "key_share"
            assert "Try again" in error["message"]
            threads.append(threading.Thread(target=send, args=(BOB,)))
            threads[-1].start()
            while app.state.worker.batch.num_waiting < 4:
                time.sleep(0.01)
        for thread in threads:
            thread.join()
    assert statuses == [200] * 4


def generation(owner: str, tokens: int = 2) -> Generation:
    request = Request([1], Sampling(max_new_tokens=tokens - 1), 0)
    return Generation(request, lambda output: None, owner=owner)


def waiting(*generations: Generation) -> Schedule[Generation]:
    queue: Schedule[Generation] = Schedule()
    for each in generations:
        queue.put(each)
    return queue


def half(total: int) -> int:
    return total // 2


def test_one_key_leaves_places_in_the_batch():
    ann, bob = [generation("ann") for _ in range(5)], [generation("bob")]
    queue = waiting(*ann, *bob)
    assert admitted(queue, [], EngineLimits(rows=4), half) == [ann[0], *bob, ann[1]]
    assert admitted(queue, ann[:1], EngineLimits(rows=4), half) == ann[2:3]
    assert [*queue] == ann[3:]
    assert admitted(queue, [], EngineLimits(rows=4), lambda total: total) == ann[3:]
    ann[0].is_cancelled = True
    assert admitted(waiting(ann[0]), [], EngineLimits(rows=4), half) == []


def test_keys_fill_the_batch_in_turn():
    owners = [f"key {n}" for n in range(5)]
    queue = waiting(*(generation(owner) for owner in owners for _ in range(9)))
    for turn in range(15):  # each completion ends before the next begins
        (new,) = admitted(queue, [], EngineLimits(rows=1), half_or_one)
        assert new.owner == owners[turn % 5]


def half_or_one(total: int) -> int:
    return max(1, total // 2)


def test_one_key_leaves_memory_for_completions():
    ann, bob = [generation("ann", 30) for _ in range(3)], [generation("bob", 80)]
    queue = waiting(*ann, *bob)
    # a single large one is no error
    assert admitted(queue, [], EngineLimits(rows=8, tokens=100), half) == [ann[0], *bob]
    assert [*queue] == ann[1:]


def test_the_completions_of_two_keys_end_with_shares(bank):
    app = make_app(bank, keys=KEYS, limits=Limits(max_batch=2, max_waiting=8, key_share=0.5))
    body = {**CHAT, "n": 2, "max_tokens": 8}
    with TestClient(app, base_url=HERE) as client:
        both = [client.post("/v1/chat/completions", json=body, headers=key) for key in (ANN, BOB)]
    first, second = (each.json()["choices"] for each in both)
    assert len(first) == 2
    assert first == second


def test_open_requests_of_a_key_are_bounded(bank):
    app = make_app(bank, keys=KEYS, limits=Limits(key_requests=1))
    with TestClient(app, base_url=HERE) as client, blocked(app):
        body = {**CHAT, "stream": True}
        thread = threading.Thread(
            target=client.post,
            args=("/v1/chat/completions",),
            kwargs={"json": body, "headers": ANN},
        )
        thread.start()
        while app.state.worker.batch.num_waiting < 1:
            time.sleep(0.01)
        refused = client.get("/v1/models", headers=ANN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_requests")
        assert client.get("/v1/models", headers=BOB).status_code == 200
        assert client.get("/health").status_code == 200
    thread.join()


def test_a_body_that_does_not_arrive_ends_its_request(bank):
    sent: list[Any] = []

    async def request() -> None:
        app = make_app(bank, limits=Limits(body_seconds=1, body_rate=1 << 30))
        parts = iter([{"type": "http.request", "body": b'{"model"', "more_body": True}])

        async def receive() -> Any:
            for part in parts:
                return part
            await asyncio.sleep(60)

        async def send(message: Any) -> None:
            sent.append(message)

        began = time.monotonic()
        await asyncio.wait_for(app(scope_of("/v1/chat/completions"), receive, send), 30)
        assert time.monotonic() - began < 20

    asyncio.run(request())
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert b"did not arrive in time" in sent[1]["body"]


def test_a_key_is_compared_with_all_keys_in_constant_time(monkeypatch):
    compared: list[bytes] = []

    def constant_time(sent: bytes, key: bytes) -> bool:
        compared.append(key)
        return compare_digest(sent, key)

    compare_digest = access.hmac.compare_digest
    monkeypatch.setattr(access.hmac, "compare_digest", constant_time)
    gate = access.Gate(lambda *_: None, ["first", "second"])
    for sent, is_right in (("first", True), ("second", True), ("fir", False), ("", False)):
        compared.clear()
        owner = gate._owner(Headers({"authorization": f"Bearer {sent}"}))
        assert isinstance(owner, str) == is_right
        assert compared == [b"first", b"second"]


def test_a_steady_upload_has_more_time():
    received: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while not received or received[-1]["more_body"]:
            received.append(await receive())

    async def request() -> None:
        sizes = iter(range(5, -1, -1))

        async def receive() -> Any:
            await asyncio.sleep(0.3)
            return {"type": "http.request", "body": b"x" * 10, "more_body": next(sizes) > 0}

        limits = Limits(body_seconds=1, body_rate=10)
        scope = {"type": "http", "state": {"owner": ""}}
        await Intake(app, limits)(scope, receive, lambda message: None)  # type: ignore[arg-type]

    asyncio.run(request())
    assert len(received) == 6


def test_browsers_may_send_a_key_and_nothing_without_one(bank):
    preflight = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    with TestClient(make_app(bank, keys=KEYS), base_url=HERE) as client:
        allowed = client.options("/v1/chat/completions", headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "*"
        origin = {"Origin": "https://app.example"}
        assert client.get("/v1/models", headers=origin).status_code == 401
    with TestClient(make_app(bank), base_url=HERE) as client:
        assert client.options("/v1/chat/completions", headers=preflight).status_code == 403
