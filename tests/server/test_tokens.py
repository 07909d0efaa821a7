"""Token ids in, sampled token ids out, with the end token and log-probabilities."""

import math
from typing import Any

import pytest
import torch

from peftkit.inference.sampling import end_tokens

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
from starlette.testclient import TestClient

from peftkit_server.app import make_app
from tests.helpers.serving import HERE

PATH = "/inference/v1/generate"
PROMPT = [5, 7, 11, 13, 17]


def ask(client: Any, model: str = "one", **settings: Any) -> Any:
    given = {"max_tokens": 6, "temperature": 0.0, "logprobs": 1, **settings}
    return client.post(PATH, json={"model": model, "token_ids": PROMPT, "sampling_params": given})


def choice(answer: Any) -> Any:
    assert answer.status_code == 200, answer.text
    (one,) = answer.json()["choices"]
    content = one["logprobs"]["content"]
    assert [token["token_id"] for token in content] == one["token_ids"]
    assert [token["token"] for token in content] == [f"token_id:{n}" for n in one["token_ids"]]
    assert all(math.isfinite(token["logprob"]) for token in content)
    assert answer.json()["usage"]["completion_tokens"] == len(content)
    assert answer.json()["usage"]["prompt_tokens"] == len(PROMPT)
    return one


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_the_models_own(bank, temperature):
    with TestClient(make_app(bank), base_url=HERE) as client:
        one = choice(ask(client, temperature=temperature, seed=3))
    ids, model = one["token_ids"], bank.base.model
    with bank.use("one"), torch.no_grad():
        logits = model(input_ids=torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    right = logits.float().log_softmax(-1)[range(len(ids)), ids]
    found = [token["logprob"] for token in one["logprobs"]["content"]]
    assert found == pytest.approx(right.tolist(), abs=1e-4)
    if not temperature:
        assert ids == logits.argmax(-1).tolist()[: len(ids)]


def test_the_end_token_is_among_the_ids(client, bank):
    whole = choice(ask(client))
    assert whole["finish_reason"] == "length"
    assert len(whole["token_ids"]) == 6
    end = whole["token_ids"][2]
    cut = choice(ask(client, stop_token_ids=[end]))
    where = whole["token_ids"].index(end)
    assert cut["token_ids"] == whole["token_ids"][: where + 1]
    assert cut["finish_reason"] == "stop"
    assert end not in end_tokens(bank.base.model, bank.base.tokenizer)


def test_by_default_answers_are_sampled_and_a_seed_repeats_them(client):
    settings = {"temperature": None, "max_tokens": 8}
    one = choice(ask(client, seed=1, **settings))
    assert one == choice(ask(client, seed=1, **settings))
    others = [choice(ask(client, seed=seed, **settings))["token_ids"] for seed in range(2, 8)]
    assert any(other != one["token_ids"] for other in others)


@pytest.mark.parametrize("settings", [{"top_k": 1 << 63}, {"temperature": 1e-46}])
def test_numbers_are_rounded_to_the_dtype(client, settings):
    one = choice(ask(client, **{"temperature": 1.0, "seed": 3, **settings}))
    same = {"temperature": 0.0} if "temperature" in settings else {"temperature": 1.0, "top_k": 999}
    assert one["token_ids"] == choice(ask(client, **{"seed": 3, **same}))["token_ids"]


def test_top_k_of_one_is_greedy_and_minus_one_is_off(client):
    greedy = choice(ask(client))["token_ids"]
    assert choice(ask(client, temperature=1.0, top_k=1))["token_ids"] == greedy
    assert choice(ask(client, top_k=-1))["token_ids"] == greedy


def test_what_clients_send_along_changes_nothing(client):
    body = {"model": "one", "token_ids": PROMPT, "cache_salt": "7", "priority": 0}
    settings = {"max_tokens": 6, "temperature": 0.0, "skip_special_tokens": False}
    sent = client.post(
        PATH, json={**body, "sampling_params": settings}, headers={"X-Session-ID": "a"}
    )
    assert choice(sent) == choice(ask(client))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, 1 << 40]}, "the prompt contains the token"),
        ({"token_ids": [-1]}, "the prompt contains the token"),
        ({"token_ids": "text"}, "token_ids"),
        ({"features": [1]}, "features: unknown field"),
        ({"content_parts": []}, "content_parts: unknown field"),
        ({"stream": True}, "stream"),
        ({"sampling_params": 3}, "sampling_params"),
        ({"sampling_params": {"logprobs": 5}}, "logprobs"),
        ({"sampling_params": {"n": 99}}, "99 completions"),
        ({"sampling_params": {"min_tokens": 1}}, "min_tokens: unknown field"),
        ({"sampling_params": {"model": "two"}}, "set twice"),
        ({"model": "three"}, "no model 'three'"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(refusing, body, words):
    answer = refusing.post(PATH, json={"model": "one", "token_ids": PROMPT, **body})
    assert answer.status_code in (400, 404)
    assert words in answer.json()["error"]["message"]


def test_models_tell_their_context(client, bank):
    models = client.get("/v1/models").json()["data"]
    limit = bank.base.model.config.max_position_embeddings
    assert {model["max_model_len"] for model in models} == {limit}
