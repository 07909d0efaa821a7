"""A Modelfile writes the very prompts that the adapter was trained on."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest

from peftkit.data.chat import CHATML, Chat
from peftkit.data.encode import ALPACA, Style
from peftkit.formats.ollama import modelfile, read_frame

DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n"
    "{% endif %}" + CHATML
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<h>{{ m.role }}</h>\n\n{{ m.content | trim }}<eot>"
    "{% endfor %}{% if add_generation_prompt %}<h>assistant</h>\n\n{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<t>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}</t>\n{% endfor %}{% if add_generation_prompt %}<t>model\n{% endif %}"
)
COUNTING = (
    "{% for m in messages %}{{ loop.index }}:{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}answer:{% endif %}"
)
TALKS = (
    [("user", "Where is it?")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e")],
    [("system", "Be brief."), ("user", "What?")],
)


def as_ollama(text: str, talk: list[tuple[str, str]]) -> str:
    """Run a Modelfile's template: `range`, `if eq .Role` and `.Content`, as Go reads them."""
    template = re.search(r'^TEMPLATE """(.*?)"""$', text, re.DOTALL | re.MULTILINE)
    system = re.search(r'^SYSTEM """(.*?)"""$', text, re.DOTALL | re.MULTILINE)
    assert template is not None
    if system is not None and talk[0][0] != "system":
        talk = [("system", system[1]), *talk]
    begin, loop, opening = re.fullmatch(  # type: ignore[union-attr]
        r"(.*?)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*)",
        template[1],
        re.DOTALL,
    ).groups()
    branches = dict(
        re.findall(
            r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}(.*?)(?=\{\{ else if|\Z)', loop, re.DOTALL
        )
    )
    said = [branches[role].replace("{{ .Content }}", content) for role, content in talk]
    return begin + "".join(said) + opening


@pytest.mark.parametrize(
    ("template", "talks"),
    [(CHATML, TALKS), (DEFAULT, TALKS), (HEADERS, TALKS), (NO_SYSTEM, TALKS[:2])],
    ids=["chatml", "default", "headers", "no system"],
)
def test_its_prompts_are_those_of_the_chat_template(
    template: str, talks: Any, tokenizer: Any
) -> None:
    text, notes = modelfile("./BASE.gguf", "./a.gguf", tokenizer, Style("chat", template))
    assert notes == []
    assert text.startswith("FROM ./BASE.gguf\nADAPTER ./a.gguf\nTEMPLATE ")
    assert ('SYSTEM """You are kind."""' in text) == (template == DEFAULT)
    for talk in talks:
        messages = [{"role": role, "content": content} for role, content in talk]
        expected = Chat(tokenizer, template).render(messages, (), "a talk", generation=True)
        assert as_ollama(text, talk) == expected.removeprefix(tokenizer.bos_token or "")


def test_the_token_that_ends_a_turn_stops_the_answer(tokenizer: Any) -> None:
    text, _ = modelfile("b", "a", tokenizer, Style("chat", CHATML))
    assert 'PARAMETER stop "<|im_end|>"' in text
    assert "PARAMETER temperature 0" in text
    assert "PARAMETER repeat_penalty 1" in text


def test_a_template_of_more_than_fixed_text_is_told_and_left_out(tokenizer: Any) -> None:
    assert read_frame(tokenizer, COUNTING) is None
    text, notes = modelfile("b", "a", tokenizer, Style("chat", COUNTING))
    assert "TEMPLATE" not in text
    assert len(notes) == 1
    fixed = "Talk:\n" + NO_SYSTEM  # what stands before is no message's, and there is no system's
    assert read_frame(tokenizer, fixed) is None
    braces = CHATML.replace("'<|im_start|>'", "'{{'")
    assert "TEMPLATE" not in modelfile("b", "a", tokenizer, Style("chat", braces))[0]


def test_single_prompts_are_framed_as_they_were_learnt(tokenizer: Any) -> None:
    plain, _ = modelfile("b", "a", deepcopy(tokenizer), Style("plain"))
    assert 'TEMPLATE """{{ .Prompt }}"""' in plain
    framed, _ = modelfile("b", "a", tokenizer, Style("alpaca"))
    assert ALPACA.format("{{ .Prompt }}") in framed
