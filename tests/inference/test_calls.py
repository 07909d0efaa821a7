"""Calls are read back from what templates write, whole or in pieces; what is no call stays text."""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from peftkit.data.chat import Chat
from peftkit.data.style import Style
from peftkit.data.tokens import tokens
from peftkit.inference.call_formats import FORMATS, NO_CALLS, Call, CallFormat
from peftkit.inference.calls import AnswerPiece, CallStyle, Reader, format_of, read_answer
from tests.helpers.call_templates import FORM_OF, ONE_CALL, TEMPLATES, with_calls, with_template

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "hot": {"type": "boolean"},
                "more": {"type": ["object", "null"]},
                "code": {"type": "string"},
            },
        },
    },
}
GIVEN: list[dict[str, Any]] = [
    {"city": "Lima", "days": 3, "code": "7"},
    {"city": 'say "hi" <b>, {a: [1]} ', "hot": False, "more": {"a": [1, {"b": None}]}},
    {"days": None, "city": "Łódź 🌧"},
    {},
]
BY_NAME = {form.name: form for form in FORMATS} | {"none": NO_CALLS}


def joined(pieces: Iterable[AnswerPiece]) -> AnswerPiece:
    texts, thoughts, calls = zip(*pieces, strict=True) if (pieces := [*pieces]) else ((), (), ())
    return AnswerPiece("".join(texts), "".join(thoughts), tuple(one for of in calls for one in of))


def in_pieces(form: CallFormat, pieces: Sequence[str], thinks: bool = False) -> AnswerPiece:
    reader = Reader(form, [TOOL], thinks=thinks)
    found = [one for piece in pieces for one in reader.feed(piece)]
    return joined([*found, *reader.feed("", over=True)])


def check_splits(form: CallFormat, text: str, thinks: bool = False) -> AnswerPiece:
    """Check that every split of an answer gives what the whole gives; return that."""
    whole = read_answer(form, text, [TOOL], thinks=thinks)
    assert in_pieces(form, list(text), thinks) == whole
    for cut in range(len(text)):
        assert in_pieces(form, [text[:cut], text[cut:]], thinks) == whole, text[:cut]
    return whole


def renderer(tokenizer: Any, template: str) -> Any:
    chat = Chat(with_template(tokenizer, template))
    return lambda turns: chat.render(turns, [TOOL], "a call")


def answer_of(render: Any, form: CallFormat, given: Sequence[dict[str, Any]], text: str) -> str:
    """Return what a template writes as an answer with calls, without its header and end."""
    calls = [(f"call0000{n}", Call("weather", each)) for n, each in enumerate(given)]
    asked = [{"role": "user", "content": "Hello"}]
    before, whole = render(asked), render([*asked, form.message(text, calls)])
    assert whole.startswith(before)
    answer = whole[len(before) :].removesuffix("\n").removesuffix("<|im_end|>")
    for header in ("<|im_start|>assistant\n", "<|assistant|>\n", "<|start|>assistant"):
        answer = answer.removeprefix(header)
    return str(answer.removesuffix("<|call|>"))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_s_own_calls_are_read_back(name, tokenizer):
    render = renderer(tokenizer, TEMPLATES[name])
    form = format_of(render)
    assert form is not None
    assert form.name == FORM_OF.get(name, name)
    rows = [[one] for one in GIVEN] + ([] if name in ONE_CALL else [GIVEN])
    for given in rows:
        said = check_splits(form, answer_of(render, form, given, ""))
        assert [(call.name, call.arguments) for call in said.calls] == [
            ("weather", each) for each in given
        ]
        assert said.text == said.thought == ""
    if name not in ONE_CALL:
        said = check_splits(form, answer_of(render, form, GIVEN[:1], "I look. "))
        assert said.text == "I look."
        assert len(said.calls) == 1


def test_a_template_without_calls_has_no_format(tokenizer):
    plain = "{% for m in messages %}{{ m.role + ': ' + (m.content or '') + '\n' }}{% endfor %}"
    assert format_of(renderer(tokenizer, plain)) is None
    strict = "{% for m in messages %}{{ m.content.strip() }}{{ raise_exception('no') }}{% endfor %}"
    assert format_of(renderer(tokenizer, strict)) is None


