"""Conversations with images as text: a processor's chat template, and its mark for an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peftkit.data.chat import SENTINEL, Rendered, Span
from peftkit.data.image_rows import MARK
from peftkit.data.messages import Message
from peftkit.errors import BaseError, DataError


class ImageTemplate:
    """A processor's chat template, asked with messages whose texts have MARK for an image.

    Templates of such models read a content in parts; those of text models one text, where the
    processor's own mark may stand.

    Attributes:
        mark: The processor's own mark of an image.
        chat_template: What is used; None if there is none.
    """

    def __init__(self, processor: Any, template: str | None = None) -> None:
        own = getattr(processor, "chat_template", None)
        self.chat_template = template or own or processor.tokenizer.chat_template
        self.mark = image_mark(processor)
        self._processor = processor
        self._in_parts = True
        if self.chat_template and not self._writes_images():
            self._in_parts = False
            if not self._writes_images():
                raise DataError(
                    "The chat template writes no images.",
                    found=f"An image in a user's message leaves no {self.mark} in the text.",
                    fix="Set data.chat_template to a .jinja file that writes parts of the type "
                    "image, or leave it out to use the processor's own.",
                )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Any = None,
        chat_template: str | None = None,
        tokenize: bool = False,
    ) -> str:
        """Return a conversation as text, as `Chat` asks for it."""
        text: str = self._processor.apply_chat_template(
            [self._written(message) for message in messages],
            tools=tools,
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return text

    def _written(self, message: Message) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, str):
            return dict(message)
        if not self._in_parts:
            return {**message, "content": content.replace(MARK, self.mark)}
        first, *rest = content.split(MARK)
        parts = [{"type": "text", "text": first}] if first else []
        for piece in rest:
            parts += [{"type": "image"}, *([{"type": "text", "text": piece}] if piece else [])]
        return {**message, "content": parts}

    def _writes_images(self) -> bool:
        turns = (
            {"role": "user", "content": f"{MARK}{SENTINEL}A"},
            {"role": "assistant", "content": f"{SENTINEL}B"},
        )
        try:
            text = self.apply_chat_template(turns)
        except Exception:  # a template is a program: it can raise anything
            return False
        return all(text.count(part) == 1 for part in (self.mark, f"{SENTINEL}A", f"{SENTINEL}B"))


def image_mark(processor: Any) -> str:
    """Return the text that stands for an image in what a processor reads.

    Raises:
        BaseError: It does not say.
    """
    mark = getattr(processor, "image_token", None)
    if not mark:
        raise BaseError(
            f"cannot use {type(processor).__name__} for conversations with images.",
            found="It does not say which text stands for an image (image_token).",
            fix="Give a base whose processor does, or a newer transformers.",
        )
    return str(mark)


def expanded(rendered: Rendered, mark: str, written: Sequence[str]) -> Rendered:
    """Return a text with what the processor writes for each image, its spans moved along."""
    pieces = rendered.text.split(mark)
    starts, at = [], 0
    for piece in pieces[:-1]:
        at += len(piece)
        starts.append(at)
        at += len(mark)
    text = pieces[0] + "".join(w + p for w, p in zip(written, pieces[1:], strict=True))

    def moved(place: int) -> int:
        before = (w for w, start in zip(written, starts, strict=True) if start < place)
        return place + sum(len(w) - len(mark) for w in before)

    spans = (Span(moved(span.start), moved(span.end), span.ended) for span in rendered.spans)
    return Rendered(text, tuple(spans), rendered.as_generated)
