"""Saved weights are PEFT folders: training resumes bit-equal, and paths survive a restart."""

from typing import Any

import pytest
import torch

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

from peftkit.formats.peft.load import load_adapter
from peftkit.model.modes import take_off
from peftkit_server import app
from peftkit_server.tinker import weights, wire
from tests.helpers.tinker import CE_DATA, MIXED_RANKS, train_steps
from tests.helpers.wire_client import API, Client, datum


@pytest.mark.smoke
@pytest.mark.parametrize("config", MIXED_RANKS[:2])
def test_a_model_resumes_from_its_state_bit_equal(client, config):
    model = client.model(**config)
    train_steps(model, 2)
    path = model.call("save_weights", path="half-way")["path"]
    assert path == f"tinker://{model.id}/weights/half-way"
    expected = train_steps(model, 2)
    assert train_steps(client.load(path, optimizer=True), 2) == expected
    without = train_steps(client.load(path, optimizer=False), 2)
    assert without[:2] == expected[:2]
    assert without != expected
    into = client.model(**config)
    assert into.call("load_weights", path=path, optimizer=True)["path"] == path
    assert train_steps(into, 2) == expected
    assert "first operation" in into.call("load_weights", path=path, optimizer=True)["error"]
    other = client.model(rank=1)
    assert "does not fit" in other.call("load_weights", path=path, optimizer=True)["error"]
    info = client.post("weights_info", tinker_path=path)
    assert (info["lora_rank"], info["base_model"]) == (config["rank"], "base")
    assert info["train_mlp"] == config.get("train_mlp", True)


def flip_bit(path):
    raw = bytearray(path.read_bytes())
    raw[-6] ^= 32
    path.write_bytes(raw)


@pytest.mark.smoke
def test_damaged_weights_are_not_loaded(client, tmp_path):
    model = client.model()
    train_steps(model, 1)
    path = model.call("save_weights", path="x")["path"]
    (folder,) = (tmp_path / "state" / "tinker" / "weights").iterdir()

    def load(*, optimizer):
        return client.model().call("load_weights", path=path, optimizer=optimizer)

    flip_bit(folder / "optimizer.safetensors")
    assert "is damaged" in load(optimizer=True)["error"]
    assert load(optimizer=False)["path"] == path
    (folder / "optimizer.safetensors").unlink()
    assert "is missing" in load(optimizer=True)["error"]
    flip_bit(folder / "adapter_model.safetensors")
    assert "sha256 differs" in load(optimizer=False)["error"]


@pytest.mark.smoke
def test_weights_of_another_base_are_not_loaded(serve, llama):
    client = Client(serve())
    model = client.model()
    train_steps(model, 1)
    path = model.call("save_weights", path="x")["path"]
    take_off(llama)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.add_(0.1)
    client = Client(serve())
    failed = client.model().call("load_weights", path=path, optimizer=False)
    assert "trained on another base" in failed["error"]


def test_weights_of_a_sampler_have_no_optimizer_to_go_on_with(client):
    model, into = client.model(), client.model()
    before = model.call("save_weights", path="fresh")["path"]
    loaded = client.load(before, optimizer=True)  # no optimizer state yet
    assert loaded.forward(CE_DATA)
    train_steps(model, 1)
    path = model.call("save_weights_for_sampler", path="x")["path"]
    place = {"session_id": client.session, "model_seq_id": 9}
    refused = client.ask("load_weights", **place, path=path, optimizer=True)
    assert refused.status_code == 400
    assert "saved without an optimizer" in refused.text
    failed = into.call("load_weights", path=path, optimizer=True)
    assert "saved without an optimizer" in failed["error"]
    assert client.load(path, optimizer=False).forward(CE_DATA)[0] == model.forward(CE_DATA)[0]


