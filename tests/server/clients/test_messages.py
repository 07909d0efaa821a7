"""/v1/messages: text, reasoning, tools, events, and the count of tokens."""

import json
from typing import Any

import pytest

from tests.helpers.chat_api import ChatApi, call, without

PATH = "/v1/messages"
HI = {"role": "user", "content": "Hi"}
ASKED: dict[str, Any] = {"model": "tools", "max_tokens": 150, "messages": [HI]}
TOOLS = [
    {"name": name, "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    for name in ("add", "sub")
]
API = ChatApi(PATH, ASKED)
create, stream = API.create, API.stream


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, as Anthropic's client assembles it."""
    message: dict[str, Any] = events[0]["message"]
    texts: list[str] = []
    for event in events[1:]:
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            texts = []
        elif event["type"] == "content_block_delta":
            kind = event["delta"]["type"]
            texts.append(event["delta"][{"input_json_delta": "partial_json"}.get(kind, kind[:-6])])
        elif event["type"] == "content_block_stop":
            block, text = message["content"][event["index"]], "".join(texts)
            is_call = block["type"] == "tool_use"
            block["input" if is_call else block["type"]] = json.loads(text) if is_call else text
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    return message


def without_ids(message: dict[str, Any]) -> Any:
    return without(message, "id")


def test_a_text(client, says):
    says("Hello")
    message = create(client, system=[{"type": "text", "text": "Be kind"}])
    assert message["content"] == [{"type": "text", "text": "Hello"}]
    assert (message["type"], message["stop_reason"]) == ("message", "end_turn")
    assert message["usage"]["input_tokens"] > create(client)["usage"]["input_tokens"]


def test_the_order_of_events(client, says):
    says(f"<think>\nhm\n</think>\n\nI look. {call('sub', 2)}")
    whole = create(client, tools=TOOLS)
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == {"n": 2}
    assert whole["stop_reason"] == "tool_use"
    events = stream(client, tools=TOOLS)
    names = [event["type"] for event in events]
    merged = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
    block = [f"content_block_{name}" for name in ("start", "delta", "stop")]
    assert merged == ["message_start", *block * 3, "message_delta", "message_stop"]
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert starts == [0, 1, 2]
    assert without_ids(assembled(events)) == without_ids(whole)


@pytest.mark.smoke
def test_a_loop_of_two_tools(client, says):
    says(call("add", 1), call("sub", 2), "2")
    messages: list[Any] = [HI]
    for name, n in (("add", 1), ("sub", 2)):
        message = create(client, messages=messages, tools=TOOLS, max_tokens=70)
        (used,) = message["content"]
        assert (used["name"], used["input"]) == (name, {"n": n})
        result = {"type": "tool_result", "tool_use_id": used["id"], "content": "3"}
        messages += [
            {"role": "assistant", "content": message["content"]},
            {"role": "user", "content": [result]},
        ]
    message = create(client, messages=messages, tools=TOOLS, max_tokens=5)
    assert message["content"] == [{"type": "text", "text": "2"}]


@pytest.mark.parametrize(
    ("choice", "number"),
    [
        ({"type": "any"}, 1),
        ({"type": "tool", "name": "sub"}, 1),
        ({"type": "auto", "disable_parallel_tool_use": True}, 1),
        ({"type": "auto"}, 2),
        ({"type": "none"}, 0),
    ],
)
def test_the_choice_of_tools(choice, number, client, says):
    says(call("sub", 1) * (1 + (choice["type"] == "auto")))
    message = create(client, tools=TOOLS, tool_choice=choice)
    used = [block for block in message["content"] if block["type"] == "tool_use"]
    assert len(used) == number
    assert message["stop_reason"] == ("tool_use" if number else "end_turn")


def test_why_a_message_ends(client, says):
    says("one two three")
    ended = create(client, stop_sequences=["three", " two"])
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", " two")
    assert ended["content"][0]["text"] == "one"
    cut = create(client, max_tokens=1)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    assert cut["usage"]["output_tokens"] == 1


def test_a_schema(client):
    schema = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}
    message = create(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(message["content"][0]["text"]) == {"n": 1}


@pytest.mark.parametrize(("kind", "added"), [("enabled", 1), ("disabled", 0), ("adaptive", 0)])
def test_thinking_is_a_variable_of_the_template(kind, added, client):
    def count(**fields: Any) -> int:
        body = {"model": "thinks", "messages": [HI], **fields}
        done = client.post(f"{PATH}/count_tokens", json=body)
        assert done.status_code == 200, done.text
        return int(done.json()["input_tokens"])

    assert count(thinking={"type": kind}) == count() + added


def test_the_count_of_tokens_is_the_prompts(client, says):
    says("Hello")
    for fields in ({}, {"tools": TOOLS}, {"system": "Be kind"}):
        counted = client.post(
            f"{PATH}/count_tokens", json={"model": "tools", "messages": [HI], **fields}
        )
        number = create(client, **fields)["usage"]["input_tokens"]
        assert counted.json() == {"input_tokens": number}


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"model": "tool"}, 404, "Did you mean 'tools'?"),
        ({"messages": [HI, {"role": "assistant", "content": "So"}]}, 400, "role user"),
        ({"messages": [{"role": "system", "content": "a"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "image"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}],
                    }
                ]
            },
            400,
            "no tool_use blocks",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}
                ]
            },
            400,
            "unknown call",
        ),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "tools.0"),
        ({"output_config": {"effort": "low"}}, 400, "reasoning_effort"),
        ({"container": "c"}, 400, "container"),
        ({"tool_choice": {"type": "any"}}, 400, "requires tools"),
    ],
)
def test_an_unsupported_request(fields, status, message, client):
    done = client.post(PATH, json={**ASKED, **fields})
    assert done.status_code == status, done.text
    assert done.json()["type"] == "error"
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert done.json()["error"]["type"] == kind
    assert message in done.json()["error"]["message"]
