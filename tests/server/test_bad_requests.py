"""Requests that the server refuses, with their status; none reaches the model."""

import json
import socket
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError

from peftkit.errors import AdapterError, ConfigError
from peftkit_server.listening import listening
from peftkit_server.refusals import RequestError
from peftkit_server.requests import ChatBody, TextBody
from peftkit_server.server import serve_adapters, vllm_command
from peftkit_server.tinker.bodies import Sample, Sampling
from peftkit_server.tokens import TokenBody
from peftkit_server.validation import read_body, validated
from tests.helpers.serving import refusal

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"model": "one", "prompt": "the quick", "max_tokens": 2}


ASKED: Any = {"model": "one", "messages": [{"role": "user", "content": "Hi"}]}
UNKNOWN_TYPE = {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (TEXT, b"model=one", 400, "line 1"),
        (TEXT, b"[1]", 400, ""),
        (TEXT, b"\xff\xfe", 400, "UTF-8"),
        (TEXT, b"[" * 3000, 400, "deep"),
        (TEXT, b'{"model": "one", "prompt": "' + b"a" * 5000 + b'"}', 413, "4,096 bytes"),
        (TEXT, {"model": "one"}, 400, "prompt"),
        (TEXT, {**GOOD, "model": "onee"}, 404, "Did you mean 'one'?"),
        (TEXT, {**GOOD, "temprature": 1}, 400, "temperature"),
        (TEXT, {**GOOD, "temperature": "hot"}, 400, "temperature"),
        (TEXT, {**GOOD, "temperature": -1}, 400, "temperature"),
        (TEXT, {**GOOD, "top_p": 0}, 400, "top_p"),
        (TEXT, {**GOOD, "max_tokens": 0}, 400, "max_tokens"),
        (TEXT, {**GOOD, "stop": "a" * 257}, 400, "256"),
        (TEXT, {**GOOD, "stop": ["a", "a" * 257]}, 400, "256"),
        (TEXT, {**GOOD, "n": 5}, 400, "5 completions"),
        (TEXT, {**GOOD, "prompt": []}, 400, "0 completions"),
        (TEXT, {**GOOD, "prompt": ""}, 400, "empty"),
        (TEXT, {**GOOD, "prompt": [5, 100_000]}, 400, "100000"),
        (TEXT, {**GOOD, "prompt": [5] * 1000}, 400, "no room"),
        (TEXT, {**GOOD, "logprobs": 6}, 400, "logprobs"),
        (TEXT, {**GOOD, "response_format": {"type": "json_object"}}, 400, "response_format"),
        (CHAT, {**ASKED, "top_logprobs": 2}, 400, "needs logprobs"),
        (CHAT, {**ASKED, "response_format": {"type": "json_schema"}}, 400, "json_schema"),
        (CHAT, {**ASKED, "response_format": UNKNOWN_TYPE}, 400, "nothing"),
        (CHAT, {"model": "one", "messages": []}, 400, "messages"),
        (CHAT, {"model": "one", "messages": [{"role": "user"}]}, 400, "content"),
        (CHAT, {**ASKED, "messages": [{"role": "robot", "content": "Hi"}]}, 400, "messages.0.role"),
        (CHAT, {**ASKED, "tools": [{"type": "function"}]}, 400, "tools"),
    ],
)
def test_an_invalid_request(path, body, status, message, refusing):
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    error = refusal(refusing.post(path, **sent), status)
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [1]},
        {"properties": {"n": 5}},
        {"properties": {"n": {"type": 5}}},
        {"properties": {"n": {"anyOf": 5}}},
        {"properties": {"n": {"oneOf": [{"type": [1]}]}}},
        {"properties": {"n": {"enum": 5}}},
        {"properties": {"n": {}}, "required": 5},
    ],
)
def test_parameters_that_are_no_schema(schema, refusing):
    function = {"name": "add", "parameters": schema}
    body = {**ASKED, "tools": [{"type": "function", "function": function}]}
    done = refusing.post(CHAT, json=body)
    assert done.status_code == 400, done.text
    assert "tools.0.function.parameters: Value error, not a JSON schema" in done.text


