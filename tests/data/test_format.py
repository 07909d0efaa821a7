"""Rows are understood by their fields; what cannot be used is named by file, line and field."""

import itertools
import json
from typing import Any

import pytest

from peftkit.data import messages
from peftkit.data.examples import Completion, Conversation, Instruction, Text
from peftkit.data.format import FieldNames, ParsedRow, parse
from peftkit.data.records import Record
from peftkit.errors import ConfigError, DataError
from peftkit.tasks.tokens import CausalLMConfig

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}


def parsed(*rows: dict[str, Any], name: Any = "auto") -> ParsedRow:
    records = [Record(row, f"a.jsonl:{line}") for line, row in enumerate(rows, start=1)]
    return parse(records, name, where="a.jsonl")


def test_two_named_fields_are_prompt_and_completion():
    names = FieldNames("q", "a", ("task.prompt", "task.completion"))
    records = [Record({"q": "1 ", "a": "2", "text": "3"}, "a.jsonl:1")]
    parsed_rows = parse(records, "auto", where="a.jsonl", fields=names)
    assert parsed_rows.examples == (Completion("1 ", "2", "a.jsonl:1"),)
    assert parsed_rows.unused == ("text",)
    with pytest.raises(DataError, match=r"a\.jsonl:2 lacks 'q' or 'a' \(task\.prompt"):
        parse([*records, Record({"q": "1"}, "a.jsonl:2")], "auto", where="a.jsonl", fields=names)
    with pytest.raises(ConfigError, match="prompt and completion are named together"):
        CausalLMConfig(prompt="q")


def test_a_text_of_many_megabytes_is_refused(monkeypatch):
    monkeypatch.setattr(messages, "MAX_CHARACTERS", 9)
    assert "a.jsonl:2: text: 10 characters; at most 9" in refused(
        {"text": "a" * 9}, {"text": "a" * 10}
    )


def refused(*rows: dict[str, Any], name: Any = "auto") -> str:
    with pytest.raises(DataError) as caught:
        parsed(*rows, name=name)
    return str(caught.value)


WHERE = "a.jsonl:1"
CONVERSATION, INSTRUCTION = Conversation((U, A), (1,), (), WHERE), Instruction("q", "", "a", WHERE)


@pytest.mark.parametrize(
    ("row", "name", "example"),
    [
        ({"messages": [U, A]}, "messages", CONVERSATION),
        ({"conversations": [HUMAN, GPT]}, "sharegpt", CONVERSATION),
        ({"conversations": [U, A]}, "messages", CONVERSATION),
        ({"instruction": "q", "input": "", "output": "a"}, "alpaca", INSTRUCTION),
        ({"question": "q", "answer": "a"}, "alpaca", INSTRUCTION),
        ({"prompt": "q ", "completion": "a"}, "prompt_completion", Completion("q ", "a", WHERE)),
        ({"prompt": [U], "completion": [A]}, "prompt_completion", CONVERSATION),
        ({"text": "t"}, "text", Text("t", WHERE)),
        ({"instruction": "q", "output": "a", "text": "q a"}, "alpaca", INSTRUCTION),
    ],
)
def test_a_format_is_found_by_its_fields(row, name, example):
    parsed_rows = parsed(row)
    assert parsed_rows.format == name
    assert parsed_rows.examples == (example,)
    assert parsed(row, name=name).examples == (example,)


def test_fields_that_nothing_uses_are_told():
    rows: list[dict[str, Any]] = [
        {"id": 1, "question": "q", "answer": "a"},
        {"question": "q", "answer": "a", "tag": "x"},
    ]
    assert parsed(*rows).unused == ("id", "tag")


def test_tool_turns_of_sharegpt_become_tool_calls():
    turns = [
        HUMAN,
        {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
        {"from": "observation", "value": "3"},
        GPT,
    ]
    tools = '[{"name": "f", "parameters": {}}]'
    (example,) = parsed({"conversations": turns, "tools": tools, "system": "s"}).examples
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert example == Conversation(
        (
            {"role": "system", "content": "s"},
            U,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "3"},
            A,
        ),
        (2, 4),
        ({"type": "function", "function": {"name": "f", "parameters": {}}},),
        "a.jsonl:1",
    )


def test_openai_tool_calls_keep_ids_and_lose_the_json_in_their_arguments():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "!"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {**A, "weight": 0},
        U,
        {**A, "refusal": None, "name": "n"},
    ]
    (example,) = parsed({"messages": turns}).examples
    assert isinstance(example, Conversation)
    assert example.target_turns == (2, 6)
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "c1"}
    assert list(example.messages) == [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": "q!"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        A,
        U,
        {**A, "name": "n"},
    ]


