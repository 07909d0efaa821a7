"""Operations run once and in the order of their numbers, despite retries, delays and losses."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

from peftkit_server import worker
from peftkit_server.limits import Limits
from peftkit_server.tinker import api, futures, service
from peftkit_server.tinker.futures import Futures, OperationQueue, ReplyCache
from tests.helpers.serving import refusal
from tests.helpers.wire_client import Client, datum, message, read

DATA = [datum([5, 6, 7, 8]), datum([9, 10, 11])]


def test_a_later_chunk_waits_for_the_first_which_may_come_last(client):
    model, other = client.model(), client.model()
    expected = [other.forward([one])[0] for one in DATA]
    step = other.step()
    second = model.submit(DATA[1:], number=2)
    stepped = client.post(
        "optim_step", model_id=model.id, seq_id=3, adam_params={"learning_rate": 1e-2}
    )["request_id"]
    first = model.submit(DATA[:1], number=1)
    assert [read(client.retrieve(id))[0] for id in (first, second)] == expected
    assert client.retrieve(stepped) == step


def test_a_repeated_request_does_nothing_again(client):
    model, other = client.model(), client.model()
    bodies = [message(model.id, 1, DATA), message(model.id, 1, DATA[:1])]
    ids = {model.send(bodies[0]).json()["request_id"] for _ in range(3)}
    assert len(ids) == 1
    assert model.send(bodies[1]).status_code == 409
    step = {"model_id": model.id, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}}
    stepped = {client.post("optim_step", **step)["request_id"] for _ in range(2)}
    assert client.ask("optim_step", **{**step, "adam_params": {}}).status_code == 409
    other.forward(DATA)
    assert client.retrieve(stepped.pop()) == other.step()
    assert not stepped
    made = {"session_id": client.session, "model_seq_id": 7, "base_model": "base"}
    again = [client.post("create_model", **made) for _ in range(2)]
    assert again[0] == again[1]
    assert client.ask("create_model", **made, lora_config={"rank": 3}).status_code == 409
    model.next = 3
    assert model.forward(DATA)[0] == other.forward(DATA)[0]


def test_a_repeated_session_is_the_same_by_its_key(client):
    def create(key: str, **more: Any) -> Any:
        body = {"tags": [], "user_metadata": None, "sdk_version": "1", **more}
        headers = {"X-Idempotency-Key": key}
        return client.http.post("/api/v1/create_session", json=body, headers=headers)

    assert create("a").json() == create("a").json() != create("b").json()
    assert create("a", tags=["x"]).status_code == 409


def test_an_operation_s_error_is_its_result_and_the_next_one_runs(client):
    model = client.model()
    wrong = [
        (DATA, "no_such_loss"),
        (DATA, "ppo"),
        ([datum([5, 6, 999999])], "cross_entropy"),
        ([], "cross_entropy"),
    ]
    for data, loss in wrong:
        failed = model.forward(data, loss)
        assert failed["category"] == "user"
    failed = model.call("optim_step", adam_params={"learning_rate": -1.0})
    assert failed == {"error": failed["error"], "category": "user"}
    assert "learning_rate" in failed["error"]
    assert "path" in model.call("save_weights", path="../../etc/passwd")["error"]
    assert isinstance(model.forward(DATA)[0], float)
    failed = model.forward(DATA, "stable_reinforce")
    assert 'loss_fn="importance_sampling"' in failed["error"]


def test_a_lost_operation_fails_later_ones(client, monkeypatch):
    model = client.model()
    waiting = model.submit(DATA, number=2)
    monkeypatch.setattr(api, "HOLD_SECONDS", 0.05)
    response = client.ask("retrieve_future", request_id=waiting)
    assert (response.status_code, response.json()["type"]) == (408, "try_again")
    monkeypatch.setattr(futures, "LOST_SECONDS", 0.0)
    failed = client.retrieve(waiting)
    assert failed["category"] == "user"
    assert "operation 1 of this model did not arrive" in failed["error"]
    late = read(client.retrieve(model.submit(DATA, number=1)))
    assert "arrived too late" in late["error"]
    model.next = 3
    assert isinstance(model.forward(DATA)[0], float)
    assert "out of order" in refusal(model.send(message(model.id, 2_000_000_000, DATA)))["message"]


def test_a_lost_client_frees_its_queue(client, monkeypatch):
    gone, other = client.model(), client.model()
    waiting = gone.submit(DATA, number=2)
    monkeypatch.setattr(futures, "LOST_SECONDS", 0.0)
    other.forward(DATA)
    monkeypatch.setattr(futures, "LOST_SECONDS", 100.0)
    assert "did not arrive" in client.retrieve(waiting)["error"]


def test_an_idle_model_makes_room_for_new(serve, monkeypatch):
    client = Client(serve(limits=Limits(tinker_models=2)))
    first, second = client.model(), client.model()
    asked = {"session_id": client.session, "base_model": "base", "lora_config": {"rank": 2}}
    refused = client.ask("create_model", model_seq_id=7, **asked)
    assert (refused.status_code, "no room" in refused.text) == (429, True)
    monkeypatch.setattr(service, "IDLE_SECONDS", 0.0)
    second.forward(DATA)
    assert client.result("create_model", model_seq_id=8, **asked)["model_id"]
    assert client.ask("get_info", model_id=first.id).status_code == 404
    assert client.post("get_info", model_id=second.id)["lora_rank"] == 4


class Queue:
    """Replaces the worker: `run` runs the next operation."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Any, Future[Any]]] = []

    def call(self, run: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((run, future))
        return future

    def run(self) -> None:
        run, future = self.waiting.pop(0)
        future.set_result(run())


def test_a_model_has_one_operation_in_the_queue_at_a_time():
    queue, told = Queue(), list[int]()
    order = OperationQueue(queue.call, Futures())
    for number in (2, 0, 1):
        order.submit(number, str(number), "", lambda number=number: told.append(number) or {}, 1)
    for _ in range(3):
        assert len(queue.waiting) == 1
        queue.run()
    assert told == [0, 1, 2]


def test_a_full_queue_refuses_all_but_dependencies():
    queue, kept = Queue(), Futures(Limits(operation_bytes=100))
    order = OperationQueue(queue.call, kept)
    order.submit(1, "", "", dict, 60)
    order.submit(2, "", "", dict, 40)
    with pytest.raises(futures.RequestError) as refused:
        order.submit(3, "", "", dict, 1)
    assert refused.value.status == 429
    order.submit(0, "", "", dict, 60)
    for _ in range(3):
        queue.run()
    order.submit(3, "", "", dict, 99)


def test_unloading_fails_queued_operations(serve, monkeypatch):
    client = Client(serve(limits=Limits(operation_bytes=100)))
    monkeypatch.setattr(api, "HOLD_SECONDS", 1.0)
    model, other = client.model(), client.model()
    waiting = model.submit(DATA, number=2)
    assert other.send(message(other.id, 2, DATA)).status_code == 429
    client.result("unload_model", model_id=model.id)
    response = client.ask("retrieve_future", request_id=waiting)
    assert response.status_code == 200
    assert "no longer in memory" in response.json()["error"]
    assert other.send(message(other.id, 2, DATA)).status_code == 200


def test_a_closed_order_takes_nothing_more():
    queue = Queue()
    order = OperationQueue(queue.call, Futures())
    order.close(futures.RequestError("it is gone."))
    with pytest.raises(futures.RequestError, match="gone"):  # from another request's thread
        order.submit(0, "", "", dict, 1)
    assert not queue.waiting


def test_a_busy_model_stays_loaded(client, monkeypatch):
    model = client.model()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "MAX_OPERATIONS", 0)
        assert client.ask("unload_model", model_id=model.id).status_code == 429
    assert model.forward(DATA)[1]


