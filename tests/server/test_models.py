"""Clients' models: visible to their owner, loaded on request, available after a restart."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
from starlette.testclient import TestClient

from peftkit.inference.bank import AdapterBank
from peftkit.methods.lora import LoRA
from peftkit.settings import BaseConfig
from peftkit_server import models as published
from peftkit_server.access import owner_of
from peftkit_server.app import make_app
from peftkit_server.models import Models
from peftkit_server.refusals import RequestError
from peftkit_server.store import Store
from peftkit_server.training import TrainingOptions
from tests.helpers.bank import tiny_base, write_adapter

HERE = "http://127.0.0.1:8000"
ANN, BOB = "key-of-ann", "key-of-bob"
PUBLIC = "ft:base:local:orders:3f0c9a1b"


@pytest.fixture
def folder(llama: Any, tmp_path: Path) -> Path:
    return write_adapter(llama, LoRA(rank=3, alpha=64), tmp_path / "made", 5)


def options(tmp_path: Path, *names: str) -> TrainingOptions:
    return TrainingOptions(folder=tmp_path / "state", base=BaseConfig(model="tiny"), names=names)


def ask(client: TestClient, model: str, **headers: str) -> Any:
    body = {"model": model, "prompt": "the quick", "max_tokens": 5}
    return client.post("/v1/completions", json=body, headers=headers)


def test_published_adapters_belong_to_an_owner(llama, tokenizer, folder, tmp_path):
    store = Store(tmp_path / "state")
    Models(AdapterBank(tiny_base(llama, tokenizer)), store).publish(PUBLIC, folder, owner_of(ANN))
    store.close()
    bank = AdapterBank(tiny_base(llama, tokenizer), {})
    app = make_app(bank, keys=[ANN, BOB], training=options(tmp_path, "Qwen/Qwen3-8B"))
    with TestClient(app, base_url=HERE) as client:
        ann, bob = {"Authorization": f"Bearer {ANN}"}, {"X-API-Key": BOB}
        listed = [
            [one["id"] for one in client.get("/v1/models", headers=headers).json()["data"]]
            for headers in (ann, bob)
        ]
        assert listed == [["base", "Qwen/Qwen3-8B", PUBLIC], ["base", "Qwen/Qwen3-8B"]]
        assert client.get(f"/v1/models/{PUBLIC}", headers=ann).json()["parent"] == "base"
        mine, base = ask(client, PUBLIC, **ann), ask(client, "Qwen/Qwen3-8B", **ann)
        assert mine.status_code == base.status_code == 200
        assert mine.json()["choices"][0]["text"] != base.json()["choices"][0]["text"]
        refused = ask(client, PUBLIC, **bob)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert refused.json()["error"]["message"].count(PUBLIC) == 1  # the requested name
        assert client.get("/v1/models").status_code == 401


def test_published_adapters_are_found_by_id(llama, tokenizer, folder, tmp_path):
    store, bank = Store(tmp_path / "state"), AdapterBank(tiny_base(llama, tokenizer))
    body = {"name": PUBLIC, "inner": "published-1", "folder": str(folder)}
    store.put(published.KIND, PUBLIC, body, owner="ann", parent="published-1")
    models = Models(bank, store)
    models.load(models.inner(PUBLIC, "ann"))
    assert bank.names == ("published-1",)
    assert models.listed("bob") == ["base"]


def test_few_of_many_published_adapters_are_in_memory(
    llama, tokenizer, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(published, "MAX_LOADED", 2)
    bank = AdapterBank(tiny_base(llama, tokenizer))
    models = Models(bank, Store(tmp_path / "state"))
    inner = []
    for number in range(4):
        models.publish(f"m{number}", folder, "")
        inner.append(models.inner(f"m{number}"))
    for name in (inner[0], inner[1], inner[0], inner[2], None):
        models.load(name)
    assert bank.names == (inner[0], inner[2])
    assert models.listed() == ["base", "m0", "m1", "m2", "m3"]
    models.load(inner[1])  # again
    assert inner[1] in bank.names
    models._store.delete(published.KIND, "m3")
    with pytest.raises(RequestError, match="was deleted"):
        models.load(inner[3])
    with pytest.raises(RequestError, match="no model 'm3'"):
        models.inner("m3")


def test_an_adapter_that_is_being_loaded_is_not_everybodys(
    llama, tokenizer, folder, tmp_path, monkeypatch
):
    bank = AdapterBank(tiny_base(llama, tokenizer))
    models = Models(bank, Store(tmp_path / "state"))
    models.publish("m", folder, "ann")
    add, seen = bank.add, list[str]()

    def slow(name: str, path: Any) -> None:
        add(name, path)
        seen.extend(models.listed("bob"))  # as a request in another thread could
        if len(seen) > 1:
            raise MemoryError

    monkeypatch.setattr(bank, "add", slow)
    models.load(models.inner("m", "ann"))
    assert seen == ["base"]
    bank.drop(bank.names[0])
    models = Models(bank, models._store)
    with pytest.raises(MemoryError):
        models.load(models.inner("m", "ann"))
    bank.drop(bank.names[0])
    monkeypatch.setattr(bank, "add", add)
    models.load(models.inner("m", "ann"))  # a failed load is not recorded as loaded
    assert bank.names == (models.inner("m", "ann"),)


def test_an_adapter_that_leaves_the_bank_is_not_everybodys(
    llama, tokenizer, folder, tmp_path, monkeypatch
):
    models = Models(AdapterBank(tiny_base(llama, tokenizer)), Store(tmp_path / "state"))
    models.publish("m", folder, "ann")
    models.load(inner := models.inner("m", "ann"))
    names = AdapterBank.names.fget  # type: ignore[attr-defined]

    def slow(bank: AdapterBank) -> Any:
        found = names(bank)
        monkeypatch.setattr(AdapterBank, "names", property(names))
        models._make_room()  # as the worker could
        return found

    monkeypatch.setattr(published, "MAX_LOADED", 0)
    monkeypatch.setattr(AdapterBank, "names", property(slow))
    assert models.listed("bob") == ["base"]
    with pytest.raises(RequestError, match="there is no model"):
        models.inner(str(inner), "bob")


def test_the_operators_adapters_are_everybodys(bank, tmp_path):
    app = make_app(bank, keys=[ANN, BOB], training=options(tmp_path))
    with TestClient(app, base_url=HERE) as client:
        for key in (ANN, BOB):
            assert ask(client, "one", **{"X-API-Key": key}).status_code == 200