@pytest.mark.parametrize("mark", messages.MARKS)
@pytest.mark.parametrize(("off", "on"), [(False, True), (0, 1), (0.0, None)])
def test_a_turn_with_any_mark_is_context(mark, off, on):
    turns = [{**U, mark: off}, {**A, mark: off}, {**U, mark: None}, {**A, mark: on}]
    (example,) = parsed({"messages": turns}).examples
    assert isinstance(example, Conversation)
    assert (example.messages, example.target_turns) == ((U, A, U, A), (3,))
    assert parsed({"messages": turns}).unused == ()


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(messages.MARKS, 2)])
def test_contradictory_marks_of_a_turn_are_both_named(first, second):
    assert parsed({"messages": [U, {**A, first: 1, second: True}]}).unused == ()
    words = refused({"messages": [U, {**A, first: 1, second: False}]})
    assert f"messages[1].{second}: False contradicts {first}: 1" in words


def test_keys_in_turns_calls_tools_and_parts_that_nothing_reads_are_unused_fields():
    call = {"id": "c1", "index": 0, "function": {"name": "f", "arguments": "{}", "strict": True}}
    turns = [
        {**U, "content": [{"type": "text", "text": "q", "cache_control": {}}], "score": 0},
        {"role": "assistant", "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        A,
    ]
    tools = [{"type": "function", "strict": True, "function": {"name": "f", "description": "d"}}]
    row = {"messages": turns, "tools": tools, "chat_template_kwargs": {"thinking": 1}, "id": 7}
    assert set(parsed(row).unused) == {
        "id",
        "messages[].content[].cache_control",
        "messages[].score",
        "messages[].tool_calls[].index",
        "messages[].tool_calls[].function.strict",
        "messages[].tool_call_id",
        "tools[].strict",
        "chat_template_kwargs.thinking",
    }
    as_cells = {name: json.dumps(value) for name, value in row.items()}
    assert parsed(as_cells) == parsed(row)


@pytest.mark.parametrize(
    ("role", "usual"),
    [
        *(("User", "user"), ("SYSTEM", "system"), ("Human", "user"), ("AI", "assistant")),
        *(("Assistant", "assistant"), ("tool-response", "tool"), ("ipython", "tool")),
    ],
)
def test_synonyms_of_roles_are_the_same_roles(role, usual):
    assert messages.role_of({"role": role}) == messages.role_of({"from": role}) == usual


@pytest.mark.parametrize("role", ["function_call", "tool_call", "Tool-Call"])
def test_a_turn_of_a_call_is_an_assistant_s_turn(role):
    turns = [U, {"role": role, "content": '{"name": "f", "arguments": {}}'}, A]
    (example,) = parsed({"messages": turns}).examples
    assert isinstance(example, Conversation)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert example.messages[1] == {"role": "assistant", "tool_calls": [call]}
    assert example.target_turns == (1, 2)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": None, "conversation": [U, A]},
        {"messages": None, "conversations": [HUMAN, GPT], "text": "t"},
        {"text": None, "messages": [U, A]},
        {"prompt": None, "completion": None, "messages": [U, A], "output": "x"},
    ],
)
def test_a_field_without_a_value_is_not_the_format_of_a_row(row):
    assert parsed(row).examples == (CONVERSATION,)


