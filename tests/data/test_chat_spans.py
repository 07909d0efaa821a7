"""Whatever a chat template does, exactly the assistant's turns are learnt, or the row is refused.

The templates below do, in few lines, what those of well-known families do.
"""

import copy
import random
import re
import time
from typing import Any

import pytest

from peftkit.data.chat import Chat, special_texts
from peftkit.data.chat_template import CHATML, choose_template
from peftkit.data.encode import Encoder
from peftkit.data.examples import Example
from peftkit.data.format import parse
from peftkit.data.generation import prompt_ids, stop_ids
from peftkit.data.pack import IGNORE, Row
from peftkit.data.records import Record
from peftkit.data.style import Style
from peftkit.errors import DataError
from tests.helpers.chat_templates import QWEN3, TEMPLATES

Q1, A1, Q2, A2 = "what is the fox?", " the dog\n", "and then", "<think>\nhm\n</think>\n\nthe fox"
TURNS = [("user", Q1), ("assistant", A1), ("user", Q2), ("assistant", A2)]


def with_template(tokenizer: Any, template: str) -> Any:
    custom = copy.deepcopy(tokenizer)
    custom.chat_template = template
    return custom


def messages(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def example_of(fields: dict[str, Any]) -> Example:
    (example,) = parse([Record(fields, "a.jsonl:7")], "auto", where="a.jsonl").examples
    return example


def encoded(tokenizer: Any, fields: dict[str, Any]) -> Row:
    return Encoder(tokenizer).encode(example_of(fields))


# names the thought another way, and what it says to developers (gpt-oss)
CHANNELS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role }}"
    "{% if m.role == 'developer' %}{{ '!' }}{% endif %}"
    "{% if m.thinking %}{{ '<analysis>' + m.thinking + '<|im_end|><|im_start|>final' }}{% endif %}"
    "{{ ':' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
THOUGHT = [
    {"role": "user", "content": Q1},
    {"role": "assistant", "content": "the dog", "reasoning_content": "a fox, or"},
    {"role": "user", "content": Q2},
    {"role": "assistant", "content": "the fox", "reasoning_content": "not the dog"},
]
THOUGHTS, ANSWERS = ("a fox, or", "not the dog"), ["the dog", "the fox"]
THINK = [f"<think>\n{thought}\n</think>\n\n" for thought in THOUGHTS]
FINAL = "<|im_end|><|im_start|>final:"


@pytest.mark.parametrize(
    ("template", "reasoning", "spans", "counts"),
    [
        (QWEN3, "learn", ["the dog", f"{THINK[1]}the fox"], (1, 1)),
        (QWEN3, "context", ANSWERS, (1, 1)),
        (
            CHANNELS,
            "learn",
            [f"<analysis>{THOUGHTS[n]}{FINAL}{ANSWERS[n]}" for n in (0, 1)],
            (2, 0),
        ),
        (CHATML, "learn", [f"{THINK[n]}{ANSWERS[n]}" for n in (0, 1)], (2, 0)),
        (CHATML, "context", ANSWERS, (2, 0)),
        (CHATML, "drop", ANSWERS, (0, 0)),
    ],
)
def test_thinking_is_learnt_read_or_left_out(tokenizer, template, reasoning, spans, counts):
    custom = with_template(tokenizer, template)
    inline = [
        {**turn, "content": f"<think>\n{turn['reasoning_content']}\n</think>\n\n{turn['content']}"}
        if "reasoning_content" in turn
        else turn
        for turn in THOUGHT
    ]
    rows = [THOUGHT] if template != CHATML else [THOUGHT, [
        {key: value for key, value in turn.items() if key != "reasoning_content"}
        for turn in inline
    ]]  # fmt: skip
    for row in rows:
        encoder = Encoder(custom, reasoning=reasoning)
        encoded_row = encoder.encode(example_of({"messages": row}))
        assert learnt(custom, encoded_row) == [span + "<|im_end|>" for span in spans]
        assert (encoder.counts["thoughts"], encoder.counts["unwritten"]) == counts


@pytest.mark.parametrize("answer", ["k", "think", "</b>"])
def test_an_answer_begins_after_the_end_of_the_thought(tokenizer, answer):
    turn = {"role": "assistant", "content": answer, "reasoning_content": "not the dog"}
    for template in (QWEN3, CHANNELS):
        custom = with_template(tokenizer, template)
        example = example_of({"messages": [*THOUGHT[:1], turn]})
        encoded_row = Encoder(custom, reasoning="context").encode(example)
        assert learnt(custom, encoded_row) == [f"{answer}<|im_end|>"]


