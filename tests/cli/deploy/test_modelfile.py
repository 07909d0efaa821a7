"""Chat templates translated for Ollama, and Modelfiles, read as Ollama reads them."""

import json
import re
from typing import Any

import pytest

from peftkit.data.chat import Chat
from peftkit.data.style import ALPACA, Style
from peftkit_cli.deploy.modelfile import Untranslatable, modelfile, template_for
from tests.helpers.chat_templates import TEMPLATES

TURNS = [
    {"role": "user", "content": 'A "quoted" \\ {{ text }}'},
    {"role": "assistant", "content": "é\n\nTwo lines"},
    {"role": "user", "content": "Third"},
]
SYSTEM = {"role": "system", "content": "Answer in JSON."}


def executed(template: str, messages: list[dict[str, str]], **fields: str) -> str:
    """Execute the actions that are used here, with the semantics of Go's text/template."""
    tokens = re.findall(r'\{\{ (?:[^"}]|"(?:\\.|[^"\\])*")* \}\}|(?:(?!\{\{).)+', template, re.S)
    assert "".join(tokens) == template

    def run(at: int, scope: dict[str, str], active: bool, out: list[str]) -> int:
        while at < len(tokens):
            token = tokens[at]
            action = token[3:-3] if token.startswith("{{") else None
            if action is None:
                out += [token] * active
            elif action.startswith('"'):
                out += [json.loads(action)] * active
            elif action == "range .Messages":
                for message in messages or [{}]:
                    end = run(at + 1, message, active and bool(messages), out)
                at = end
            elif action.startswith("if "):
                at = branches(at, scope, active, out)
            elif action == "end" or action.startswith("else"):
                return at
            else:
                value = scope if action[1:] in scope else fields
                out += [value[action[1:]]] * active
            at += 1
        return at

    def branches(at: int, scope: dict[str, str], active: bool, out: list[str]) -> int:
        is_open = active
        while True:
            condition = re.fullmatch(r'(?:else )?if eq \.Role "(\w+)"', tokens[at][3:-3])
            assert condition
            holds = scope.get("Role") == condition[1]
            at = run(at + 1, scope, is_open and holds, out)
            is_open = is_open and not holds
            if tokens[at] == "{{ end }}":
                return at

    out: list[str] = []
    assert run(0, {}, True, out) == len(tokens)
    return "".join(out)


def values_of(text: str) -> list[tuple[str, str]]:
    """Parse a Modelfile: command and value; quotes as in Ollama's parser (parser.go, unquote)."""
    found, lines = [], text.split("\n")
    while lines:
        line = lines.pop(0)
        if not line:
            continue
        command, value = line.split(" ", 1)
        if command == "PARAMETER":
            name, value = value.split(" ", 1)
            command += f" {name}"
        if value.startswith('"""'):
            while not (len(value) >= 6 and value.endswith('"""')):
                value += "\n" + lines.pop(0)
            value = value[3:-3]
        elif value.startswith('"'):
            assert value.endswith('"')
            value = value[1:-1]
        found.append((command, value))
    return found


def as_ollama(template: str, system: str | None, messages: list[dict[str, str]]) -> str:
    """Return the prompt: Ollama adds the Modelfile's system prompt to a chat without one."""
    turns = list(messages)
    if system and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": system}, *turns]
    named = [{"Role": t["role"], "Content": t["content"]} for t in turns]
    return executed(template, named)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_translated_template_renders_the_same_prompts(name, tokenizer):
    style = Style("chat", chat_template=TEMPLATES[name])
    template, system = template_for(tokenizer, style)
    chat = Chat(tokenizer, TEMPLATES[name])
    for messages in (TURNS[:1], TURNS, [SYSTEM, *TURNS[:1]], [SYSTEM, *TURNS]):
        expected = chat.render(messages, (), "the test", generation=True)
        assert as_ollama(template, system, messages) == expected


def test_the_system_prompt_of_training_replaces_the_templates_own(tokenizer):
    style = Style("chat", chat_template=TEMPLATES["default_system"], system="Only JSON.")
    assert template_for(tokenizer, style)[1] == "Only JSON."
    assert template_for(tokenizer, Style("chat", TEMPLATES["default_system"]))[1] == "Be good."


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for m in messages %}{{ loop.index }}{{ m.content }}\n{% endfor %}", "independently"),
        ("{{ messages[-1].content }}", "left out"),
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}", "refuses"),
    ],
)
def test_other_templates_are_reported(template, reason, tokenizer):
    with pytest.raises(Untranslatable, match=reason):
        template_for(tokenizer, Style("chat", chat_template=template))


def test_prompts_without_chat_template(tokenizer):
    template, system = template_for(tokenizer, Style("alpaca"))
    assert executed(template, [], Prompt="Hi {}") == ALPACA.replace("{}", "Hi {}", 1)
    assert system is None
    assert executed(template_for(tokenizer, Style("plain"))[0], [], Prompt="Hi") == "Hi"


def test_a_modelfile_is_read_back(tokenizer):
    style = Style("chat", chat_template=TEMPLATES["chatml"], system='Say "yes"\nor "no"')
    template, system = template_for(tokenizer, style)
    options: dict[str, Any] = {"template": template, "system": system, "context": 512}
    values = values_of(modelfile("demo.gguf", tokenizer, style, **options))
    assert values[0] == ("FROM", "./demo.gguf")
    assert ("TEMPLATE", template) in values
    assert ("SYSTEM", 'Say "yes"\nor "no"') in values
    stops = {value for name, value in values if name == "PARAMETER stop"}
    assert "<|im_end|>" in stops
    assert ("PARAMETER num_ctx", "512") in values
    with pytest.raises(Untranslatable, match="three quotes"):
        modelfile("demo.gguf", tokenizer, style, **options | {"system": '"""'})