def test_what_was_thought_is_one_field_whatever_it_was_called():
    thought = {**A, "reasoning_content": "hm"}
    for turn in (
        thought,
        {**A, "reasoning": "hm"},
        {**A, "thinking": "hm"},
        {**A, "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]},
    ):
        (example,) = parsed({"messages": [U, turn]}).examples
        assert isinstance(example, Conversation)
        assert example.messages[1] == thought
    words = refused({"messages": [{**U, "reasoning": "hm"}, A]})
    assert "only the assistant may have reasoning" in words


def test_alpaca_with_system_and_history_is_a_conversation():
    row = {"instruction": "q2", "output": "a2", "system": "s", "history": [["q1", "a1"]]}
    (example,) = parsed(row).examples
    assert isinstance(example, Conversation)
    assert [message["content"] for message in example.messages] == ["s", "q1", "a1", "q2", "a2"]
    assert example.target_turns == (2, 4)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": None}, "messages: expected a list of turns, found null"),
        ({"messages": []}, "messages: empty"),
        ({"messages": [U]}, "messages: there is no assistant turn"),
        ({"messages": [{"role": "user"}, A]}, "messages[0].content: missing"),
        ({"messages": [U, {**A, "content": None}]}, "messages[1].content: expected text, found nu"),
        ({"messages": [{**U, "role": "usr"}, A]}, "unknown role 'usr'. Did you mean 'user'?"),
        ({"messages": "[{'role': 'user'}]"}, "messages: not JSON: Expecting property name"),
        ({"messages": [U, {**A, "weight": 0.5}]}, "messages[1].weight: expected true, false, 0 or"),
        ({"messages": [{**U, "train": 1}, A]}, "messages[0].train: expected false or 0 on a turn"),
        ({"messages": [U, A], "chat_template_kwargs": 1}, "chat_template_kwargs: expected an obj"),
        (
            {"messages": [{**U, "content": [{"type": "image_url"}]}, A]},
            "messages[0].content[0]: only text can be trained on, found 'image_url'",
        ),
        ({"messages": [{**U, "tool_calls": [{}]}, A]}, "only the assistant may call tools"),
        ({"messages": [U, {**A, "tool_calls": [{}]}]}, "messages[1].tool_calls[0].name: missing"),
        (
            {"messages": [U, {**A, "tool_calls": [{"name": "f", "arguments": "{x"}]}]},
            "messages[1].tool_calls[0].arguments: not JSON",
        ),
        ({"messages": [U, A], "tools": 3}, "tools: expected a list of functions, found a number"),
        ({"conversations": [HUMAN, {"from": "gpt"}]}, "conversations[1].value: missing"),
        ({"instruction": "q", "output": None}, "output: expected text, found null"),
        ({"instruction": " ", "output": "a"}, "instruction: empty"),
        ({"instruction": "q", "output": "a", "history": [["q"]]}, "history[0]: expected [question"),
        ({"prompt": 3, "completion": "a"}, "prompt: expected text, found a number (3)"),
        ({"prompt": "q", "completion": "a", "tools": "[{}]"}, "tools: tools need messages"),
        ({"text": "\ud800"}, "text: holds half of a surrogate pair"),
        ({"text": "t", "images": ["a.png"]}, "images: the row has images"),
        ({"conversations": [HUMAN], "chosen": GPT, "rejected": GPT}, "chosen: the row has pref"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(row, words):
    message = refused(row)
    assert f"a.jsonl:1: {words}" in message or words in message
    assert "a.jsonl:1: " in message


def test_unknown_fields_are_listed_with_what_is_accepted():
    message = refused({"foo": 1, "bar": 2})
    assert "a.jsonl:1 has the fields: foo, bar." in message
    assert "prompt + completion" in message
    assert "--set 'task.prompt=foo' --set 'task.completion=bar'" in message


@pytest.mark.parametrize("answer", [42, 3.5])
def test_a_number_is_an_answer(answer):
    (example,) = parsed({"question": "6 x 7?", "answer": answer}).examples
    assert isinstance(example, Instruction)
    assert example.output == str(answer)


def test_names_in_capitals_are_the_same_names():
    found = parsed({"Instruction": "Say it.", "Response": "It."})
    assert (found.format, found.unused) == ("alpaca", ())


def test_a_file_of_two_formats_is_refused_at_the_row_that_differs():
    message = refused({"text": "t"}, {"question": "q", "answer": "a"}, {"foo": 1})
    assert (
        "a.jsonl:2: its fields (question, answer) make the format 'alpaca'; the first row is 'text'"
        in message
    )
    assert "a.jsonl:3: its fields (foo) make no known format" in message
    assert "2 of 3 rows" in message


def test_many_bad_rows_are_one_error_that_shows_the_first_few():
    message = refused({"text": "t"}, *[{"text": None}] * 20)
    assert "20 of 21 rows" in message
    assert "a.jsonl:6: text" in message
    assert "a.jsonl:7" not in message
    assert "and 15 more" in message


def test_all_bad_rows_go_into_a_text_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rows = [Record({"messages": []}, f"my rows.jsonl:{n}") for n in range(9)]
    with pytest.raises(DataError) as refused:
        parse(rows, "auto", where="my rows.jsonl")
    (file,) = tmp_path.glob("peftkit-bad-rows-my-rows.jsonl-*.txt")
    assert str(file) in str(refused.value)
    assert len(file.read_text(encoding="utf-8").splitlines()) == 9
