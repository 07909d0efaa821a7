"""Fields of /v1/chat/completions: each is documented, and changes the completion or nothing."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.serving import refusal

CHAT = "/v1/chat/completions"
HI = {"role": "user", "content": "Hi"}
ASKED: dict[str, Any] = {"model": "tools", "messages": [HI], "max_tokens": 8}
PAGE = Path(__file__).parents[3] / "docs/clients.md"
# the fields of openai 3.57, if the package is not installed
FIELDS = {
    "Chat completions": "audio frequency_penalty function_call functions logit_bias logprobs "
    "max_completion_tokens max_tokens messages metadata modalities model moderation n "
    "parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options "
    "prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier "
    "stop store stream stream_options temperature tool_choice tools top_logprobs top_p user "
    "verbosity web_search_options",
    "Responses": "access_programs background background_options context_management conversation "
    "image include input instructions max_output_tokens max_tool_calls metadata model moderation "
    "parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_options "
    "prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options "
    "temperature text tool_choice tools top_logprobs top_p truncation user",
}


def typed_fields(name: str) -> set[str]:
    """Return the fields of the request types of the openai package."""
    if find_spec("openai") is None:
        return set(FIELDS[name].split())
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    kind = {
        "Chat completions": chat.CompletionCreateParamsBase,
        "Responses": responses.ResponseCreateParamsBase,
    }[name]
    return {*kind.__annotations__, "stream"}


def documented(name: str) -> dict[str, str]:
    """Return the fields of a table in the page, with what the server does."""
    section = PAGE.read_text(encoding="utf-8").split(f"### {name}\n")[1].split("\n#")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    return {
        field.strip(" `"): row[2].strip() for row in rows for field in row[1].strip().split(", ")
    }


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_each_field_of_the_types_is_documented(name):
    assert typed_fields(name) <= set(documented(name))


def test_ignored_fields_change_nothing(client):
    ignored = [name for name, does in documented("Chat completions").items() if does == "ignored"]
    assert "user" in ignored

    def text(**fields: Any) -> str:
        done = client.post(CHAT, json={**ASKED, **fields})
        assert done.status_code == 200, done.text
        return str(done.json()["choices"][0]["message"]["content"])

    defaults = {
        "frequency_penalty": 0,
        "logit_bias": {},
        "min_p": 0,
        "modalities": ["text"],
        "n": 1,
        "presence_penalty": 0.0,
        "reasoning_effort": None,
        "repetition_penalty": 1,
        "stream_options": {"include_usage": True},
        "verbosity": "medium",
        "web_search_options": None,
    }
    assert text() == text(**dict.fromkeys(ignored, "x")) == text(**defaults)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"best_of": 2, "n": 2}, "best_of"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
    ],
)
def test_a_refused_field_is_named(fields, param, client):
    assert refusal(client.post(CHAT, json={**ASKED, **fields}))["param"] == param


def test_fields_that_change_the_logits(client, tokenizer):
    (token,) = tokenizer("z", add_special_tokens=False).input_ids

    def text(**fields: Any) -> str:
        done = client.post(CHAT, json={**ASKED, **fields})
        return str(done.json()["choices"][0]["message"]["content"])

    assert text(logit_bias={str(token): 100}).strip() == "z" * 8
    assert text(logit_bias={str(token): 100}, frequency_penalty=2, max_tokens=60) != "z" * 60
    assert text(temperature=1, seed=3, min_p=1.0) == text()  # the likeliest token only
    assert text(temperature=1, seed=3, top_k=1) == text()


@pytest.mark.parametrize(("effort", "added"), [("none", 0), ("low", 1), (None, 0)])
def test_effort_is_a_variable_of_the_template(effort, added, client):
    def num_prompt(**fields: Any) -> int:
        body = {**ASKED, "model": "thinks", **fields}
        return int(client.post(CHAT, json=body).json()["usage"]["prompt_tokens"])

    assert num_prompt(reasoning_effort=effort) == num_prompt() + added