def test_queued_operations_are_served(client, monkeypatch):
    model, gate = client.model(), threading.Event()
    client.http.app.state.worker.call(lambda: gate.wait(60))
    monkeypatch.setattr(worker, "MAX_OPERATIONS", 1)
    sent = model.submit(DATA)
    gate.set()
    assert isinstance(read(client.retrieve(sent))[0], float)


def test_the_oldest_results_go():
    kept = Futures(Limits(result_bytes=1000))
    all_of_them = [kept.new("ann") for _ in range(4)]
    for pending in all_of_them:
        pending.finish(b"x" * 400)
    assert kept.get(all_of_them[-1].id, "ann").future.result() == b"x" * 400
    for id, owner, status in (
        (all_of_them[0].id, "ann", 404),
        (all_of_them[-1].id, "bob", 404),
        ("another-1", "ann", 410),
        ("nothing", "ann", 404),
    ):
        with pytest.raises(futures.RequestError) as refused:
            kept.get(id, owner)
        assert refused.value.status == status


def test_replies_to_the_oldest_requests_are_forgotten(monkeypatch):
    monkeypatch.setattr(futures, "MAX_REPLIES", 2)
    cache: ReplyCache[int] = ReplyCache()
    for number in range(3):
        cache.put(number, "a", number)
    assert [cache.get(number, "a") for number in range(3)] == [None, 1, 2]


def test_operations_that_come_at_once_keep_their_order():
    told: list[int] = []
    lock = threading.Lock()

    def work(number: int) -> dict[str, Any]:
        with lock:
            told.append(number)
        return {}

    kept = Futures()
    with ThreadPoolExecutor(1) as worker, ThreadPoolExecutor(8) as clients:
        order = OperationQueue(worker.submit, kept)
        sent = [
            clients.submit(order.submit, n, "", "", lambda n=n: work(n), 1)
            for n in sorted(range(200), key=lambda n: n * 37 % 101)
        ]
        for each in sent:
            kept.get(each.result(), "").future.result(timeout=60)
    assert told == list(range(200))
