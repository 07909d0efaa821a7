"""Prompts for generation: the same tokens that precede a response in training rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from peftkit.data.chat import Chat
from peftkit.data.chat_template import own_template, with_system
from peftkit.data.encode import Encoder, require_template
from peftkit.data.examples import Instruction
from peftkit.data.messages import Message, Tool
from peftkit.data.pack import IGNORE
from peftkit.data.style import ALPACA, Style
from peftkit.data.tokens import tokens, with_bos
from peftkit.errors import DataError


def default_style(tokenizer: Any) -> Style:
    """Return the prompt format of a model whose training is unknown."""
    return Style("chat" if tokenizer.chat_template else "plain")


def prompt_ids(
    tokenizer: Any,
    prompt: str | Sequence[Message],
    style: Style,
    tools: Sequence[Tool] = (),
    variables: Mapping[str, object] | None = None,
    limit: int | None = None,
) -> list[int]:
    """Return the tokens that generation starts from.

    Args:
        prompt: The user's text, or a conversation (chat only).
        variables: Replace the variables of training in the chat template.
        limit: As in `tokens`.

    Raises:
        DataError: The style or the template cannot render it, or as `tokens`.
    """
    if style.kind == "chat":
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        require_template(tokenizer, style.chat_template)
        chat = Chat(tokenizer, style.chat_template)
        turns = style.opened(messages)
        text = chat.render(turns, tools, "the prompt", generation=True, variables=variables)
        return tokens(tokenizer, text, limit)
    if not isinstance(prompt, str):
        raise DataError(
            "Cannot prompt this model with a conversation.",
            found=f"Its adapter was trained on single prompts (style '{style.kind}').",
            fix="Give one prompt as text.",
        )
    text = ALPACA.format(prompt) if style.kind == "alpaca" else prompt
    return with_bos(tokenizer, text, limit)


def template_of(tokenizer: object, style: Style) -> str | None:
    """Return the chat template of a style; None: the tokenizer's template."""
    if style.kind != "chat" or not style.system:
        return style.chat_template
    return with_system(style.chat_template or own_template(tokenizer), style.system)


def style_with_system(tokenizer: object, style: Style, system: str) -> Style:
    """Return a style with another system prompt; "": without one.

    Raises:
        DataError: The style is of single prompts, or its chat template omits the system prompt.
    """
    summary = "Cannot use a system prompt here."
    if style.kind != "chat":
        raise DataError(
            summary,
            found=f"The adapter was trained on single prompts (style '{style.kind}').",
            fix="Write it into the prompt.",
        )
    bare, changed = replace(style, system=None), replace(style, system=system or None)
    if system and prompt_ids(tokenizer, "Hello", bare) == prompt_ids(tokenizer, "Hello", changed):
        raise DataError(
            summary, found="The chat template omits it.", fix="Write it into the first message."
        )
    return changed


def stop_ids(tokenizer: Any, style: Style) -> list[int]:
    """Return the tokens that end a response: the last target of a row of this style, and eos."""
    stops = {int(tokenizer.eos_token_id)} if tokenizer.eos_token_id is not None else set()
    if style.kind == "chat":
        hello = Instruction("Hello", "", "Hello", "the chat template").conversation
        row = Encoder(tokenizer, style.chat_template).encode(hello)
        stops.add(next(label for label in reversed(row.labels) if label != IGNORE))
    return sorted(stops)
