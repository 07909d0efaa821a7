"""Rows of comparisons are found by their fields; what is none is named with its line and field."""

from typing import Any

import pytest

from peftkit.data.examples import Completion, Conversation, Instruction, Text
from peftkit.data.messages import WrongField
from peftkit.data.preferences import (
    USELESS,
    check_both_labels,
    read_pair,
    read_pairs_of,
    read_verdicts,
)
from peftkit.data.records import Dropped, Record
from peftkit.errors import DataError

USER = {"role": "user", "content": "who?"}
GOOD = {"role": "assistant", "content": "the fox"}
BAD = {"role": "assistant", "content": "the dog"}
SHAREGPT = {"from": "gpt", "value": "the dog"}
CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "find", "arguments": {"what": "fox"}}}],
}
TOOLS = [{"name": "find", "parameters": {}}]


def records(*rows: dict[str, Any]) -> list[Record]:
    return [Record(row, f"a.jsonl:{n}") for n, row in enumerate(rows, start=1)]


def conversation(example: Any) -> Conversation:
    assert isinstance(example, Conversation)
    return example


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "who?", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"messages": [USER], "chosen": GOOD, "rejected": BAD},
        {
            "conversations": [{"from": "human", "value": "who?"}],
            "chosen": {"from": "gpt", "value": "the fox"},
            "rejected": SHAREGPT,
        },
        {
            "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [GOOD],
            "non_preferred_output": [BAD],
        },
    ],
)
def test_messages_are_one_prompt_and_two_answers(row):
    (pair,), unused, _ = read_pairs_of(records(row), "a.jsonl")
    for side, answer in ((pair.chosen, "the fox"), (pair.rejected, "the dog")):
        answered = conversation(side)
        assert [m["content"] for m in answered.messages] == ["who?", answer]
        assert answered.target_turns == (1,)
    assert not pair.shared
    assert unused == (("input.parallel_tool_calls",) if "input" in row else ())


def test_texts_follow_their_prompt_or_share_their_beginning():
    given = {"prompt": "a ", "chosen": "b", "rejected": "c", "id": 7}
    (pair,), unused, _ = read_pairs_of(records(given), "a.jsonl")
    assert pair.chosen == Completion("a ", "b", "a.jsonl:1")
    assert unused == ("id",)
    (pair,), _, _ = read_pairs_of(records({"chosen": "a b", "rejected": "a c"}), "a.jsonl")
    assert pair.chosen == Text("a b", "a.jsonl:1")
    assert pair.shared
    row = {"instruction": "add", "input": "1 2", "chosen": "3", "rejected": "4"}
    (pair,), _, _ = read_pairs_of(records(row), "a.jsonl")
    assert pair.rejected == Instruction("add", "1 2", "4", "a.jsonl:1")


WHOLE = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
ANSWERS = {"chosen": [GOOD], "rejected": [BAD]}


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"prompt": "who?", "messages": [USER, GOOD], **WHOLE}, ("messages",)),
        ({"messages": [USER, GOOD], **WHOLE}, ("messages",)),
        ({"prompt": "who?", "messages": [USER], **ANSWERS}, ("messages",)),
        ({"conversations": [USER, GOOD], "question": "who?", **ANSWERS}, ("conversations",)),
        ({"question": "what?", "input": "this", **WHOLE}, ("question", "input")),
        ({"prompt": None, "messages": None, **WHOLE}, ("prompt", "messages")),
        ({"messages": [USER], **WHOLE}, ()),
        ({"question": "who?", **ANSWERS}, ()),
    ],
)
def test_a_column_that_is_no_prompt_of_both_answers_is_unused(row, unused):
    (pair,), found, _ = read_pairs_of(records(row), "a.jsonl")
    assert conversation(pair.chosen).messages == (USER, GOOD)
    assert conversation(pair.rejected).messages == (USER, BAD)
    assert found == unused


def test_a_system_prompt_comes_before_the_question_of_both_answers():
    row = {"system": "Be kind.", "question": "who?", "chosen": "the fox", "rejected": "the dog"}
    (pair,), unused, _ = read_pairs_of(records(row), "a.jsonl")
    for side, answer in ((pair.chosen, GOOD), (pair.rejected, BAD)):
        system = {"role": "system", "content": "Be kind."}
        assert conversation(side).messages == (system, USER, answer)
        assert conversation(side).target_turns == (2,)
    assert unused == ()


def test_systems_tools_and_turns_after_a_call_belong_to_the_answer():
    row = {
        "system": "Be kind.",
        "tools": TOOLS,
        "chosen": [USER, CALL, {"role": "tool", "content": "it is"}, GOOD],
        "rejected": [USER, BAD],
    }
    (pair,), _, _ = read_pairs_of(records(row), "a.jsonl")
    assert conversation(pair.chosen).target_turns == (2, 4)
    assert conversation(pair.rejected).messages[0] == {"role": "system", "content": "Be kind."}
    assert conversation(pair.chosen).tools[0]["function"]["name"] == "find"


