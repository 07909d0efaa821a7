"""The grammar of a forced call accepts the chat template's format only."""

import json
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra peftkit[json] is not installed")

from peftkit.data.chat import Chat
from peftkit.data.style import Style
from peftkit.inference.calls import CallStyle, read_answer
from peftkit_server.call_grammar import call_grammar
from peftkit_server.grammars import Grammar, Grammars
from peftkit_server.refusals import RequestError
from tests.helpers.call_templates import TEMPLATES, with_calls, with_template

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "unit": {"enum": ["C", "F"]},
                    "days": {"type": "integer"},
                    "more": {"type": "object"},
                },
                "required": ["city"],
            },
        },
    },
]
GOOD = [
    ("now", {}),
    ("weather", {"city": "Lima"}),
    ("weather", {"city": 'a "b" <c>', "unit": "F", "days": 3, "more": {"a": [1, 2]}}),
]
BAD = [
    ("later", {}),
    ("weather", {}),
    ("weather", {"city": "Lima", "unit": "K"}),
    ("weather", {"city": "Lima", "days": "x"}),
    ("now", {"a": 1}),
]


def held(name: str, tokenizer: Any, thinks: bool = False) -> tuple[Any, CallStyle, Any] | None:
    own = with_template(tokenizer, TEMPLATES[name])
    calls = CallStyle(own, Style("chat"))
    grammar = call_grammar(calls, own, TOOLS, thinks=thinks)
    if grammar is None:
        return None
    grammars = Grammars(own, len(own), sorted(calls.stops))
    constraint = grammars.constraint(Grammar(grammar, is_lark=True))
    return constraint._matcher, calls, own


def written(calls: CallStyle, name: str, arguments: dict[str, Any]) -> str:
    """Return a template's rendering of a message with a call, without its header and end."""
    from peftkit.inference.call_formats import Call

    asked = [{"role": "user", "content": "Hello"}]
    message = calls.form.message("", [("call00000", Call(name, arguments))])
    text = calls.render([*asked, message]).removeprefix(calls.render(asked))
    begin = min(at for mark in calls.form.opens if (at := text.find(mark)) >= 0)
    text = text[begin:].rstrip("\n")
    for end in ("<|im_end|>", "<|call|>"):
        text = text.removesuffix(end)
    return text


def accepts(matcher: Any, own: Any, text: str) -> bool:
    copy = matcher.deep_copy()
    ids = own(text, add_special_tokens=False).input_ids
    return copy.try_consume_tokens(ids) == len(ids) and copy.is_accepting()


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_what_a_template_writes_is_what_its_grammar_takes(name, tokenizer):
    found = held(name, tokenizer)
    assert found is not None
    matcher, calls, own = found
    for tool, arguments in GOOD:
        text = written(calls, tool, arguments)
        assert accepts(matcher, own, text), text
        said = read_answer(calls.form, text, TOOLS)
        assert [(one.name, one.arguments) for one in said.calls] == [(tool, arguments)]
    for tool, arguments in BAD:
        text = written(calls, tool, arguments)
        assert not accepts(matcher, own, text), text
    assert not accepts(matcher, own, "Hello")


def test_a_format_whose_arguments_are_not_json_has_no_grammar(tokenizer):
    pythonic = "{{ '<tool_call>[' + f.name + '(city=1)]</tool_call>' }}"
    own = with_template(tokenizer, TEMPLATES["hermes"])
    calls = CallStyle(own, Style("chat"))
    calls._chat = Chat(with_template(tokenizer, with_calls(pythonic)))
    assert call_grammar(calls, own, TOOLS, thinks=False) is None


@pytest.mark.parametrize("name", ["hermes", "coder"])
def test_reasoning_that_the_prompt_opened_comes_before_the_call(name, tokenizer):
    found = held(name, tokenizer, thinks=True)
    assert found is not None
    matcher, calls, own = found
    call = written(calls, "weather", {"city": "Lima"})
    assert accepts(matcher, own, f"it is < 3\n</think>\n\n{call}")
    assert not accepts(matcher, own, f"it is\n{call}")


def test_a_grammar_says_its_field_where_it_is_refused(tokenizer):

    own = with_template(tokenizer, TEMPLATES["hermes"])
    schema = {"type": "object", "properties": {"a": {"pattern": "(", "type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    calls = CallStyle(own, Style("chat"))
    grammar = call_grammar(calls, own, tools, thinks=False)
    assert grammar is not None
    assert json.dumps(schema)[:-1] in grammar
    with pytest.raises(RequestError, match=r"constrained to this tool_choice\.") as refused:
        Grammars(own, len(own), [0]).constraint(Grammar(grammar, "tool_choice", is_lark=True))
    assert refused.value.param == "tool_choice"
