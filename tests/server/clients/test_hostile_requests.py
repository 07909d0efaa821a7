"""Mutated requests over the new paths: none is an error of the server, and each has an answer."""

import copy
import json
import random
from typing import Any

import pytest

from tests.helpers.serving import refusal

HI = {"role": "user", "content": "Hi"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/responses",
        {
            "model": "tools",
            "instructions": "Be kind",
            "max_output_tokens": 2,
            "input": [
                HI,
                {"type": "reasoning", "id": "rs", "summary": [], "content": []},
                {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"n": 1}'},
                {"type": "function_call_output", "call_id": "a", "output": "3"},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            ],
            "tools": [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}],
            "tool_choice": "auto",
            "text": {"format": {"type": "text"}},
            "include": [],
            "previous_response_id": None,
            "stream": False,
            "store": True,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "tools",
            "max_tokens": 2,
            "system": [{"type": "text", "text": "Be kind"}],
            "messages": [
                HI,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "tool_use", "id": "a", "name": "add", "input": {"n": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": "3"}],
                },
            ],
            "tools": [{"name": "add", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "stop_sequences": ["x"],
            "thinking": {"type": "disabled"},
            "stream": False,
        },
    ),
    ("/v1/messages/count_tokens", {"model": "tools", "messages": [HI], "system": "Be kind"}),
    (
        "/v1/chat/completions",
        {
            "model": "thinks",
            "messages": [HI],
            "max_tokens": 2,
            "logit_bias": {"5": 2},
            "frequency_penalty": 0.5,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.1,
            "min_p": 0.1,
            "temperature": 1,
            "reasoning_effort": "low",
        },
    ),
]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**63, 1e308, 0.5, "", "a", "\x00", "\ud800", "tools"),
    *([], {}, [[]], [None], {"": None}, {"type": "text"}, {"type": []}, "x" * 300),
]
NO_OBJECTS = [b"", b"[]", b"null", b"{", b"[" * 9000, b"\xff", b'{"a": NaN}']
KEYS = ["type", "role", "content", "stream", "model", "name", "$ref", "strict", ""]


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return each container of a JSON value with each of its keys."""
    if not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [pair for key in keys for pair in places(value[key])]


def mutated(body: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    body = copy.deepcopy(body)
    for _ in range(draw.choice((1, 1, 2, 4))):
        container, key = draw.choice(places(body) or [(body, "model")])
        action = draw.randrange(4)
        if action == 0:
            container[key] = copy.deepcopy(draw.choice(VALUES))
        elif action == 1 and key in container:
            del container[key]
        elif action == 2 and isinstance(container, dict):
            container[draw.choice(KEYS)] = copy.deepcopy(draw.choice(VALUES))
        else:
            other, place = draw.choice(places(body) or [(container, key)])
            container[key] = copy.deepcopy(other.get(place) if isinstance(other, dict) else other)
    return body


@pytest.mark.parametrize("number", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_request_is_an_error_of_the_server(number, client):
    draw = random.Random(number)
    statuses: dict[int, int] = {}
    for index in range(number):
        path, body = REQUESTS[index % len(REQUESTS)]
        content = json.dumps(mutated(body, draw))
        done = client.post(path, content=content)
        assert done.status_code in (200, 400, 404, 413), (content, done.text)
        statuses[done.status_code] = statuses.get(done.status_code, 0) + 1
        if done.status_code != 200:
            assert done.json()["error"]["message"], content
        elif body.get("stream") is True:
            assert '"error"' not in done.text, content
    assert statuses[400] > number / 4
    assert statuses[200] > number / 20
    assert client.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize("path", sorted({path for path, _ in REQUESTS}))
@pytest.mark.parametrize("content", NO_OBJECTS)
def test_a_body_that_is_no_object(path, content, client):
    assert refusal(client.post(path, content=content))["message"]