def test_fields_that_ask_for_nothing_are_no_error(client):
    nothing = {"presence_penalty": 0.0, "logprobs": None, "user": "me", "suffix": None}
    assert client.post(TEXT, json={**GOOD, **nothing}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v2", 404), ("GET", TEXT, 405), ("POST", "/health", 405)],
)
def test_a_path_that_is_not_there(method, path, status, refusing):
    assert path in refusal(refusing.request(method, path), status)["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost:3000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"origin": "https://example.org"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "example.org"}, 403),
    ],
)
def test_web_pages_require_a_key(headers, status, refusing):
    assert refusing.get("/v1/models", headers=headers).status_code == status
    assert refusing.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [("Bearer sesame", 200), ("bearer sesame", 200), ("Bearer Sesame", 401), ("sesame", 401)],
)
def test_a_key_opens_to_any_host(header, status, bank):
    from starlette.testclient import TestClient

    from peftkit_server.app import make_app

    with TestClient(make_app(bank, keys=["sesame"]), base_url="http://example.org") as client:
        assert client.get("/v1/models", headers={"authorization": header}).status_code == status
        assert client.post(TEXT, json=GOOD).status_code == 401
        assert client.get("/health").status_code == 200


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(paths):
    with listening("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            serve_adapters(paths, "no/base", port=port)


def test_a_host_that_is_not_here_is_told():
    with pytest.raises(ConfigError, match="cannot listen on 192"):
        listening("192.0.2.1", 0).close()
    with listening("localhost", 0) as listener:
        assert isinstance(listener, socket.socket)


def test_no_adapter_is_named_as_the_base(paths):
    with pytest.raises(AdapterError, match="'base'"):
        serve_adapters({"base": paths["one"]}, port=0)


def test_it_says_how_vllm_loads_the_same_folders(bank, paths):
    command = vllm_command(bank)
    assert command is not None
    assert "--max-lora-rank 8 " in command
    assert f"--lora-modules one={paths['one']} two={paths['two']}" in command


MANY = 1000


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (ChatBody, "messages", [0] * MANY),
        (ChatBody, "messages", [{"role": "user", "content": [0] * MANY}]),
        (TextBody, "prompt", [{}] * MANY),
        (TextBody, "prompt", [[""] * MANY]),
        (TokenBody, "token_ids", [""] * MANY),
        (Sample, "prompt", {"chunks": [{"tokens": [""] * MANY}]}),
        (Sample, "prompt", {"chunks": [0] * MANY}),
    ],
)
def test_one_wrong_element_of_a_long_list_is_checked(kind, field, value):
    with pytest.raises(ValidationError) as told:
        kind.model_validate({field: value})
    assert sum(error["loc"][0] == field for error in told.value.errors()) < 6


@pytest.mark.parametrize("read", [partial(read_body, kind=kind) for kind in (TextBody, Sample)])
def test_fields_that_are_wrong_by_the_thousand_are_counted(read):
    with pytest.raises(RequestError, match=r"1,0.* errors"):
        read(json.dumps({f"field{n}": 1 for n in range(MANY)}).encode())


@pytest.mark.parametrize("stop", ["a" * 257, ["a" * 257]])
def test_stop_texts_of_tinker_s_clients_are_bounded(stop):
    with pytest.raises(RequestError, match="at most 256 characters"):
        validated({"stop": stop}, Sampling)
    assert validated({"stop": "a" * 256}, Sampling)


def test_a_prompt_that_fills_the_context_has_its_code(client):
    refused = client.post(TEXT, json={**GOOD, "prompt": [5] * 1000})
    assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_unset_options_and_messages_of_openai_s_client_are_accepted():
    call = {"id": "a", "type": "function", "index": 0}
    call["function"] = {"name": "now", "arguments": "{}", "parsed_arguments": {}}
    reply = {"role": "assistant", "tool_calls": [call], "annotations": [], "refusal": ""}
    options = {"reasoning_effort": None, "verbosity": None, "function_call": None, "audio": None}
    turns = [*ASKED["messages"], reply | {"parsed": None, "function_call": None}]
    body = read_body(json.dumps({**ASKED, **options, "messages": turns}).encode(), ChatBody)
    assert body.messages[1].plain() == {"role": "assistant", "content": ""}
    for wrong in ({"verbosity": "low"}, {"messages": [*turns, reply | {"refusal": "no"}]}):
        with pytest.raises(RequestError):
            read_body(json.dumps({**ASKED, **wrong}).encode(), ChatBody)


def test_strict_schemas_are_closed():
    part = {"type": "object", "properties": {"b": {"type": "string"}}}
    schema = {
        "type": "object",
        "properties": {"properties": part, "list": {"type": "array", "items": part}},
        "anyOf": [part, {"type": "object", "properties": {}, "additionalProperties": True}],
        "allOf": [part],
        "$defs": {"x": part},
    }
    shut = {**part, "additionalProperties": False}
    expected = {
        **schema,
        "properties": {"properties": shut, "list": {"type": "array", "items": shut}},
        "anyOf": [shut, schema["anyOf"][1]],
        "$defs": {"x": shut},
    }
    function = {"name": "f", "parameters": schema}
    for strict, result in ((True, expected), (False, schema), (None, schema)):
        form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
        body = read_body(json.dumps({**ASKED, "response_format": form}).encode(), ChatBody)
        assert body.schema_of_answer == result
        tool = {"type": "function", "function": {**function, "strict": strict}}
        asked = {**ASKED, "tools": [tool], "tool_choice": "required"}
        use = read_body(json.dumps(asked).encode(), ChatBody).tool_use
        assert use.forced[0]["function"]["parameters"] == result
        assert use.offered[0]["function"]["parameters"] == schema
