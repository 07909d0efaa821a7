"""Ollama's Modelfile: the chat template of training as a Go template, system prompt, stop texts.

Ollama does not run Jinja templates: it guesses a Go template from the file's. Here the
prompt's structure is read off renderings with placeholders. A template is translated if each turn
is a fixed text before and after its content, by role; the translation must then give the same text
as the Jinja template for several conversations. Other templates are reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from peftkit.data.chat import Chat
from peftkit.data.generation import stop_ids
from peftkit.data.messages import Message
from peftkit.data.style import ALPACA, Style
from peftkit.errors import DataError

Render = Callable[[Sequence[Message]], str]
"""Renders a conversation with the generation prompt."""
S, U, A, V = "PKsystemQ", "PKuserQ", "PKassistantQ", "PKlastQ"


class Untranslatable(Exception):
    """The reason why a chat template has no Go template here."""


@dataclass(frozen=True, slots=True)
class Turns:
    """A chat template as fixed texts around the contents of turns.

    Attributes:
        start: Text before the first turn, such as the BOS token.
        around: Text before and after a turn's content, by role.
        generation: Text after the last turn, which the answer follows.
        system: The template's own system prompt; None without one.
    """

    start: str
    around: dict[str, tuple[str, str]]
    generation: str
    system: str | None

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt as Ollama makes it: with the system prompt if there is none."""
        turns = list(messages)
        if self.system is not None and turns[0]["role"] != "system":
            turns = [{"role": "system", "content": self.system}, *turns]
        texts = [
            self.around[t["role"]][0] + t["content"] + self.around[t["role"]][1] for t in turns
        ]
        return self.start + "".join(texts) + self.generation

    @property
    def go_template(self) -> str:
        """The same as a Go template, in one line: no white space to trim."""
        cases = "".join(
            f'{{{{ {"else " if number else ""}if eq .Role "{role}" }}}}{_literal(before)}'
            f"{{{{ .Content }}}}{_literal(after)}"
            for number, (role, (before, after)) in enumerate(self.around.items())
        )
        loop = f"{{{{ range .Messages }}}}{cases}{{{{ end }}}}{{{{ end }}}}"
        return _literal(self.start) + loop + _literal(self.generation)


def _literal(text: str) -> str:
    """Return a Go template's action that prints a text."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def turns_of(render: Render) -> Turns:
    """Read the structure of a chat template off its renderings.

    Raises:
        Untranslatable: It is not a sequence of turns, or refuses system turns.
    """
    user, last = _message("user", U), _message("user", V)
    whole = [_message("system", S), user, _message("assistant", A), last]
    opening, to_user, to_answer, to_last, end = _split(_rendered(render, whole), (S, U, A, V))
    before, _ = _split(_rendered(render, [user]), (U,))
    # where two texts share an end or a beginning, any division gives the same prompts
    user_before = _common_end(to_user, to_last, before)
    user_after = _common_start(to_answer, end)
    system_after = to_user.removesuffix(user_before)
    before = before.removesuffix(user_before)
    start, own = before, None
    if not opening.startswith(before):  # the template has a default system prompt
        start, own = "", before.removeprefix(opening).removesuffix(system_after)
    around = {
        "system": (opening.removeprefix(start), system_after),
        "user": (user_before, user_after),
        "assistant": (to_answer.removeprefix(user_after), to_last.removesuffix(user_before)),
    }
    turns = Turns(start, around, end.removeprefix(user_after), own)
    for conversation in _CONVERSATIONS:
        if turns.render(conversation) != _rendered(render, conversation):
            roles = ", ".join(turn["role"] for turn in conversation)
            raise Untranslatable(f"it does not render the turns ({roles}) independently")
    return turns


def _common_start(*texts: str) -> str:
    columns = zip(*texts, strict=False)  # ends with the shortest text
    return "".join(column[0] for column in takewhile(lambda c: len(set(c)) == 1, columns))


def _common_end(*texts: str) -> str:
    return _common_start(*(text[::-1] for text in texts))[::-1]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


_CONVERSATIONS: tuple[tuple[Message, ...], ...] = (
    (_message("user", "Hi"),),
    (_message("system", "Be brief."), _message("user", "Hi")),
    (_message("user", "Hi"), _message("assistant", "Yes?"), _message("user", "Two\n\nlines")),
    (
        *(_message("system", "Be brief."), _message("user", "a")),
        *(_message("assistant", "b"), _message("user", "c")),
        *(_message("assistant", "d"), _message("user", "e")),
    ),
)


def _rendered(render: Render, messages: Sequence[Message]) -> str:
    try:
        return render(messages)
    except DataError as error:
        roles = ", ".join(turn["role"] for turn in messages)
        raise Untranslatable(f"it refuses the turns ({roles})") from error


def _split(text: str, marks: Sequence[str]) -> list[str]:
    """Return the texts around placeholders, each of which occurs once, in this order."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            raise Untranslatable("a turn is left out, repeated or moved")
        parts.append(before)
    return [*parts, text]


def template_for(tokenizer: object, style: Style) -> tuple[str, str | None]:
    """Return the Go template of a prompt style, and its system prompt.

    Raises:
        Untranslatable: The chat template has no Go template.
    """
    if style.kind == "plain":
        return "{{ .Prompt }}", None
    if style.kind == "alpaca":
        before, after = ALPACA.split("{}")
        return f"{_literal(before)}{{{{ .Prompt }}}}{_literal(after)}", None
    chat = Chat(tokenizer, style.chat_template)

    def render(messages: Sequence[Message]) -> str:
        return chat.render(messages, (), "the conversation", generation=True)

    turns = turns_of(render)
    return turns.go_template, style.system or turns.system


def modelfile(
    file: str,
    tokenizer: object,
    style: Style,
    *,
    template: str | None,
    system: str | None,
    context: int,
) -> str:
    """Return a Modelfile.

    Args:
        file: Name of the GGUF file next to it.
        template: The Go template; None: Ollama chooses one from the file's.
        context: Tokens of a conversation.
    """
    lines = [f"FROM ./{file}"]
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    if system:
        lines.append(f"SYSTEM {_quoted(system)}")
    lines += [
        f"PARAMETER stop {_quoted(text, short=True)}" for text in stop_texts(tokenizer, style)
    ]
    # greedy, like peftkit; without Ollama's penalty on repeated tokens
    lines += ["PARAMETER temperature 0", "PARAMETER repeat_penalty 1"]
    return "\n".join([*lines, f"PARAMETER num_ctx {context}", ""])


def _quoted(text: str, *, short: bool = False) -> str:
    """Quote a value of a Modelfile, without escapes; raises Untranslatable for three quotes."""
    if short and '"' not in text and "\n" not in text:
        return f'"{text}"'
    if '"""' in text:
        raise Untranslatable("a text has three quotes in sequence")
    return f'"""{text}"""'


def stop_texts(tokenizer: Any, style: Style) -> list[str]:
    """Return the texts of the tokens that end an answer, in order."""
    return [str(tokenizer.convert_ids_to_tokens(token)) for token in stop_ids(tokenizer, style)]