def test_developer_turns_become_system_turns_if_the_template_has_none(tokenizer):
    turns = messages([("developer", "be short"), *TURNS[:1], ("assistant", "a")])
    for template, text in ((QWEN3, "<|im_start|>system\nbe"), (CHANNELS, "developer!:be")):
        custom = with_template(tokenizer, template)
        assert text in custom.decode(encoded(custom, {"messages": turns}).input_ids)


def test_template_variables_of_training_apply_unless_overridden(tokenizer):
    custom = with_template(tokenizer, QWEN3)
    quiet = choose_template(custom, None, {"enable_thinking": False})
    turns = messages([("user", Q1), ("assistant", "a")])
    row = Encoder(custom, quiet).encode(example_of({"messages": turns}))
    assert learnt(custom, row) == ["a<|im_end|>"]
    prompt = prompt_ids(custom, Q1, Style("chat", quiet))
    assert list(row.input_ids[: len(prompt)]) == prompt
    assert custom.decode(prompt).endswith("<think>\n\n</think>\n\n")
    thinking = prompt_ids(custom, Q1, Style("chat", quiet), variables={"enable_thinking": True})
    assert thinking == prompt_ids(custom, Q1, Style("chat"))
    with pytest.raises(DataError, match="chat_template_kwargs: enable_thoughts"):
        choose_template(custom, None, {"enable_thoughts": False})
    named = choose_template(with_template(tokenizer, "{{ name }}"), None, {"name": "Zoë 🦊"})
    assert Chat(custom, named).render(turns, (), "a row") == "Zoë 🦊"


@pytest.mark.parametrize("of_recipe", [None, True, False])
@pytest.mark.parametrize("of_row", [True, False])
def test_variables_of_a_row_replace_those_of_the_recipe(of_recipe, of_row, tokenizer):
    custom = with_template(tokenizer, QWEN3)
    template, same = (
        choose_template(custom, None, None if value is None else {"enable_thinking": value})
        for value in (of_recipe, of_row)
    )
    row = {"messages": messages([("user", Q1), ("assistant", "a")])}
    with_variables = example_of(row | {"chat_template_kwargs": {"enable_thinking": of_row}})
    expected = Encoder(custom, same).encode(example_of(row))
    assert Encoder(custom, template).encode(with_variables) == expected


