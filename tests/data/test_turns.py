"""What follows an answer is what the template writes in a whole conversation."""

import pytest

from peftkit.data.chat import Chat
from peftkit.data.tokens import tokens
from peftkit.data.turns import Turns
from peftkit.errors import DataError
from peftkit.inference.call_formats import Call
from peftkit.inference.calls import format_of
from tests.helpers.call_templates import TEMPLATES, with_template
from tests.helpers.chat_templates import QWEN3, TOOLS

ID = "abcdefgh0"
REPLY = {"role": "tool", "name": "weather", "tool_call_id": ID, "content": "19 degrees"}
USER = {"role": "user", "content": "and then?"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_replies_of_tools_continue_as_a_full_rendering_does(name, tokenizer):
    own = with_template(tokenizer, TEMPLATES[name])
    turns, chat = Turns(own, None), Chat(own)
    form = format_of(lambda messages: chat.render(messages, (), "a call"))
    assert form is not None
    end, ids = turns.after([REPLY], [("weather", ID)], TOOLS)
    said = form.message("", [(ID, Call("weather", {"city": "Lima"}))])
    whole = chat.render([USER, said, REPLY], TOOLS, "all", generation=True)
    before = tokens(own, whole)[: -len(ids)]
    assert before[-1] == end
    assert [*before, *ids] == tokens(own, whole)
    assert "19 degrees" in own.decode(ids)
    assert "Lima" in own.decode(before)
    turns.check(TOOLS)


def test_an_answer_ends_with_the_token_that_was_sampled(tokenizer):
    own = with_template(tokenizer, TEMPLATES["observed"])
    by_call = Turns(own, None).after([REPLY], [("weather", ID)], TOOLS, ended_by="<|observation|>")
    assert own.decode(by_call[1]) == "\n19 degrees<|assistant|>"
    by_user = Turns(own, None).after([USER], ended_by="<|user|>")
    assert own.decode(by_user[1]) == "\nand then?<|assistant|>"
    chatml = Turns(with_template(tokenizer, TEMPLATES["hermes"]), None)
    assert chatml.after([USER], ended_by="<pad>") == chatml.after([USER])  # it stays as it is


def test_the_next_answer_may_be_left_to_come(tokenizer):
    turns = Turns(with_template(tokenizer, TEMPLATES["hermes"]), None)
    _, ids = turns.after([USER], generation=False)
    assert tokenizer.decode(ids) == "\n<|im_start|>user\nand then?<|im_end|>\n"


def test_words_of_the_user_follow_where_reasoning_is_kept(tokenizer):
    Turns(with_template(tokenizer, TEMPLATES["hermes"]), None).check()
    thinking = Turns(with_template(tokenizer, QWEN3), None)
    thinking.check(TOOLS)  # reasoning stays while tools reply
    with pytest.raises(DataError, match="rewrites"):
        thinking.check()


REWRITES = {
    "counts": "{{ (messages | length) ~ ' turns\n' }}",
    "forgets": "{% set messages = messages[-2:] %}",
}


@pytest.mark.parametrize("name", REWRITES)
def test_rewritten_turns_are_refused(name, tokenizer):
    own = with_template(tokenizer, REWRITES[name] + TEMPLATES["hermes"])
    with pytest.raises(DataError, match="chat template"):
        Turns(own, None).check(TOOLS)


def test_a_template_that_refuses_replies_is_told(tokenizer):
    refuses = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
    own = with_template(tokenizer, refuses + "{% endif %}{% endfor %}" + TEMPLATES["hermes"])
    with pytest.raises(DataError, match="no tools"):
        Turns(own, None).after([REPLY], [("weather", ID)], TOOLS)
