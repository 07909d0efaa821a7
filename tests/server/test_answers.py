"""The server's completions equal those of `generate`: streamed or not, alone or in a batch."""

import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from peftkit.data.style import Style
from peftkit.inference.bank import AdapterBank
from peftkit.inference.generate import generate, generate_ids
from peftkit.inference.sampling import Sampling

pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
from starlette.testclient import TestClient

from peftkit_server import app, completions
from tests.helpers.serving import HERE, refusal

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(model: str, text: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def events(text: str) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream, and check its last event."""
    *lines, last, empty = text.split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    for line in lines:
        yield json.loads(line.removeprefix("data: "))


def alone(bank: AdapterBank, name: str | None, prompt: str, **more: Any) -> str:
    """Return the completion of `generate`; call it while the server does not use the bank."""
    with bank.use(name):
        base = bank.base
        (text,) = generate(base.model, base.tokenizer, prompt, **more)
    return text


@pytest.mark.smoke
@pytest.mark.parametrize("model", ["one", "base"])
def test_a_chat_is_answered_as_generate_does(model, client, bank):
    name = None if model == "base" else model
    text = alone(bank, name, "the quick brown fox", max_new_tokens=8)
    done = client.post(CHAT, json=chat(model, "the quick brown fox"))
    assert done.status_code == 200, done.text
    (choice,) = done.json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": text}
    assert text
    usage = done.json()["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert choice["finish_reason"] == ("length" if usage["completion_tokens"] == 8 else "stop")


def test_a_plain_adapter_is_prompted_as_trained(client, bank):
    text = alone(bank, "two", "the lazy dog", style=Style("plain"), max_new_tokens=8)
    (choice,) = client.post(CHAT, json=chat("two", "the lazy dog")).json()["choices"]
    assert choice["message"]["content"] == text
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    error = refusal(client.post(CHAT, json={"model": "two", "messages": turns}))
    assert "trained on single prompts" in error["message"]


def test_parts_of_text_and_the_developer_s_role_are_read(client):
    plain = [{"role": "system", "content": "the fox"}, {"role": "user", "content": "the dog"}]
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "the fox"}]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "dog"}],
            "refusal": None,
        },
    ]
    answers = [
        client.post(CHAT, json={"model": "one", "messages": turns}).json()["choices"]
        for turns in (plain, parts)
    ]
    assert answers[0] == answers[1]


def test_variables_of_the_chat_template_are_the_clients(client, bank):
    bank.base.tokenizer.chat_template += "{{ 'the fox' if enable_thinking else '' }}"
    body = chat("one", "the dog")
    plain, thinking = (
        client.post(CHAT, json={**body, "chat_template_kwargs": {"enable_thinking": on}}).json()
        for on in (False, True)
    )
    assert plain["usage"]["prompt_tokens"] < thinking["usage"]["prompt_tokens"]


@pytest.mark.smoke
def test_a_stream_is_the_same_text_in_pieces(client):
    body = chat("one", "the quick brown fox")
    whole = client.post(CHAT, json=body).json()
    done = client.post(
        CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert done.headers["content-type"].startswith("text/event-stream")
    first, *chunks, last = events(done.text)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert len(chunks) > 3
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


def test_texts_and_tokens_are_completed_as_they_stand(client, bank):
    tokenizer = bank.base.tokenizer
    ids = tokenizer("the quick")["input_ids"]
    with bank.use("one"):
        (new,) = generate_ids(bank.base.model, tokenizer, [ids], max_new_tokens=5)
    for prompt in ("the quick", ids, ["the quick"], [ids]):
        done = client.post(TEXT, json={"model": "one", "prompt": prompt, "max_tokens": 5})
        (choice,) = done.json()["choices"]
        assert choice["text"] == tokenizer.decode(new, skip_special_tokens=True)
    stream = client.post(
        TEXT, json={"model": "one", "prompt": ids, "max_tokens": 5, "stream": True}
    )
    assert "".join(e["choices"][0]["text"] for e in events(stream.text)) == choice["text"]


def test_several_answers_of_one_request_come_in_order(client):
    body = {"model": "one", "prompt": ["the quick", "the lazy"], "max_tokens": 4}
    alone = [
        client.post(TEXT, json={**body, "prompt": prompt}).json()["choices"][0]["text"]
        for prompt in body["prompt"]
    ]
    choices = client.post(TEXT, json=body).json()["choices"]
    assert [choice["text"] for choice in choices] == alone
    sampled = {**body, "prompt": "the", "n": 3, "temperature": 2.0, "seed": 1}
    first, again = (client.post(TEXT, json=sampled).json()["choices"] for _ in range(2))
    assert first == again
    assert len({choice["text"] for choice in first}) > 1


def test_sampled_answers_leave_the_generators_of_a_run_alone(client):
    body = {"model": "one", "prompt": "the", "n": 4, "temperature": 2.0, "max_tokens": 4}
    torch.manual_seed(0)  # as at the start of a run
    before = torch.get_rng_state()
    first = client.post(TEXT, json=body).json()["choices"]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)  # as at the start of the next run
    assert client.post(TEXT, json=body).json()["choices"] != first


def test_a_stop_text_ends_an_answer_before_it(client):
    body = {"model": "one", "prompt": "the quick brown", "max_tokens": 8}
    whole = client.post(TEXT, json=body).json()["choices"][0]["text"]
    stop = whole[3:6]
    before = whole[: whole.find(stop)]
    (choice,) = client.post(TEXT, json={**body, "stop": ["never", stop]}).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (before, "stop")
    stream = client.post(TEXT, json={**body, "stop": stop, "stream": True})
    assert "".join(e["choices"][0]["text"] for e in events(stream.text)) == before


def test_log_probabilities_are_told_as_openai_tells_them(client, bank):
    body = chat("one", "the quick", max_tokens=4, logprobs=True, top_logprobs=2)
    (choice,) = client.post(CHAT, json=body).json()["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 4
    for token in content:  # greedy: the top token
        assert token["logprob"] == token["top_logprobs"][0]["logprob"] <= 0
        assert len(token["top_logprobs"]) == 2
    pieces = list(events(client.post(CHAT, json={**body, "stream": True}).text))
    streamed = [one["choices"][0]["logprobs"] for one in pieces]
    assert [token for one in streamed if one for token in one["content"]] == content
    ids = bank.base.tokenizer("the quick")["input_ids"]
    body = {"model": "base", "prompt": ids, "max_tokens": 3, "logprobs": 1}
    (choice,) = client.post(TEXT, json=body).json()["choices"]
    log_probs = choice["logprobs"]
    assert "".join(log_probs["tokens"]) == choice["text"]
    assert log_probs["text_offset"] == [
        len("".join(log_probs["tokens"][:n])) for n in range(len(log_probs["tokens"]))
    ]
    with bank.engine() as engine:
        ((right,),) = engine.answers([ids], Sampling(max_new_tokens=3))
    assert log_probs["token_logprobs"] == pytest.approx(right.log_probs, abs=1e-4)
    assert list(log_probs["top_logprobs"][0].values()) == [log_probs["token_logprobs"][0]]


@pytest.mark.smoke
@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_object"},
        {
            "type": "json_schema",
            "json_schema": {
                "name": "order",
                "schema": {
                    "type": "object",
                    "properties": {"size": {"enum": ["small", "large"]}},
                    "required": ["size"],
                    "additionalProperties": False,
                },
            },
        },
    ],
)
def test_an_answer_is_held_to_json(response_format, client):
    pytest.importorskip("llguidance", reason="the extra peftkit[json] is not installed")
    body = chat("one", "the fox", response_format=response_format, max_tokens=90, seed=3)
    texts = []
    for temperature in (0, 2.0):
        (choice,) = client.post(CHAT, json={**body, "temperature": temperature}).json()["choices"]
        if choice["finish_reason"] == "stop":
            texts.append(json.loads(choice["message"]["content"]))
        else:  # without a schema, an untrained model may never end
            assert choice["message"]["content"].lstrip().startswith("{")
    if response_format["type"] == "json_schema":
        assert [text["size"] in ("small", "large") for text in texts] == [True, True]


def test_tokens_that_a_format_rules_out_are_not_among_the_likeliest(client):
    pytest.importorskip("llguidance", reason="the extra peftkit[json] is not installed")
    body = chat("one", "the fox", response_format={"type": "json_object"}, max_tokens=6)
    answer = client.post(CHAT, json={**body, "logprobs": True, "top_logprobs": 20})
    assert answer.status_code == 200
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert all(one["top_logprobs"] for one in content)
    assert all(math.isfinite(top["logprob"]) for one in content for top in one["top_logprobs"])
    assert len(content[0]["top_logprobs"]) < 20  # few tokens can start an object


def test_the_end_token_counts_as_one_of_the_answer(client, bank):
    ids = bank.base.tokenizer("the quick")["input_ids"]
    with bank.engine() as engine:
        ((free,),) = engine.answers([ids], Sampling(max_new_tokens=6))
    bank.base.model.generation_config.eos_token_id = free.ids[3]  # a base with another end token
    first = free.ids.index(free.ids[3])
    body = {"model": "base", "prompt": ids, "max_tokens": 6}
    with TestClient(app.make_app(bank), base_url=HERE) as other:
        answer = other.post(TEXT, json=body).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == first + 1


def test_decoding_interleaves_with_prefill(client, monkeypatch):
    began, go_on = threading.Event(), threading.Event()
    plain = completions.prompt_ids

    def slow(*args: Any, **named: Any) -> Any:
        began.set()
        assert go_on.wait(20)
        return plain(*args, **named)

    monkeypatch.setattr(completions, "prompt_ids", slow)
    answers: list[Any] = []
    body = chat("one", "the fox", max_tokens=2)
    asking = threading.Thread(target=lambda: answers.append(client.post(CHAT, json=body)))
    asking.start()
    assert began.wait(20)
    healths: list[Any] = []
    watching = threading.Thread(target=lambda: healths.append(client.get("/health")))
    watching.start()
    watching.join(5)
    has_waited = watching.is_alive()
    go_on.set()
    watching.join()
    asking.join()
    assert [one.status_code for one in (*healths, *answers)] == [200, 200]
    assert not has_waited


def test_prompts_count_before_prefill(client, monkeypatch):
    def never(*args: Any, **named: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(completions, "prompt_ids", never)
    body = {"model": "one", "prompt": ["a"] * 3, "n": 2}
    assert "6 completions" in refusal(client.post(TEXT, json=body))["message"]


def test_models_are_the_adapters_and_the_base(client):
    listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["one", "two", "base"]
    assert client.get("/v1/models/two").json() == listed[1]
    assert client.get("/v1/models/three").status_code == 404
    assert client.get("/health").json() == {"status": "ok", "fallbacks": []}


def test_health_lists_the_fallbacks(bank):
    bank.base.model.config.rope_parameters["rope_type"] = "dynamic"
    with TestClient(app.make_app(bank), base_url=HERE) as client:
        health = client.get("/health").json()
    (fallback,) = health["fallbacks"]
    assert fallback.startswith("Completions are generated batch by batch. Its positions depend")
    assert "vLLM" in fallback