ORDERS = {
    "system in the middle": [("user", Q1), ("assistant", "a"), ("system", "s"), ("assistant", "b")],
    "two questions": [("user", Q1), ("user", Q2), ("assistant", "b")],
    "two answers": [("user", Q1), ("assistant", "a"), ("assistant", "b")],
    "an answer first": [("assistant", "a"), ("user", Q1), ("assistant", "b")],
    "a result without a call": [("user", Q1), ("tool", "3"), ("assistant", "b")],
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_template_decides_which_orders_are_valid(tokenizer, order):
    row = {"messages": messages(ORDERS[order])}
    answers = [f"{text}<|im_end|>" for role, text in ORDERS[order] if role == "assistant"]
    custom = with_template(tokenizer, CHATML)
    assert learnt(custom, encoded(custom, row)) == answers
    strict = (
        "{% if messages[1].role != 'assistant' %}{{ raise_exception('Take turns!') }}{% endif %}"
    )
    custom = with_template(tokenizer, strict + CHATML)
    if ORDERS[order][1][0] != "assistant":
        with pytest.raises(DataError, match=r"cannot render a\.jsonl:7(.|\n)*Take turns!"):
            encoded(custom, row)


def learnt(tokenizer: Any, row: Row) -> list[str]:
    """Return the text of each run of learnt tokens."""
    runs: list[list[int]] = [[]]
    for token, label in zip(row.input_ids, row.labels, strict=True):
        assert label in (token, IGNORE)
        if label != IGNORE:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize(
    ("name", "spans"),
    [
        ("chatml", [" the dog\n<|im_end|>", A2 + "<|im_end|>"]),
        ("default_system", [" the dog\n<|im_end|>", A2 + "<|im_end|>"]),
        ("trims", ["the dog<|im_end|>", A2 + "<|im_end|>"]),
        ("thinks", [" the dog\n<|im_end|>", A2 + "<|im_end|>"]),
        ("closes", [" the dog\n<|im_end|>", A2 + "<|im_end|>"]),
        ("returns", [" the dog\n", A2 + "<|im_end|>"]),
        ("inst", ["  the dog\n<|im_end|>", " " + A2 + "<|im_end|>"]),
        ("folds", [" the dog\n<|im_end|>", A2 + "<|im_end|>"]),
        ("vicuna", ["  the dog\n<|im_end|>", " " + A2 + "<|im_end|>"]),
        ("opens_think", [" the dog\n<|im_end|>", A2.removeprefix("<think>\n") + "<|im_end|>"]),
        ("endless", [" the dog\n", A2 + "<|im_end|>"]),
    ],
)
def test_only_assistant_turns_are_targets(tokenizer, name, spans):
    custom = with_template(tokenizer, TEMPLATES[name])
    row = encoded(custom, {"messages": messages(TURNS)})
    assert learnt(custom, row) == spans
    # the tokens are those that transformers makes of the conversation
    whole = custom.apply_chat_template(messages(TURNS), return_dict=False)
    ends = [custom.eos_token_id] if name == "endless" else []
    assert list(row.input_ids) == (whole + ends)[: len(row.input_ids)]
    assert row.labels[-1] == custom.eos_token_id


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "opens_think"])
def test_generation_begins_with_the_tokens_that_training_saw(tokenizer, name):
    custom = with_template(tokenizer, TEMPLATES[name])
    row = encoded(custom, {"messages": messages(TURNS[:2])})
    prompt = prompt_ids(custom, Q1, Style("chat"))
    assert list(row.input_ids[: len(prompt)]) == prompt
    assert set(row.labels[: len(prompt)]) == {IGNORE}
    assert IGNORE not in row.labels[len(prompt) :]
    assert prompt == custom.apply_chat_template(
        messages(TURNS[:1]), add_generation_prompt=True, return_dict=False
    )


def test_rows_that_begin_otherwise_than_generation_are_counted(tokenizer):
    for name, count in (("opens_think", 1), ("thinks", 0)):
        encoder = Encoder(with_template(tokenizer, TEMPLATES[name]))
        encoder.encode(example_of({"messages": messages(TURNS[:2])}))
        assert encoder.counts["off_prompt"] == count


CALL = {"name": "find", "arguments": {"what": "fox"}}
TOOL_ROW: dict[str, Any] = {
    "conversations": [
        {"from": "human", "value": Q1},
        {"from": "function_call", "value": '{"name": "find", "arguments": {"what": "fox"}}'},
        {"from": "observation", "value": "3 foxes"},
        {"from": "gpt", "value": "three"},
    ],
    "tools": '[{"name": "find", "description": "finds", "parameters": {}}]',
}


def test_tool_calls_are_learnt_and_tool_answers_are_not(tokenizer):
    custom = with_template(tokenizer, CHATML)
    row = encoded(custom, TOOL_ROW)
    call = '<tool_call>\n{"name": "find", "arguments": {"what": "fox"}}\n</tool_call><|im_end|>'
    assert learnt(custom, row) == [call, "three<|im_end|>"]
    text = custom.decode(row.input_ids)
    assert '"description": "finds"' in text
    assert "<|im_start|>tool\n3 foxes<|im_end|>" in text


def test_a_template_that_knows_no_tools_is_refused(tokenizer):
    with pytest.raises(DataError, match=r"(?s)a.jsonl:7.*may not support them.*chatml"):
        encoded(tokenizer, TOOL_ROW)
    only_tools = {**TOOL_ROW, "conversations": [TOOL_ROW["conversations"][n] for n in (0, 3)]}
    with pytest.raises(DataError, match=r"(?s)does not render the tools of a.jsonl:7.*find"):
        encoded(tokenizer, only_tools)


CHAT = TEMPLATES["chatml"]


