"""/v1/responses: text, reasoning, tools, events, and conversations that the server keeps."""

import json
from typing import Any

import pytest

from tests.helpers.chat_api import ChatApi, call, without
from tests.helpers.serving import refusal

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"model": "tools", "input": "Hi"}
TOOLS = [
    {
        "type": "function",
        "name": name,
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
    }
    for name in ("add", "sub")
]
API = ChatApi(PATH, ASKED)
create, stream = API.create, API.stream


def without_ids(response: Any) -> Any:
    return without(response, "id", "call_id", "created_at", "completed_at")


def test_a_text(client, says):
    says("Hello")
    response = create(client, instructions="Be kind", metadata={"a": "b"})
    (item,) = response["output"]
    assert (item["type"], item["status"]) == ("message", "completed")
    assert [part["text"] for part in item["content"]] == ["Hello"]
    assert response["status"] == "completed"
    assert response["metadata"] == {"a": "b"}
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens"] > create(client)["usage"]["input_tokens"]


def test_the_order_of_events(client, says):
    says(f"<think>\nhm\n</think>\n\nI look. {call('sub', 2)}")
    whole = create(client, tools=TOOLS)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    events = stream(client, tools=TOOLS)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"].removeprefix("response.") for event in events]
    merged = [name for name, before in zip(names, [None, *names], strict=False) if name != before]

    def text(kind: str) -> list[str]:
        return [
            "output_item.added",
            "content_part.added",
            f"{kind}.delta",
            f"{kind}.done",
            "content_part.done",
            "output_item.done",
        ]

    arguments = "function_call_arguments"
    calls = ["output_item.added", f"{arguments}.delta", f"{arguments}.done", "output_item.done"]
    expected = [*text("reasoning_text"), *text("output_text"), *calls]
    assert merged == ["created", "in_progress", *expected, "completed"]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert done == events[-1]["response"]["output"]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == done[event["output_index"]]["id"]
    deltas = [event["delta"] for event in events if event["type"].endswith("output_text.delta")]
    assert "".join(deltas) == done[1]["content"][0]["text"] == "I look."


@pytest.mark.smoke
def test_a_loop_of_two_tools(client, says):
    says(call("add", 1), call("sub", 2), "2")
    conversation: list[Any] = [{"role": "user", "content": "Hi"}]
    for name, n in (("add", 1), ("sub", 2)):
        response = create(client, input=conversation, tools=TOOLS, store=False)
        (made,) = response["output"]
        assert (made["name"], json.loads(made["arguments"])) == (name, {"n": n})
        output = {"type": "function_call_output", "call_id": made["call_id"], "output": "3"}
        conversation += [made, output]
    response = create(client, input=conversation, tools=TOOLS)
    assert response["output"][0]["content"][0]["text"] == "2"


def test_a_kept_response_is_continued(client, says):
    says(call("add", 1), "3", "3")
    first = create(client, tools=TOOLS, instructions="Be kind")
    made = first["output"][0]
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": "3"}
    second = create(client, previous_response_id=first["id"], input=[result], tools=TOOLS)
    whole = create(
        client, input=[{"role": "user", "content": "Hi"}, made, result], tools=TOOLS, store=False
    )
    assert second["usage"] == whole["usage"]  # instructions are not part of the conversation
    assert client.get(f"{PATH}/{second['id']}").json() == second
    other = {"X-API-Key": "key-b"}
    for id, headers in ((whole["id"], {}), (first["id"], other), ("resp_none", {})):
        error = refusal(client.get(f"{PATH}/{id}", headers=headers), 404)
        assert error["code"] == "previous_response_not_found"
    assert client.delete(f"{PATH}/{first['id']}").json()["deleted"]
    fields = {**ASKED, "previous_response_id": first["id"]}
    assert client.post(PATH, json=fields).status_code == 404


def test_kept_responses_are_bounded(client, says):
    says("Hello")
    ids = [create(client, input="a" * 120)["id"] for _ in range(12)]
    found = [client.get(f"{PATH}/{id}").status_code == 200 for id in ids]
    assert found == sorted(found)
    assert 1 <= sum(found) < 12
    kept = client.get(f"{PATH}/{ids[-1]}")
    assert sum(found) * len(kept.content) <= 6_000  # key_share of response_bytes


def test_the_limit_of_tokens(client, says):
    says("Hello there")
    events = stream(client, max_output_tokens=2)
    response = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["usage"]["output_tokens"] == 2


def test_a_schema(client):
    schema = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}
    format = {"type": "json_schema", "name": "x", "strict": True, "schema": schema}
    response = create(client, text={"format": format})
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"n": 1}
    assert response["text"]["format"] == format


def test_an_error_after_the_first_event(client, says, scripted, monkeypatch):
    from peftkit.inference.calls import Reader

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("broken")

    says("Hello")
    monkeypatch.setattr(Reader, "feed", fail)
    events = stream(client, tools=TOOLS)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert "broken" in events[-2]["message"]
    assert events[-1]["response"]["status"] == "failed"
    assert client.post(PATH, json={**ASKED, "tools": TOOLS}).status_code == 500


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "no"}}, ""),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": []}, "input"),
        ({"reasoning": {"effort": "low"}}, "reasoning_effort"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"nothing": 1}, "nothing"),
    ],
)
def test_an_unsupported_request(fields, param, client):
    error = refusal(client.post(PATH, json={**ASKED, **fields}))
    assert (error["param"] or "") == param