def test_peft_and_peftkit_load_saved_weights(client, llama, tmp_path):
    model = client.model(rank=3, train_unembed=True)
    train_steps(model, 2)
    _, rows = model.forward(CE_DATA)
    model.call("save_weights", path="x")
    (folder,) = (tmp_path / "state" / "tinker" / "weights").iterdir()
    assert {file.name for file in folder.iterdir()} == {
        *("adapter_config.json", "adapter_model.safetensors", "peftkit.json"),
        "optimizer.safetensors",
    }

    def log_probs(loaded: Any) -> torch.Tensor:
        ids, inputs = CE_DATA[0]
        with torch.no_grad():
            found = loaded(torch.tensor([ids])).logits[0].log_softmax(-1)
        return found.gather(1, inputs["target_tokens"][:, None])[:, 0]

    for notes in ("with peftkit's notes", "as PEFT reads it"):
        adapter = load_adapter(llama, folder)
        found, expected = log_probs(llama), rows[0]["logprobs"]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=f"{notes}: {found}")
        adapter.detach()
        (folder / "peftkit.json").unlink(missing_ok=True)


def test_names_are_taken_once_unless_they_are_overwritten(client, tmp_path):
    model = client.model()
    folders = tmp_path / "state" / "tinker" / "weights"
    path = model.call("save_weights", path="x")["path"]
    assert "already" in model.call("save_weights", path="x")["error"]
    train_steps(model, 1)
    assert model.call("save_weights", path="x", overwrite=True)["path"] == path
    assert len(list(folders.iterdir())) == 1
    before = model.forward(CE_DATA)[0]
    assert client.load(path, optimizer=False).forward(CE_DATA)[0] == before
    assert model.call("save_weights")["path"].endswith("/weights/step-7")


def test_weights_that_are_saved_again_are_the_newest(client):
    model = client.model()
    again, _ = (model.call("save_weights", path=name)["path"] for name in ("a", "b"))
    model.call("save_weights", path="a", overwrite=True)
    listed = [one["checkpoint_id"] for one in client.get("checkpoints")["checkpoints"]]
    assert listed == ["weights/a", "weights/b"]
    run = client.get(f"training_runs/{model.id}")
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/a"
    client.result("unload_model", model_id=model.id)
    gone = client.ask("get_info", model_id=model.id)
    assert f"Its last saved weights: {again}" in gone.text


def test_a_chat_asks_saved_weights_by_their_path(client):
    model = client.model()
    prompt = [5, 6, 7]
    for _ in range(3):
        model.forward([datum([*prompt, 40, 41, 42])])
        model.step(learning_rate=0.05)
    path = model.call("save_weights_for_sampler", path="x")["path"]

    def complete(name: str) -> Any:
        body = {"model": name, "prompt": prompt, "max_tokens": 4}
        return client.http.post("/v1/completions", json=body).json()

    params = {"temperature": 0.0, "max_tokens": 4}
    (sequence,) = client.sample(client.sampler(path), prompt, params=params).sequences
    tokenizer = client.http.app.state.worker.bank.base.tokenizer
    ids = wire.numbers_of(sequence.tokens, torch.int32, "tokens").tolist()
    assert complete(path)["choices"][0]["text"] == tokenizer.decode(ids) != ""
    assert complete("base")["choices"][0]["text"] != complete(path)["choices"][0]["text"]
    messages = [{"role": "user", "content": "the fox"}]
    chat = client.http.post("/v1/chat/completions", json={"model": path, "messages": messages})
    assert chat.status_code == 200
    models = [one["id"] for one in client.http.get("/v1/models").json()["data"]]
    assert models == ["base", path]


def test_checkpoints_are_listed_and_deleted(client, tmp_path):
    model = client.model()
    client.model()
    model.call("save_weights", path="a", user_metadata={"step": 1})
    model.call("save_weights_for_sampler", path="b", ttl_seconds=3600)
    listed = client.get(f"training_runs/{model.id}/checkpoints")["checkpoints"]
    assert [one["checkpoint_id"] for one in listed] == ["sampler_weights/b", "weights/a"]
    assert listed[1]["user_metadata"] == {"step": "1"}
    assert listed[1]["size_bytes"] > 1000
    assert listed[0]["expires_at"] > listed[0]["time"]
    page = client.get("checkpoints?limit=1&offset=1")
    assert page == {
        "checkpoints": [listed[1]],
        "cursor": {"offset": 1, "limit": 1, "total_count": 2},
    }
    runs = client.get("training_runs")["training_runs"]
    assert [one["training_run_id"][-1] for one in runs] == ["1", "0"]
    assert runs[1] == client.get(f"training_runs/{model.id}")
    assert runs[1]["last_checkpoint"] == listed[1]
    url = f"{API}/training_runs/{model.id}/checkpoints/weights/a"
    assert client.http.delete(url).status_code == 200
    assert client.http.delete(url).status_code == 404
    assert len(client.get("checkpoints")["checkpoints"]) == 1
    assert len(list((tmp_path / "state" / "tinker" / "weights").iterdir())) == 1