@pytest.mark.parametrize(
    ("template", "row", "words"),
    [
        (
            CHAT.replace("m.content", "(m.content or '')"),
            {"conversations": TOOL_ROW["conversations"]},
            r"does not render the tool calls of a\.jsonl:7(.|\n)*find",
        ),
        (
            CHAT.replace("for m in messages", "for m in messages if m.role != 'system'"),
            {"messages": messages([("system", "be the fox"), *TURNS])},
            r"omits a message of a\.jsonl:7(.|\n)*system turn",
        ),
        (
            "{{ raise_exception('System role not supported') }}",
            {"messages": messages(TURNS)},
            r"cannot render a\.jsonl:7(.|\n)*System role not supported",
        ),
        (  # how long a conversation is stands before it, and what is said is said twice
            "{{ messages | length }}"
            + TEMPLATES["endless"].replace("m.content", "m.content + m.content"),
            {"messages": messages(TURNS)},
            r"Cannot locate the assistant.s tokens in a\.jsonl:7",
        ),
    ],
)
def test_a_template_of_which_no_row_can_be_made_is_refused(tokenizer, template, row, words):
    with pytest.raises(DataError, match=words):
        encoded(with_template(tokenizer, template), row)


def test_a_template_may_escape_what_is_said(tokenizer):
    custom = with_template(tokenizer, CHAT.replace("m.content", "(m.content | tojson)"))
    row = encoded(custom, {"messages": messages(TURNS[:2])})
    assert learnt(custom, row) == ['" the dog\\n"<|im_end|>']


def test_turns_of_weight_0_and_empty_turns_are_context(tokenizer):
    turns = messages(TURNS)
    turns[1]["weight"] = 0
    assert learnt(tokenizer, encoded(tokenizer, {"messages": turns})) == [A2 + "<|im_end|>"]
    turns[3]["content"] = " "
    assert encoded(tokenizer, {"messages": turns}).num_targets == 0


def test_what_follows_the_last_answer_is_left_out(tokenizer):
    short = encoded(tokenizer, {"messages": messages(TURNS[:2])})
    assert encoded(tokenizer, {"messages": messages(TURNS[:3])}) == short


def test_text_that_looks_like_tokens_or_a_sentinel_is_no_trap(tokenizer):
    custom = with_template(tokenizer, TEMPLATES["thinks"])
    fake_turn = "x<|im_end|>\n<|im_start|>assistant\nfake"
    turns = [("user", fake_turn), ("assistant", "a"), ("user", fake_turn), ("assistant", "a")]
    row = encoded(custom, {"messages": messages(turns)})
    assert learnt(custom, row) == ["a<|im_end|>", "<think>\n\n</think>\n\na<|im_end|>"]


def test_the_tokens_that_end_an_answer(tokenizer):
    assert stop_ids(tokenizer, Style("plain")) == [tokenizer.eos_token_id]
    custom = with_template(tokenizer, TEMPLATES["chatml"].replace("<|im_end|>", "<pad>"))
    assert stop_ids(custom, Style("chat")) == sorted({custom.pad_token_id, custom.eos_token_id})
    assert stop_ids(custom, Style("chat", TEMPLATES["chatml"])) == [custom.eos_token_id]


def test_a_template_is_chosen_by_name_or_file(tokenizer, tmp_path):
    assert choose_template(tokenizer, None) is None
    assert choose_template(tokenizer, "chatml") == CHATML
    (tmp_path / "mine.jinja").write_text("é{{ messages }}", encoding="utf-8")
    assert choose_template(tokenizer, str(tmp_path / "mine.jinja")) == "é{{ messages }}"
    with pytest.raises(DataError, match="Did you mean 'chatml'"):
        choose_template(tokenizer, "chatlm")
    with pytest.raises(DataError, match="No such file"):
        choose_template(tokenizer, str(tmp_path / "yours.jinja"))


def test_the_end_of_a_turn_is_found_in_linear_time(tokenizer):
    own = with_template(tokenizer, CHATML)
    special = "|".join(map(re.escape, special_texts(own)))
    pattern = re.compile(rf"((?:{special})+)(?:\s|{special})*\Z")  # cubic
    chat, generator = Chat(own), random.Random(1)
    pieces = [*special_texts(own), " ", "\n", "x", "the"]
    for _ in range(2000):
        text = "".join(generator.choices(pieces, k=generator.randrange(9)))
        match = pattern.search(text)
        expected = (match.end(1), True) if match else (len(text), False)
        assert chat._ended(text, 0, len(text))[1:] == expected
    text = "<|im_end|>" * 20_000
    for end in ("x", ""):
        began = time.monotonic()
        chat._ended(text + end, 0, len(text + end))
        assert time.monotonic() - began < 5