def shipped(field: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """Return a response template, as tokenizers ship it."""
    thought = {"open": "<reason>", "close": "</reason>", "content": "text"}
    fields = {"reasoning_content": thought, "tool_calls": {"repeats": True, **field}}
    return {"start_anchor": "<|im_start|>assistant\n", "fields": {**fields, "content": content}}


OWN = with_calls("{{ '<<' + f.name + ' ' + (f.arguments | tojson) + '>>' }}")
OWN_SHIPPED = shipped(
    {
        "open_pattern": r"\s*<<(?P<name>\w+) ",
        "close": ">>",
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
    {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
)
CODER_SHIPPED = shipped(
    {
        "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        "close_pattern": r"</function>\s*</tool_call>",
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>"
        },
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
    {"close": "<|im_end|>", "content": "text"},
)


@pytest.mark.parametrize(
    ("template", "response"), [(OWN, OWN_SHIPPED), (TEMPLATES["coder"], CODER_SHIPPED)]
)
def test_tokenizer_schemas_win(template, response, tokenizer):
    pytest.importorskip("transformers.utils.chat_parsing", reason="transformers before 5.13")
    render = renderer(tokenizer, template)
    form = format_of(render, response)
    assert form is not None
    assert form.name == "shipped"
    for given in ([GIVEN[0]], [GIVEN[2]], [GIVEN[0], GIVEN[2]]):
        said = check_splits(form, answer_of(render, form, given, "I look. "))
        assert [(call.name, call.arguments) for call in said.calls] == [
            ("weather", each) for each in given
        ]
        assert said.text == "I look."
    said = check_splits(form, "<reason>hm</reason>\n" + answer_of(render, form, [{}], ""))
    assert (said.text, said.thought, len(said.calls)) == ("", "hm", 1)
    broken = answer_of(render, form, [GIVEN[0]], "").replace("weather", "").replace("3", "{")
    assert check_splits(form, broken).calls == ()


@pytest.mark.parametrize(
    "response", [OWN_SHIPPED, {"fields": {}}, {"version": 2}, "text", {"start_anchor": "x"}]
)
def test_what_is_shipped_and_does_not_hold_is_left_out(response, tokenizer):
    render = renderer(tokenizer, TEMPLATES["hermes"])  # perhaps put in by data.chat_template
    form = format_of(render, response)
    assert form is not None
    assert form.name == "hermes"
    assert format_of(renderer(tokenizer, OWN)) is None


THINKING = "<think>maybe <tool_call>\n{}\n</tool_call></think>\n\n"
GOOD = '<tool_call>\n{"name": "f", "arguments": {"t": "</tool_call> <tool"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "text", "said", "thought", "num_calls"),
    [
        ("hermes", THINKING + "I call.\n" + GOOD, "I call.", "maybe", 1),
        ("hermes", GOOD + "\n" + GOOD + " done", "done", "", 2),
        ("hermes", GOOD.replace("f", "g") + "\n<tool_call>[]</tool_call>", None, "", 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call> tail', None, "", 0),
        ("hermes", "<tool_call> oh, wait " + GOOD, "<tool_call> oh, wait", "", 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', None, "", 0),
        ("hermes", '<tool_call>{"name": "f", "arguments": NaN}</tool_call>', None, "", 0),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', None, "", 0),
        ("hermes", "<tool_call>" + "[" * 5000 + "</tool_call>", None, "", 0),
        ("hermes", " a < b <tool and \n <tool_call> no ", None, "", 0),
        ("hermes", "see <think> in a text </think>\n", None, "", 0),
        ("hermes", "\n<think>\n\n</think>\n\n said ", "said ", "", 0),
        ("coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", "", 1),
        ("coder", "<tool_call><function=f>x<parameter=a>1</parameter></function>", None, "", 0),
        ("coder", "<tool_call>\n<parameter=a>\n1\n</parameter>\n</tool_call>", None, "", 0),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}', "", "", 2),
        ("llama", '{"city": "Lima"} is an object', None, "", 0),
        ("llama", 'The object {"name": "f", "parameters": {}}', None, "", 0),
        ("mistral", 'Sure.[TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g[ARGS]{}', "Sure.", "", 2),
        ("mistral", "[THINK]hm[/THINK][TOOL_CALLS]f{}", "", "hm", 1),
        ("mistral", "[TOOL_CALLS]?", None, "", 0),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary"
            "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
            '<|constrain|>json<|message|>{"a": 1}',
            "I look.",
            "hm",
            1,
        ),
        ("harmony", "<|channel|>final<|message|>send to=functions.f", "send to=functions.f", "", 0),
        ("hermes", GOOD.replace("<tool\"", "\\ud83d\""), None, "", 0),
        ("hermes", GOOD.replace("<tool\"", "\\ud83d\\ude00\""), "", "", 1),
        ("none", "<think>hm</think>the <tool_call>{}", "the <tool_call>{}", "hm", 0),
    ],
)  # fmt: skip
def test_text_reasoning_and_calls_are_separated(name, text, said, thought, num_calls):
    found = (
        check_splits(BY_NAME[name], text) if len(text) < 999 else read_answer(BY_NAME[name], text)
    )
    if said is None:  # what is no call stays as it was
        said = text.replace(GOOD.replace("f", "g"), "").lstrip() if num_calls else text
    assert found.text == said
    assert found.thought.startswith(thought)
    assert len(found.calls) == num_calls
    for call in found.calls:
        json.loads(json.dumps(call.arguments, allow_nan=False))


@pytest.mark.parametrize("name", BY_NAME)
def test_any_split_of_any_text_gives_the_same(name):
    form, random = BY_NAME[name], Random(name)
    marks = [*form.opens, form.close or "", *form.skips, *form.thought]
    good = {"hermes": GOOD, "llama": '{"name": "f"}'}
    parts = [*marks, *marks, " ", "\n", "a", "{", "[", '"', "}", "f()", good.get(name, "f")]
    for _ in range(300):
        text = "".join(random.choices(parts, k=random.randint(1, 12)))
        cuts = sorted(random.choices(range(len(text) + 1), k=3))
        pieces = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
        thinks = random.random() < 0.2
        whole = read_answer(form, text, thinks=thinks)
        assert in_pieces(form, pieces, thinks) == whole, pieces
        assert in_pieces(form, list(text), thinks) == whole, text


def test_an_answer_may_begin_within_reasoning():
    text = " I see \n</think>\n\n " + GOOD
    found = check_splits(BY_NAME["hermes"], text, thinks=True)
    assert (found.text, found.thought, len(found.calls)) == ("", "I see", 1)
    assert check_splits(BY_NAME["hermes"], "no end", thinks=True) == AnswerPiece(thought="no end")


def test_a_stream_holds_back_no_more_than_it_must():
    reader = Reader(BY_NAME["hermes"], [TOOL])
    assert joined(reader.feed("It is 4 < 5 <to")).text == "It is 4 < 5"
    assert joined(reader.feed("ast>. ")).text == " <toast>."
    assert joined(reader.feed(GOOD)).calls[0].name == "f"
    assert joined(reader.feed("\n")) == AnswerPiece()


def test_written_types_are_those_of_the_schema_where_a_format_has_none():
    text = "<tool_call><function=weather><parameter={}>{}</parameter></function></tool_call>"
    for key, value, right in (
        ("code", "7", "7"),
        ("days", "7", 7),
        ("days", "None", None),
        ("hot", "True", True),
        ("more", '{"a": 1}', {"a": 1}),
        ("more", "nothing", "nothing"),
        ("unknown", "7", "7"),
    ):
        (call,) = read_answer(BY_NAME["coder"], text.format(key, value), [TOOL]).calls
        assert call.arguments == {key: right}


def test_an_answer_that_repeats_itself_is_text_at_once():
    text = f"<tool_call><function=f>{'<parameter=a>' * 30_000}</function></tool_call>"
    assert read_answer(BY_NAME["coder"], text) == AnswerPiece(text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_reasoning_that_a_prompt_opens_is_seen(name, tokenizer):
    own = with_template(tokenizer, TEMPLATES[name])
    style = CallStyle(own, Style("chat"))
    opens, closes = style.form.thought
    for text, thinks in ((opens, True), (opens + "\n", True), (f"{opens}\n{closes}\n", False)):
        assert style.thinks(tokens(own, "the dog\n" + text)) is thinks, text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1}, "\ud83d"])
def test_what_a_reader_of_others_makes_of_a_call_is_json_or_the_call_is_text(value):
    made = CallFormat("other", ("<c>",), "</c>", lambda _: [Call("f", {"a": value})])
    assert read_answer(made, "<c>f</c>") == AnswerPiece("<c>f</c>")
