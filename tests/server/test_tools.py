"""Tool calls in chats: OpenAI's client over a socket, with a model of scripted completions."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="the official client is not installed")
pytest.importorskip("starlette", reason="the extra peftkit[serve] is not installed")
pytest.importorskip("llguidance", reason="the extra peftkit[json] is not installed")

from peftkit.inference.bank import AdapterBank  # noqa: E402
from peftkit.inference.call_formats import FORMATS  # noqa: E402
from peftkit_server.app import make_app  # noqa: E402
from peftkit_server.completions import ChatService  # noqa: E402
from peftkit_server.grammars import Grammar, Grammars  # noqa: E402
from peftkit_server.limits import Limits  # noqa: E402
from peftkit_server.tool_fields import ToolCall, with_calls  # noqa: E402
from tests.helpers.scripted_chat import make_say, scripted_bank  # noqa: E402
from tests.helpers.serving import openai_client  # noqa: E402

KEY = "a-key-of-this-test"
ASKED: list[Any] = [{"role": "user", "content": "Hi"}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    schema["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TOOLS = [tool("add", n={"enum": [1, 2]}), tool("now")]


@pytest.fixture
def tool_bank(llama: Any, tokenizer: Any, tmp_path: Path) -> AdapterBank:
    return scripted_bank(llama, tokenizer, tmp_path)


@pytest.fixture
def client(tool_bank: AdapterBank) -> Iterator[Any]:
    app = make_app(tool_bank, keys=[KEY], limits=Limits(max_body=1 << 16, max_new_tokens=8))
    with openai_client(app, KEY) as client:
        yield client


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, tool_bank: AdapterBank) -> Callable[[str], None]:
    """Make the model generate a text."""

    return partial(make_say, monkeypatch, tool_bank)


def ask(client: Any, messages: Any = ASKED, **options: Any) -> Any:
    given = {"model": "tools", "tools": TOOLS, "max_tokens": 180, **options}
    return client.chat.completions.create(messages=messages, **given)


def pieces(client: Any, **options: Any) -> Any:
    """Stream a completion; return the message and finish reason that the client assembles."""
    given = {"model": "tools", "tools": TOOLS, "max_tokens": 180, **options}
    with client.chat.completions.stream(messages=ASKED, **given) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0]


def same(one: Any, other: Any) -> bool:
    """Return whether two choices are equal except for the ids of calls."""
    a, b = (each.to_dict() for each in (one, other))
    for each in (a, b):
        for call in each["message"].get("tool_calls") or []:
            assert len(call.pop("id")) == 9
            for key in ("index", "parsed_arguments"):
                call.pop(key, None)
                call["function"].pop(key, None)
        each["message"] = {k: v for k, v in each["message"].items() if v not in (None, "", [])}
        each["message"].pop("parsed", None)
    return bool(a["message"] == b["message"] and a["finish_reason"] == b["finish_reason"])


@pytest.mark.parametrize(
    ("choice", "names", "reason"),
    [
        ("required", {"add", "now"}, "tool_calls"),
        ({"type": "function", "function": {"name": "add"}}, {"add"}, "stop"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "now"}}],
                },
            },
            {"now"},
            "tool_calls",
        ),
    ],
)
def test_a_forced_call_is_continued(choice, names, reason, client):
    answer = ask(client, tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.message.content is None
    assert answer.finish_reason == reason
    assert call.function.name in names
    given = json.loads(call.function.arguments)
    assert given == {} if call.function.name == "now" else given["n"] in (1, 2)
    assert same(pieces(client, tool_choice=choice), answer)
    replies = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    after = ask(client, [*ASKED, answer.message, replies], max_tokens=4).choices[0]
    assert after.finish_reason in ("stop", "length")
    assert after.message.content


CALL = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "thought", "calls", "reason"),
    [
        (f"I look.\n{CALL}\n{CALL}", "I look.", None, 2, "tool_calls"),
        (f"<think>\nhm {CALL}\n</think>\n\n{CALL}", None, f"hm {CALL}", 1, "tool_calls"),
        (CALL[:-3], CALL[:-3], None, 0, "stop"),
        ("a <tool b", "a <tool b", None, 0, "stop"),
    ],
)
def test_what_a_model_says_is_text_reasoning_and_calls(
    text, content, thought, calls, reason, client, says
):
    says(text)
    answer = ask(client).choices[0]
    message = answer.message.to_dict()
    assert message.get("content") == content
    assert message.get("reasoning_content") == thought
    made = message.get("tool_calls", [])
    assert [json.loads(one["function"]["arguments"]) for one in made] == [{"n": 1}] * calls
    assert answer.finish_reason == reason
    assert same(pieces(client), answer)
    plain = ask(client, tool_choice="none").choices[0]
    assert plain.message.content == text
    assert plain.finish_reason == "stop"


def test_without_parallel_calls_an_answer_ends_after_the_first(client, says):
    says(f"{CALL}\n{CALL}")
    answer = ask(client, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    assert same(pieces(client, parallel_tool_calls=False), answer.choices[0])
    both = ask(client)
    assert both.usage.completion_tokens > answer.usage.completion_tokens


def test_a_call_that_was_cut_is_text(client, says):
    says(CALL)
    answer = ask(client, max_tokens=20).choices[0]
    assert answer.finish_reason == "length"
    assert not answer.message.tool_calls
    assert CALL.startswith(answer.message.content)


NAMED = {"type": "function", "function": {"name": "later"}}
MADE = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice requires tools"),
        ({"tool_choice": NAMED}, "tool_choice names later"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "two tools have the name add"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [tool("no spaces")]}, "tools.0.function.name"),
        ({"tools": TOOLS * 65}, "tools"),
        ({"model": "plain"}, "writes no calls"),
        ({"model": "mute"}, "writes no calls"),
        (
            {"tools": [tool("f", a={"type": "nothing"})], "tool_choice": "required"},
            "constrained to this tool_choice",
        ),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude"),
        (
            {"messages": [*ASKED, {"role": "tool", "tool_call_id": "b", "content": "3"}]},
            "messages.1 refers to an unknown call",
        ),
        ({"messages": [*ASKED, {"role": "tool", "content": "3"}]}, "tool_call_id"),
        ({"messages": [*ASKED, {**MADE, "role": "user", "content": ""}]}, "role assistant"),
        ({"model": "mute", "messages": [*ASKED, MADE], "tools": []}, "writes no calls"),
    ],
)
def test_what_cannot_be_done_is_one_clear_refusal(options, message, client):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **options)
    assert message in str(refused.value)


def test_arguments_that_are_no_object_are_refused(client):
    for wrong in ("[1]", "{", "7"):
        call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": wrong}}
        with pytest.raises(openai.BadRequestError, match="JSON object"):
            ask(client, [*ASKED, {"role": "assistant", "tool_calls": [call]}])


def test_calls_and_replies_stand_as_templates_take_them():
    def made(*keys: str) -> list[ToolCall]:
        return [
            ToolCall.model_validate({"id": key, "function": {"name": "f", "arguments": '{"a": 1}'}})
            for key in keys
        ]

    turns = [
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "1", "tool_call_id": "call_abcdef0123456789"},
        {"role": "tool", "content": "2", "tool_call_id": "abcdefgh1"},
    ]
    calls = [made("call_abcdef0123456789", "abcdefgh1"), [], []]
    for form in FORMATS[:1]:
        done = with_calls(turns, calls, form)
        assert [one["id"] for one in done[0]["tool_calls"]] == ["call00000", "abcdefgh1"]
        assert [one["tool_call_id"] for one in done[1:]] == ["call00000", "abcdefgh1"]
        assert [one["name"] for one in done[1:]] == ["f", "f"]
        assert done[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


@pytest.mark.smoke
def test_the_guides_program_runs_as_it_stands(client, tool_bank, monkeypatch, capsys):
    guide = (Path(__file__).parents[2] / "docs/tools.md").read_text(encoding="utf-8")
    program = guide.split("```python\n")[1].split("```")[0]
    call = '<tool_call>\n{"name": "multiply", "arguments": {"a": 37, "b": 84}}\n</tool_call>'
    tokenizer = tool_bank.base.tokenizer
    grammars = Grammars(tokenizer, 384, [tokenizer.eos_token_id])
    texts = iter([call, "It is 3108."])
    monkeypatch.setattr(
        ChatService,
        "_constraint",
        lambda *_: grammars.constraint(Grammar(f"start: {json.dumps(next(texts))}", is_lark=True)),
    )
    monkeypatch.setenv("OPENAI_BASE_URL", str(client.base_url))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("MODEL", "tools")
    names: dict[str, Any] = {}
    exec(compile(program, "docs/tools.md", "exec"), names)
    assert capsys.readouterr().out == "It is 3108.\n"
    assert names["messages"][-2]["content"] == "3108"