def test_openai_s_comparisons_have_their_tools_and_calls():
    tools = [{"type": "function", "function": TOOLS[0]}]
    row = {
        "input": {"messages": [USER], "tools": tools},
        "preferred_output": [CALL],
        "non_preferred_output": [BAD],
        "id": 3,
    }
    (pair,), unused, _ = read_pairs_of(records(row), "a.jsonl")
    for side in (pair.chosen, pair.rejected):
        assert conversation(side).tools == tuple(tools)
        assert conversation(side).target_turns == (1,)
    assert conversation(pair.chosen).messages[1]["tool_calls"]
    assert unused == ("id",)


def openai(**changed: Any) -> dict[str, Any]:
    given = {"messages": [USER]}
    return {"input": given, "preferred_output": [GOOD], "non_preferred_output": [BAD], **changed}


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (openai(input="who?"), "input: expected an object with messages, found text"),
        (openai(input={}), "input.messages: expected a list of turns, found null"),
        (openai(input={"messages": [USER], "tools": [7]}), r"input.tools\[0\]: expected an object"),
        (openai(preferred_output=None), "preferred_output: missing: a pair has preferred_output"),
        (openai(non_preferred_output=[USER]), "non_preferred_output: there is no assistant turn"),
        (openai(preferred_output=[{**GOOD, "weight": 0}]), "preferred_output: empty"),
        ({"prompt": "a", "preferred_output": [GOOD]}, "non_preferred_output: missing"),
    ],
)
def test_what_is_wrong_with_openai_s_comparison_is_named(row, field):
    with pytest.raises(DataError, match=f"a.jsonl:2: {field}"):
        read_pairs_of(records(openai(), row), "a.jsonl")


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"prompt": [USER], "chosen": [{**GOOD, "content": ""}], "rejected": [BAD]}, "chosen: e"),
        ({"prompt": "a", "chosen": "b"}, "rejected: missing"),
        ({"prompt": "what?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompt: chosen"),
        (
            {"prompt": [{**USER, "content": "x"}], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "chosen: prompt is not",
        ),
        ({"chosen": [USER, GOOD], "rejected": [{**USER, "content": "x"}, BAD]}, "chosen: turn 0"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "chosen: there is no prompt before it"),
        ({"messages": [USER, GOOD], "chosen": "b", "rejected": "c"}, "messages: is no prompt"),
        ({"prompt": "a", "system": "s", "chosen": "b", "rejected": "c"}, "system: system need"),
        ({"prompt": "a", "chosen": "b", "rejected": [BAD]}, "rejected: one of the two"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "image": "x.png"}, "image: "),
        ({"prompt": [USER], "chosen": 7, "rejected": [BAD]}, r"chosen\[0\]: expected an object"),
    ],
)
def test_what_is_no_pair_is_named(row, field):
    fine = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match=f"a.jsonl:2: {field}"):
        read_pairs_of(records(fine, row), "a.jsonl")


@pytest.mark.parametrize("answers", [("b", "b"), ("b", " "), ("", "b"), ([GOOD], [GOOD])])
def test_rows_with_nothing_to_prefer_are_dropped(answers):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    rows.append({"prompt": "a", "chosen": answers[0], "rejected": answers[1]})
    rows.append(openai(preferred_output=answers[0], non_preferred_output=answers[1]))
    pairs = read_pairs_of(records(*rows), "a.jsonl").examples
    assert pairs[1:] == (Dropped("a.jsonl:2", USELESS), Dropped("a.jsonl:3", USELESS))


def test_a_margin_is_a_number():
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    pair, used = read_pair(*records({**row, "by": 2}), "by")
    assert (pair.margin, "by" in used) == (2.0, True)
    with pytest.raises(WrongField, match="by: expected a number"):
        read_pair(*records({**row, "by": "much"}), "by")


def test_verdicts_are_examples_with_a_label():
    rows = [
        {"prompt": "a ", "completion": "b", "label": True},
        {"prompt": "a ", "completion": "c", "label": False},
    ]
    verdicts, unused, name = read_verdicts(records(*rows), "a.jsonl")
    assert [verdict.wanted for verdict in verdicts] == [True, False]
    assert (unused, name) == ((), "prompt_completion")
    turns = [USER, BAD, USER, GOOD]
    talks = [{"messages": turns, "label": True}, {"messages": [USER, BAD], "label": False}]
    verdicts, _, _ = read_verdicts(records(*talks), "a.jsonl")
    assert conversation(verdicts[0].example).target_turns == (3,)  # the last answer alone is judged


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"label": True}, {"label": 1}], "a.jsonl:2: label: expected true or false, found 1"),
        ([{"label": True}, {}], "a.jsonl:2: label: .* missing"),
    ],
)
def test_what_is_no_verdict_is_named(rows, message):
    with pytest.raises(DataError, match=message):
        read_verdicts(records(*({"prompt": "a", "completion": "b"} | row for row in rows)), "a")


def test_answers_of_one_label_alone_are_refused():
    check_both_labels("a.jsonl", 3, 1)
    for wanted, unwanted, value in ((2, 0, "true"), (0, 2, "false")):
        with pytest.raises(DataError, match=f"all of its rows have one label(.|\\n)*is {value} in"):
            check_both_labels("a.jsonl", wanted, unwanted)
