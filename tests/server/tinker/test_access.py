"""No request breaks the server."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

from peftkit_server.limits import Limits
from peftkit_server.tinker import api, rows, wire
from peftkit_server.tinker.bodies import OperationBody
from tests.helpers.wire_client import API, Client, datum, message

DATA = [datum([5, 6, 7, 8])]
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}


WRONG: list[Any] = [None, True, -1, 1 << 70, 1e308, "", "a" * 300, "../../etc/passwd", [], {}, [[]]]


def hostile(client: Client, model_id: str, sampler: str) -> Iterator[tuple[str, bytes, str]]:
    """Yield hostile requests: path, body and type."""
    session = {"session_id": client.session}
    new_model = {**session, "model_seq_id": 50, "base_model": "base"}
    saved = {**session, "model_seq_id": 51, "path": "tinker://x/weights/y"}
    sample = {"sampling_session_id": sampler, "seq_id": 50, "prompt": PROMPT, "num_samples": 1}
    bodies: dict[str, dict[str, Any]] = {
        "create_session": {"tags": [], "sdk_version": "1"},
        "session_heartbeat": session,
        "create_model": {**new_model, "lora_config": {"rank": 4}},
        "get_info": {"model_id": model_id},
        "optim_step": {"model_id": model_id, "seq_id": 4000, "adam_params": {"beta1": 0.9}},
        "save_weights": {"model_id": model_id, "seq_id": 4001, "path": "x"},
        "save_weights_for_sampler": {"model_id": model_id, "seq_id": 4002, "path": "x"},
        "load_weights": {**saved, "optimizer": True},
        "create_sampling_session": {**session, "sampling_session_seq_id": 50, "base_model": "base"},
        "asample": {**sample, "sampling_params": {"max_tokens": 1}},
        "retrieve_future": {"request_id": "x"},
        "cancel_future": {"request_id": "x"},
        "weights_info": {"tinker_path": "tinker://a/weights/../../x"},
        "unload_model": {"model_id": "nobody:train:0"},
    }
    import json

    for what, body in bodies.items():
        for name in body:
            for wrong in WRONG:
                yield what, json.dumps({**body, name: wrong}).encode(), "application/json"
        yield what, json.dumps({**body, "surprise": 1}).encode(), "application/json"
        for data in (b"", b"[]", b"{", b"\xff\xfe", b'{"a":' * 500, b'{"type":NaN}'):
            yield what, data, "application/json"
    proto = "application/x-protobuf"
    whole = message(model_id, 4003, DATA)
    random.seed(0)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(3):
            data[random.randrange(len(data))] = random.randrange(256)
        yield "forward_backward", bytes(data[: random.randrange(1, len(data))]), proto
        yield "forward_backward", bytes(data), proto
    for wrong in (
        message(model_id, -5, DATA),
        message("../../x", 1, DATA),
        message(model_id, 2_000_000_000, DATA),
        message(model_id, 4004, [([5], {"target_tokens": wire.torch.tensor([[[1]]])})]),
        message(model_id, 4005, [([], {})] * 5000),
        b"\x1a\x00" * 500_000,
    ):
        yield "forward_backward", wrong, proto
    yield "forward_backward", b'{"model_id": "x"}', "application/json"


def test_hostile_requests_are_refused_and_nothing_is_lost(client):
    model = client.model()
    before = model.forward(DATA)[0]
    path = model.call("save_weights", path="kept")["path"]
    sampler = client.sampler()
    number = 0
    for what, data, kind in hostile(client, model.id, sampler):
        response = client.http.post(f"{API}/{what}", content=data, headers={"Content-Type": kind})
        number += 1
        assert response.status_code < 500, (what, data[:200], response.text)
        if response.status_code != 200:
            assert response.status_code in (400, 404, 409, 410, 415), (what, response.text)
            assert len(response.json()["error"]["message"]) > 10
        else:
            assert isinstance(response.json(), dict)
    for method, url in (
        ("GET", "samplers/..%2f..%2fetc"),
        ("GET", "training_runs/%00"),
        ("GET", "checkpoints?limit=-1"),
        ("GET", "checkpoints?offset=9999999999999999999999"),
        ("GET", "nothing"),
        ("POST", "create_custom_loss"),
        ("DELETE", f"training_runs/{model.id}/checkpoints/weights/..%2f..%2fx"),
        ("DELETE", f"training_runs/{model.id}/checkpoints/state/kept"),
    ):
        response = client.http.request(method, f"{API}/{url}")
        number += 1
        assert 400 <= response.status_code < 500, url
    assert number > 500
    assert model.forward(DATA)[0] == before
    assert client.load(path, optimizer=True).forward(DATA)[0] == before


def test_long_or_compressed_bodies_fail(serve):
    client = Client(serve(limits=Limits(tinker_body=300, tinker_datums=50)))
    model = client.model()
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
    body = message(model.id, 1, DATA)
    sent = client.http.post(f"{API}/forward_backward", content=body, headers=headers)
    assert sent.status_code == 415
    assert model.send(body).status_code == 413
    assert client.ask("create_session", tags=["x" * 300]).status_code == 413


def test_bodies_are_checked_off_the_loop(client, monkeypatch):
    def beside(read: Any) -> Any:
        def reads(*args: Any) -> Any:
            if OperationBody not in args:  # two numbers
                with pytest.raises(RuntimeError, match="no running event loop"):
                    asyncio.get_running_loop()
            return read(*args)

        return reads

    for name in ("fields_of", "validated"):
        monkeypatch.setattr(api, name, beside(getattr(api, name)))
    model = client.model()
    assert model.step()["metrics"]
    assert client.sample(client.sampler(), [5, 6, 7]).sequences


def test_sparse_tensors_have_a_dense_bound(serve):
    client = Client(serve(limits=Limits(tensor_bytes=200_000)))
    model = client.model()
    body = wire.MESSAGES["ForwardBackward"](model_id=model.id, seq_id=1, loss="cross_entropy")
    for _ in range(3):
        one = body.data.add()
        one.chunks.add().text.tokens = wire.bytes_of([5] * 64, torch.int32)
        for name, dtype in (("target_tokens", torch.int64), ("weights", torch.float32)):
            tensor = one.inputs[name]
            tensor.dtype = wire.NUMBERS[dtype]
            tensor.shape.extend((64, 100))
            tensor.sparse.rows = wire.bytes_of([0] * 65, torch.int64)
    data = body.SerializeToString()
    assert len(data) < 10_000
    failed = client.retrieve(model.send(data).json()["request_id"])
    assert "more than 200,000 bytes" in failed["error"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["target_tokens", *(f"x{i}" for i in range(20))], "unknown: x"),
        (["target_tokens", "weights"], "more than 268,435,456 bytes"),
    ],
)
def test_datums_are_checked_before_a_tensor_is_made(client, monkeypatch, names, message):
    model = client.model()
    body = wire.MESSAGES["ForwardBackward"](model_id=model.id, seq_id=1, loss="cross_entropy")
    for _ in range(4):
        one = body.data.add()
        one.chunks.add().text.tokens = wire.bytes_of([5], torch.int32)
        for name in names:
            tensor = one.inputs[name]
            tensor.dtype = wire.NUMBERS[torch.int64]
            tensor.shape.extend((1, wire.MAX_CELLS))
            tensor.sparse.rows = wire.bytes_of([0, 0], torch.int64)
    made: list[str] = []
    monkeypatch.setattr(rows, "tensor_of", lambda tensor, name: made.append(name))
    failed = client.retrieve(model.send(body.SerializeToString()).json()["request_id"])
    assert message in failed["error"]
    assert not made


def test_a_failure_of_the_server_is_no_5xx(client, monkeypatch):
    model = client.model()

    def broken(*args: Any, **named: Any) -> None:
        raise RuntimeError("broken")

    service = "peftkit_server.tinker.service"
    with monkeypatch.context() as patch:
        patch.setattr(f"{service}.datums_of", broken)
        response = model.send(message(model.id, 1, DATA))
        assert response.status_code == 400
        assert "the server failed: RuntimeError: broken" in response.text
    with monkeypatch.context() as patch:
        patch.setattr("peftkit_server.tinker.learner.Learner.forward", broken)
        assert model.forward(DATA) == {"error": "RuntimeError: broken", "category": "server"}
    assert isinstance(model.forward(DATA)[0], float)


def test_what_clients_read_of_the_server(client):
    assert client.post("client/config", sdk_version="0.25.0")["create_model_via_load_weights"]
    assert client.post("client/dynamic_config", sdk_version="1") == {}
    assert client.post("telemetry", events=[]) == {"status": "accepted"}
    assert client.post(f"sessions/{client.session}/finish", reason={"type": "x"}) == {}
    assert client.get("healthz") == {"status": "ok"}
    (model,) = client.get("get_server_capabilities")["supported_models"]
    assert (model["model_name"], model["trainable"]) == ("base", True)
    made = client.model(rank=5)
    info = client.post("get_info", model_id=made.id)
    assert (info["lora_rank"], info["model_name"]) == (5, "base")
    sampler = client.sampler()
    expected = {"sampler_id": sampler, "base_model": "base", "model_path": None}
    assert client.get(f"samplers/{sampler}") == expected
    wrong = client.ask(
        "create_model", session_id=client.session, model_seq_id=8, base_model="Qwen/Qwen3-8B"
    )
    assert wrong.status_code == 400
    assert "--as NAME" in wrong.text
    assert client.result("unload_model", model_id=made.id)["model_id"] == made.id
    assert client.ask("get_info", model_id=made.id).status_code == 404
    assert "nothing to train" in str(
        client.result(
            "create_model",
            session_id=client.session,
            model_seq_id=9,
            base_model="base",
            lora_config={"train_mlp": False, "train_attn": False, "train_unembed": False},
        )
    )
