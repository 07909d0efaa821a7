"""Modelfiles: how Ollama runs an adapter, with the prompts that it was trained on.

Ollama writes prompts with a Go template. A chat template is a program in another language, so its
literal parts are read off texts that it renders, and the result is held against it on other
conversations: a template that puts more than fixed text around a message is not translated.
Source: docs/modelfile.md and docs/template.md of Ollama.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peftkit.data.chat import Chat
from peftkit.data.encode import ALPACA, Style, stop_ids
from peftkit.errors import DataError

_MARKS = tuple(f"PEFTKITmark{index}KRAM" for index in range(6))
_TRIALS = (
    (("user", "Hello there"),),
    (("user", "One"), ("assistant", "Two\nlines"), ("user", "Three")),
    (("system", "Be short."), ("user", "One")),
    (("system", "Be short."), ("user", "One"), ("assistant", "Two"), ("user", "Three")),
)


@dataclass(frozen=True, slots=True)
class TemplateParts:
    """The fixed text around messages.

    Args:
        around: Role to the text before and after a message; without a system role if there is none.
        opening: Text that begins an answer.
        default_system: The system message that the template puts where there is none.
    """

    around: dict[str, tuple[str, str]]
    opening: str
    default_system: str | None = None

    def render(self, turns: Sequence[tuple[str, str]]) -> str:
        """Return a conversation as Ollama would write it."""
        if self.default_system is not None and turns[0][0] != "system":
            turns = [("system", self.default_system), *turns]
        texts = [f"{self.around[role][0]}{text}{self.around[role][1]}" for role, text in turns]
        return "".join(texts) + self.opening

    def go(self) -> str:
        """Return the Go template."""
        branches = [
            f'{"if" if index == 0 else "else if"} eq .Role "{role}" }}}}{before}'
            f"{{{{ .Content }}}}{after}{{{{ "
            for index, (role, (before, after)) in enumerate(self.around.items())
        ]
        return "{{ range .Messages }}{{ " + "".join(branches) + "end }}{{ end }}" + self.opening


def modelfile(base: str, adapter: str, tokenizer: Any, style: Style) -> tuple[str, list[str]]:
    """Return a Modelfile, and notes on what it cannot say.

    Args:
        base: What stands after FROM: a GGUF file, or a folder of safetensors.
        adapter: Path of the GGUF adapter, from the Modelfile's folder.
        tokenizer: The base's.
        style: How prompts were put to the model when it learnt.
    """
    lines, notes = [f"FROM {base}", f"ADAPTER {adapter}"], []
    template, system = _template(tokenizer, style)
    if template is None:
        notes.append(
            "The chat template cannot be written for Ollama, which then takes one that it finds in "
            "the base: compare its answers with peftkit chat."
        )
    else:
        lines.append(f'TEMPLATE """{template}"""')
    if system is not None:
        lines.append(f'SYSTEM """{system}"""')
    for text in _stop_texts(tokenizer, style):
        lines.append(f'PARAMETER stop "{text}"')
    # greedy, as everywhere here; Ollama's own penalty of repetitions would change the answers
    lines += ["PARAMETER temperature 0", "PARAMETER repeat_penalty 1"]
    return "\n".join(lines) + "\n", notes


def _template(tokenizer: Any, style: Style) -> tuple[str | None, str | None]:
    """Return the Go template and the system message; None where there is none."""
    if style.kind == "plain":
        return "{{ .Prompt }}", None
    if style.kind == "alpaca":
        return ALPACA.format("{{ .Prompt }}"), None
    frame = read_frame(tokenizer, style.chat_template)
    if frame is None:
        return None, None
    literals = [*(text for pair in frame.around.values() for text in pair), frame.opening]
    if any(mark in text for text in literals for mark in ("{{", "}}", '"""')):
        return None, None
    if '"""' in f"{frame.default_system} {frame.opening}" or frame.opening.endswith('"'):
        return None, None
    return frame.go(), frame.default_system


def read_frame(tokenizer: Any, template: str | None) -> TemplateParts | None:
    """Return the fixed text of a chat template; None if it has more than that.

    The token that begins a document is left out: Ollama puts it before the text itself.
    """

    def render(turns: Sequence[tuple[str, str]], opened: bool = True) -> str:
        messages = [{"role": role, "content": text} for role, text in turns]
        text = Chat(tokenizer, template).render(messages, (), "a trial", generation=opened)
        return text.removeprefix(tokenizer.bos_token or "")

    def agrees(frame: TemplateParts, turns: Sequence[tuple[str, str]]) -> bool:
        return frame.render(turns) == render(turns)

    try:
        bare = _without_system(render)
        if bare is None:
            return None
        found = _with_system(render, bare)
        plain = bare if bare.default_system is None else None
        for frame, trials in ((found, _TRIALS), (plain, _TRIALS[:2])):
            if frame is not None and all(agrees(frame, turns) for turns in trials):
                return frame
    except (DataError, ValueError):
        return None
    return None


def _without_system(render: Any) -> TemplateParts | None:
    """Read what stands around a user's and an assistant's message."""
    _, one, two, three, *_ = _MARKS
    turns = [("user", one), ("assistant", two), ("user", three)]
    first, between, later, end = _split(render(turns), (one, two, three))
    after_user = render([("user", one)], False).partition(one)[2]
    after_answer = render(turns[:2], False).partition(two)[2]
    before_user = later.removeprefix(after_answer)
    if not (between.startswith(after_user) and end.startswith(after_user)):
        return None
    if not later.startswith(after_answer) or not first.endswith(before_user):
        return None
    around = {
        "user": (before_user, after_user),
        "assistant": (between[len(after_user) :], after_answer),
    }
    default = first[: len(first) - len(before_user)]
    return TemplateParts(around, end[len(after_user) :], default or None)


def _with_system(render: Any, bare: TemplateParts) -> TemplateParts | None:
    """Add what stands around a system message; None if the template has no such message."""
    mark, one, *_ = _MARKS
    try:
        before, between, _ = _split(render([("system", mark), ("user", one)]), (mark, one))
    except (DataError, ValueError):
        return None
    before_user = bare.around["user"][0]
    if not between.endswith(before_user):
        return None
    after = between[: len(between) - len(before_user)]
    default = bare.default_system
    if default is not None:
        if not (default.startswith(before) and default.endswith(after)):
            return None
        default = default[len(before) : len(default) - len(after)]
    return TemplateParts({"system": (before, after), **bare.around}, bare.opening, default)


def _split(text: str, marks: Sequence[str]) -> list[str]:
    """Return what stands around marks; ValueError if one is missing."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            raise ValueError(f"the template left {mark} out")
        parts.append(before)
    return [*parts, text]


def _stop_texts(tokenizer: Any, style: Style) -> list[str]:
    texts = [str(tokenizer.decode([token])) for token in stop_ids(tokenizer, style)]
    return [text for text in dict.fromkeys(texts) if text.strip() and '"' not in text]
