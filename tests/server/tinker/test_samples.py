"""Samples come from the saved weights; log-probabilities equal the trainer's."""

import struct
import threading
from typing import Any

import pytest
import torch

pytest.importorskip("google.protobuf", reason="the extra peftkit[train-api] is not installed")

from peftkit_server.tinker import weights, wire
from tests.helpers.tinker import PROMPT
from tests.helpers.wire_client import Client, Model, datum


def ints(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def tokens(sequence: Any) -> list[int]:
    return ints(sequence.tokens)


def floats(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def learnt(client: Client, **config: Any) -> Model:
    """Return a model whose completions differ from the base."""
    model = client.model(**config)
    for _ in range(4):
        model.forward([datum([5, 6, 7, 8, 40, 41, 42])])
        model.step(learning_rate=0.03)
    return model


def sampler_of(model: Model, number: int = 100) -> str:
    """Return a sampler of a model's current weights."""
    made = model.call("save_weights_for_sampler", sampling_session_seq_id=number, kind="snapshot")
    return str(made["sampling_session_id"])


@pytest.mark.smoke
@pytest.mark.parametrize("config", [{"rank": 3}, {"train_unembed": True, "train_mlp": False}])
def test_log_probs_of_samples_are_the_trainer_s(client, config):
    model = learnt(client, **config)
    found = client.sample(
        *(sampler_of(model), PROMPT), num_samples=3, prompt_logprobs=True, topk_sample_logprobs=2
    )
    for sequence in found.sequences:
        said, log_probs = tokens(sequence), floats(sequence.log_probs)
        assert len(said) == len(log_probs) > 0
        ids = [*PROMPT, *said]
        ((_, (row,)),) = [model.forward([datum(ids)], forward_only=True)]
        torch.testing.assert_close(
            row["logprobs"][len(PROMPT) - 1 :], torch.tensor(log_probs), rtol=0, atol=1e-4
        )
        torch.testing.assert_close(
            row["logprobs"][: len(PROMPT) - 1],
            torch.tensor(floats(found.prompt_log_probs)[1:]),
            rtol=0,
            atol=1e-4,
        )
        top = torch.tensor(floats(sequence.topk.log_probs)).view(-1, 2)
        assert (sequence.topk.length, sequence.topk.k) == (len(said), 2)
        assert (top[:, 0] >= top[:, 1]).all()
        assert (torch.tensor(log_probs) <= top[:, 0] + 1e-5).all()
    assert len({tuple(tokens(sequence)) for sequence in found.sequences}) > 1
    assert floats(found.prompt_log_probs)[0] != floats(found.prompt_log_probs)[0]  # NaN


def test_the_likeliest_tokens_of_a_prompt(client, llama):
    with torch.no_grad():
        expected = llama(torch.tensor([PROMPT])).logits[0].log_softmax(-1).topk(3)
    found = client.sample(client.sampler(), PROMPT, topk_prompt_logprobs=3)
    ids = torch.tensor(ints(found.topk_prompt.ids)).view(4, 3)
    values = torch.tensor(floats(found.topk_prompt.log_probs)).view(4, 3)
    assert ids[0].tolist() == [0, 0, 0]
    assert values[0].tolist() == [-99999.0] * 3
    assert torch.equal(ids[1:], expected.indices[:-1].int())
    torch.testing.assert_close(values[1:], expected.values[:-1])
    last = client.sample(
        *(client.sampler(), PROMPT), prompt_logprobs=True, prompt_logprobs_last_n=2
    )
    whole = client.sample(client.sampler(), PROMPT, prompt_logprobs=True)
    known = [value == value for value in floats(last.prompt_log_probs)]
    assert known == [False, False, True, True]
    assert floats(last.prompt_log_probs)[2:] == floats(whole.prompt_log_probs)[2:]


def test_an_answer_ends_where_the_client_says(client, llama):
    sampler, greedy = client.sampler(), {"temperature": 0.0, "max_tokens": 8}
    eos = client.http.app.state.worker.bank.base.tokenizer.eos_token_id
    llama.generation_config.eos_token_id = None

    def said(number: int, **params: Any) -> Any:
        found = client.sample(sampler, PROMPT, number, params={**greedy, **params})
        return tokens(found.sequences[0]), found.sequences[0].stop_reason

    whole, reason = said(0, stop=[])
    assert (len(whole), reason) == (8, 1)
    third = whole[2]
    end = whole.index(third)
    assert said(1, stop=[third]) == (whole[: end + 1], 0)
    text = client.http.app.state.worker.bank.base.tokenizer.decode([third])
    found, reason = said(2, stop=[text])
    assert (found, reason) == (whole[: len(found)], 0)
    assert len(found) <= end + 1
    with torch.no_grad():  # a base that generates its end token first
        llama.lm_head.weight[eos] = 20 * llama.lm_head.weight[whole[0]]
    assert said(3) == ([eos], 0)
    assert said(4, stop=[]) == ([eos] * 8, 1)
    assert said(5, stop=[whole[1]])[1] == 1
    name = client.http.app.state.worker.bank.base.tokenizer.convert_ids_to_tokens(eos)
    assert said(6, stop=name) == ([eos], 0)


def test_a_sampler_keeps_its_weights_while_the_model_learns_on(client):
    model = learnt(client)
    named = model.call("save_weights_for_sampler", path="first")["path"]
    assert named == f"tinker://{model.id}/sampler_weights/first"
    first, by_name = sampler_of(model, 101), client.sampler(named)
    before = client.sample(first, PROMPT).sequences[0].tokens
    waiting = [client.ask_sample(first, PROMPT, number) for number in range(10, 18)]
    for _ in range(3):
        model.forward([datum([5, 6, 7, 8, 90, 91, 92])])
        model.step(learning_rate=0.1)
    for response in waiting:
        found = wire.parsed("Sampled", client.retrieve(response.json()["request_id"]))
        assert found.sequences[0].tokens == before
    second = sampler_of(model, 102)
    assert client.sample(by_name, PROMPT).sequences[0].tokens == before
    assert client.sample(second, PROMPT).sequences[0].tokens != before
    assert client.sample(client.sampler(), PROMPT).sequences[0].tokens != before
    assert "already" in model.call("save_weights_for_sampler", path="first")["error"]


def test_unnamed_weights_are_evicted_for_new_ones(client, monkeypatch, tmp_path):
    monkeypatch.setattr(weights, "MAX_UNNAMED", 2)
    model = learnt(client)
    samplers = [sampler_of(model, 100 + number) for number in range(4)]
    assert len(list((tmp_path / "state" / "tinker" / "weights").iterdir())) == 2
    assert client.ask_sample(samplers[0], PROMPT).status_code == 404
    assert client.sample(samplers[3], PROMPT).sequences
    client.result("unload_model", model_id=model.id)
    assert not list((tmp_path / "state" / "tinker" / "weights").iterdir())


def test_samples_leave_the_generators_of_a_run_alone(client):
    torch.manual_seed(0)  # as at the start of a run
    before, sampler, free = torch.get_rng_state(), client.sampler(), {"seed": None}
    first = client.sample(sampler, PROMPT, 0, num_samples=4, params=free)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)  # as at the start of the next run
    again = client.sample(sampler, PROMPT, 1, num_samples=4, params=free)
    assert [*map(tokens, again.sequences)] != [*map(tokens, first.sequences)]


def test_a_repeated_sample_is_the_same_one(client):
    sampler = client.sampler()
    first, again = (client.ask_sample(sampler, PROMPT, num_samples=2).json() for _ in range(2))
    assert again == first
    assert len(first["sample_sequence_ids"]) == 2
    assert client.ask_sample(sampler, PROMPT, num_samples=1).status_code == 409
    assert client.retrieve(first["request_id"]) == client.retrieve(first["request_id"])


def test_a_full_queue_refuses_new_samples(client, monkeypatch):
    worker, sampler, gate = client.http.app.state.worker, client.sampler(), threading.Event()
    monkeypatch.setattr(worker, "max_waiting", 2)
    worker.call(lambda: gate.wait(60))

    def ask(number: int, **more: Any) -> Any:
        return client.ask_sample(sampler, PROMPT, number, **more)

    taken = [ask(0, prompt_logprobs=True), ask(1)]
    refused = [ask(2), ask(3, prompt_logprobs=True)]
    gate.set()
    assert [response.status_code for response in refused] == [429, 429]
    for response in taken:
        assert wire.parsed("Sampled", client.retrieve(response.json()["request_id"])).sequences
    assert ask(2).status_code == 200


@pytest.mark.smoke
def test_a_cancelled_sample_ends(client):
    sampler, params = client.sampler(), {"max_tokens": 200, "stop": []}
    id = client.ask_sample(sampler, PROMPT, num_samples=64, params=params).json()["request_id"]
    assert client.post("cancel_future", request_id=id) == {}
    assert "cancelled" in client.retrieve(id)["error"]
    assert client.sample(sampler, PROMPT, 2).sequences
