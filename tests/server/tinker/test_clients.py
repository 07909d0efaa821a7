"""Requests of newer clients, quotas of two keys, and full disks."""

import errno
from typing import Any

import pytest
import torch

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

from peftkit_server.limits import Limits
from peftkit_server.refusals import RequestError
from peftkit_server.tinker import tenants, wire
from peftkit_server.tinker.futures import Futures
from tests.helpers.serving import refusal
from tests.helpers.tinker import CE_DATA, PROMPT, train_steps
from tests.helpers.wire_client import Client, datum

ANN, BOB = "tml-ann", "tml-bob"


def test_tokens_of_a_client_are_scored_at_each_position(client):
    sampler, shape = client.sampler(), [len(PROMPT) - 1, 2]
    cells = [[6, 9], [-1, 7], [30, -1]]
    dense = {"dtype": "int64", "shape": shape, "data": [token for row in cells for token in row]}
    sparse = {
        "dtype": "int64",
        "shape": shape,
        "data": [6, 9, 7, 30],
        "sparse_crow_indices": [0, 2, 3, 4],
        "sparse_col_indices": [0, 1, 1, 0],
    }
    found = client.sample(
        *(sampler, PROMPT),
        target_prompt_logprobs=dense,
        prompt_logprobs=True,
        prompt_logprobs_last_n=1,
        topk_prompt_logprobs=1,
    )
    values = wire.tensor_of(found.targets, "targets")
    model = client.model()
    expected = torch.zeros(shape)
    for row, tokens in enumerate(cells):
        for column, token in enumerate(tokens):
            if token >= 0:
                ids = [*PROMPT[: row + 1], token]
                log_probs = model.forward([datum(ids)], forward_only=True)[1][0]["logprobs"]
                expected[row, column] = log_probs[-1]
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-4)
    prompt = wire.numbers_of(found.prompt_log_probs, torch.float32, "prompt")
    assert prompt.isnan().tolist() == [True, True, True, False]
    other = client.sample(sampler, PROMPT, 1, target_prompt_logprobs=sparse)
    torch.testing.assert_close(
        wire.tensor_of(other.targets, "targets"), expected, rtol=0, atol=1e-4
    )
    assert other.targets.HasField("sparse")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"shape": [2, 1], "data": [1, 1]}, "has 2 rows"),
        ({"shape": [3, 1], "data": [1, 1]}, "do not match"),
        ({"shape": [3, 1], "data": [1, 1, 10**6]}, "token 1000000"),
        ({"shape": [3, 1], "data": [1, 1, -2]}, "token -2"),
        ({"shape": [3], "data": [1, 1, 1]}, "at least 2 items"),
        (
            {
                "shape": [3, 2**30],
                "data": [1],
                "sparse_crow_indices": [0, 1, 1, 1],
                "sparse_col_indices": [2**30],
            },
            "do not match",
        ),
        (
            {"shape": [2**30, 1], "data": [], "sparse_crow_indices": [0], "sparse_col_indices": []},
            "do not match",
        ),
        (
            {
                "shape": [3, 1],
                "data": [1],
                "sparse_crow_indices": [0, 2, 1, 1],
                "sparse_col_indices": [0],
            },
            "do not match",
        ),
    ],
)
def test_bad_tokens_to_score_are_refused(client, targets, message):
    scored = {"dtype": "int64", **targets}
    response = client.ask_sample(client.sampler(), PROMPT, target_prompt_logprobs=scored)
    if response.status_code == 200:
        assert message in client.retrieve(response.json()["request_id"])["error"]
    else:
        assert response.status_code == 400
        assert message in response.text


def test_the_loss_without_a_formula_names_the_way_out(client):
    error = refusal(client.ask_sample(client.sampler(), PROMPT, record_stability_info=True))
    assert "loss_fn=importance_sampling" in error["message"]
    assert "stable_reinforce" in error["message"]