def test_weights_expire_after_their_time(client, monkeypatch):
    model = client.model()
    path = model.call("save_weights", path="a", ttl_seconds=60)["path"]
    now = weights.time.time()
    monkeypatch.setattr(weights.time, "time", lambda: now + 61)
    body = {"model": path, "prompt": [5, 6], "max_tokens": 2}
    assert client.http.post("/v1/completions", json=body).status_code == 404
    assert [one["id"] for one in client.http.get("/v1/models").json()["data"]] == ["base"]
    assert client.get("checkpoints")["checkpoints"] == []
    assert client.ask("weights_info", tinker_path=path).status_code == 404


@pytest.mark.parametrize("when", ["at the start", "by the timer", "before a check of quotas"])
def test_expired_weights_leave_no_file(serve, monkeypatch, tmp_path, when):
    if when == "by the timer":
        monkeypatch.setattr(app, "SWEEP_SECONDS", 0.01)
    client = Client(serve())
    model = client.model()
    path = model.call("save_weights", path="a", ttl_seconds=60)["path"]
    model.call("save_weights", path="b", ttl_seconds=600)
    folder = tmp_path / "state" / "tinker" / "weights"
    assert len([*folder.iterdir()]) == 2
    now = weights.time.time()
    monkeypatch.setattr(weights.time, "time", lambda: now + 61)
    if when == "at the start":
        client.http = serve()
    elif when == "before a check of quotas":
        client.http.post("/v1/files", files={"file": ("a", b"{}")}, data={"purpose": "fine-tune"})
    while len([*folder.iterdir()]) > 1:
        assert when == "by the timer"
        weights.time.sleep(0.01)
    assert path not in str(client.get("checkpoints"))


def test_after_a_restart_saved_weights_are_there_and_lost_models_say_so(serve):
    client = Client(serve())
    model, unsaved = client.model(), client.model()
    train_steps(model, 2)
    path = model.call("save_weights", path="x")["path"]
    named = model.call("save_weights_for_sampler", path="y")["path"]
    sampler, answer = client.sampler(named), [5, 6, 7]
    said = client.sample(sampler, answer).sequences[0].tokens
    lost = model.call("save_weights_for_sampler", sampling_session_seq_id=50)
    expected = train_steps(model, 2)
    waiting = model.submit(CE_DATA)
    client.http = serve()
    assert client.post("session_heartbeat", session_id=client.session)
    assert client.sample(sampler, answer, 9).sequences[0].tokens == said
    assert client.ask("retrieve_future", request_id=waiting).status_code == 410
    gone = client.ask("get_info", model_id=model.id)
    assert gone.status_code == 404
    assert f"Its last saved weights: {path}" in gone.text
    assert "It was never saved" in client.ask("get_info", model_id=unsaved.id).text
    assert model.send(b"").status_code == 400
    body = {"model_id": model.id, "seq_id": 9, "adam_params": {}}
    assert path in client.ask("optim_step", **body).text
    assert client.ask_sample(lost["sampling_session_id"], answer).status_code == 404
    assert train_steps(client.load(path, optimizer=True), 2) == expected
    assert [one["checkpoint_id"] for one in client.get("checkpoints")["checkpoints"]] == [
        "sampler_weights/y",
        "weights/x",
    ]


def test_a_half_done_save_is_removed_at_startup(serve, tmp_path):
    client = Client(serve())
    client.model().call("save_weights", path="x")
    folder = tmp_path / "state" / "tinker" / "weights"
    (folder / "weights-half").mkdir()
    (folder / "weights-half" / "adapter_config.json").write_text("{")
    serve()
    assert len(list(folder.iterdir())) == 1