def test_metadata_is_bounded(serve):
    client = Client(serve(limits=Limits(metadata_bytes=100)))
    long = {"note": "x" * 100}
    assert "the metadata has" in client.ask("create_session", user_metadata=long).text
    asked = {"session_id": client.session, "model_seq_id": 5, "base_model": "base"}
    assert "the metadata has" in client.ask("create_model", **asked, user_metadata=long).text
    saved = client.model().call("save_weights", path="x", user_metadata=long)
    assert "the metadata has" in saved["error"]


def test_one_key_leaves_models_and_records_to_others(serve):
    limits = Limits(tinker_models=2, key_share=0.5, key_records=4, key_models=1)
    http = serve(keys=[ANN, BOB], limits=limits)
    ann, bob = Client(http, ANN), Client(http, BOB)
    model = ann.model()
    asked = {"session_id": ann.session, "base_model": "base", "model_seq_id": 7}
    refused = ann.ask("create_model", **asked)
    assert (refused.status_code, "tinker_models" in refused.text) == (429, True)
    assert bob.model()
    assert model.call("save_weights", path="a")["path"]
    assert "key_models" in model.call("save_weights", path="b")["error"]
    samplers = [ann.sampler() for _ in range(5)]  # the oldest make room
    assert ann.http.get(f"/api/v1/samplers/{samplers[0]}", headers=ann.headers).status_code == 404
    assert ann.get(f"samplers/{samplers[-1]}")["base_model"] == "base"
    for _ in range(2):
        Client(http, BOB)
    full = bob.ask("create_session")
    assert (full.status_code, full.json()["error"]["code"]) == (429, "key_records")


def test_results_and_operations_of_one_key_leave_those_of_others():
    kept = Futures(Limits(result_bytes=1000, operation_bytes=1000, key_share=0.5, num_keys=2))
    bob = kept.new("bob")
    bob.finish(b"x" * 300)
    for _ in range(5):
        kept.new("ann").finish(b"x" * 300)
    assert kept.get(bob.id, "bob").future.result() == b"x" * 300
    kept.reserve("ann", 400, is_next=False)
    with pytest.raises(RequestError) as refused:
        kept.reserve("ann", 200, is_next=False)
    assert refused.value.status == 429
    kept.reserve("bob", 500, is_next=False)
    kept.release("ann", 400)
    kept.reserve("ann", 500, is_next=False)


def test_a_full_disk_costs_no_model_its_state(client, monkeypatch):
    expected = train_steps(client.model(rank=2), 3)
    write, is_full = tenants.write_tensor_stream, [True]

    def full(*args: Any) -> None:
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*args)

    monkeypatch.setattr(tenants, "write_tensor_stream", full)
    monkeypatch.setattr(tenants, "MAX_LOADED", 1)
    first = client.model(rank=2)
    found = train_steps(first, 1)
    second = client.model(rank=2)  # nobody can be written to the disk
    assert train_steps(second, 3) == expected
    is_full[0] = False
    assert train_steps(client.model(rank=2), 3) == expected  # the others go to the disk
    is_full[0] = True
    found += train_steps(first, 2)
    assert found == expected


def test_a_model_that_cannot_be_created_leaves_nothing(client, monkeypatch):
    def fails(*args: Any) -> None:
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(tenants.Tenants, "_make_room", fails)
        asked = {"session_id": client.session, "model_seq_id": 5, "base_model": "base"}
        failed = client.result("create_model", **asked, lora_config={"rank": 2})
        assert failed["category"] == "server"
    sent = client.ask("optim_step", model_id=f"{client.session}:train:5", seq_id=1, adam_params={})
    result = client.retrieve(sent.json()["request_id"])
    assert "not created" in result["error"]


def test_the_key_with_the_most_models_in_memory_loses_one(serve, monkeypatch, tmp_path):
    monkeypatch.setattr(tenants, "MAX_LOADED", 3)
    http = serve(keys=[ANN, BOB])
    bob, ann = Client(http, BOB), Client(http, ANN)
    old = bob.model(rank=2)
    for _ in range(4):
        ann.model(rank=2)
    names = {path.name for path in (tmp_path / "state" / "tinker" / "away").iterdir()}
    assert len(names) == 2
    assert not any(old.id.replace(":", ".") in name for name in names)
    assert old.forward(CE_DATA)[0]
