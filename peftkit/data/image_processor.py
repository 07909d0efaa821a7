"""What a processor of images and text says when it is asked: no table of models is kept."""

from __future__ import annotations

import importlib.util
import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any

from peftkit.data.chat import SENTINEL, Rendered, Span
from peftkit.data.image_rows import MARK
from peftkit.data.images import blank_image
from peftkit.data.messages import Message
from peftkit.errors import BaseError, DataError


def unsuited(name: str, found: str) -> BaseError:
    """Return the error of a processor or a model that takes no conversations with images."""
    fix = "Give another base; docs/data.md lists families that are tested."
    if importlib.util.find_spec("torchvision") is None:
        fix = (
            "It may need the package torchvision: pip install torchvision. Else give another base."
        )
    return BaseError(f"Cannot use {name} for conversations with images.", found=found, fix=fix)


class Asked:
    """A processor, and what it said of itself.

    Args:
        image_id: The token that stands for what the model sees of an image.
        patch_size: Of the vision tower, for the cost of an image.

    Attributes:
        mark: Its mark of an image in a text.
        of_tokens: The inputs that it makes along with the tokens, (B, T, ...).
        is_nested: Whether images lie in rows, (B, images, ...), rather than one after the other.
        takes_suffix: Whether it wants an answer apart from its prompt.

    Raises:
        BaseError: It does not say how it marks an image.
        DataError: It cannot read one.
    """

    def __init__(self, processor: Any, *, image_id: int, patch_size: int) -> None:
        self._processor, self._image_id, self._patch_size = processor, image_id, patch_size
        self.mark = image_mark(processor)
        self.takes_suffix = "suffix" in inspect.signature(type(processor).__call__).parameters
        try:
            self.of_tokens, self.is_nested = self._asked()
        except DataError as problem:  # it is not the row's: a blank image has nothing wrong
            raise unsuited(type(processor).__name__, problem.found) from problem
        self._known: dict[tuple[tuple[int, int], ...], tuple[tuple[str, ...], int]] = {}

    def _asked(self) -> tuple[frozenset[str], bool]:
        """Ask which inputs go along with the tokens, and whether images lie in rows."""
        image, mark = blank_image(), self.mark
        short = self.made([f"{mark} a"], [[image]], "a blank image")
        long = self.made([f"{mark} a" + " b" * 40], [[image]], "a blank image")
        lengths = [made["input_ids"].shape[1] for made in (short, long)]
        of_tokens = {
            name
            for name in short
            if [made[name].shape[1] if made[name].ndim > 1 else 0 for made in (short, long)]
            == lengths
        }
        try:
            two = self.made([f"{mark} {mark} a"], [[image, image]], "two blank images")
        except DataError:  # one image a row: whatever they lie in, counts never differ
            return frozenset(of_tokens), True
        return frozenset(of_tokens), two["pixel_values"].shape[0] == 1

    def made(
        self, texts: Sequence[str], images: Sequence[Sequence[Any]], source: str, **more: Any
    ) -> Any:
        """Return what the processor makes of texts and their images, as tensors."""
        try:
            with warnings.catch_warnings():  # of what libraries mean to change: none is the row's
                warnings.simplefilter("ignore")
                return self._processor(
                    text=list(texts),
                    images=[list(row) for row in images] if any(images) else None,
                    add_special_tokens=False,
                    return_tensors="pt",
                    **more,
                )
        except Exception as problem:  # processors check in ways of their own
            raise DataError(
                f"The processor of the base cannot take {source}.",
                found=f"It says: {str(problem) or type(problem).__name__}",
                fix="Change the row or its images.",
            ) from problem

    def written(self, text: str, images: Sequence[Any], source: str) -> tuple[tuple[str, ...], int]:
        """Return what the processor writes for each image, and what they cost in patches.

        Both follow from the sizes; should they not, the batch that finds other tokens says so.
        """
        if not images:
            return (), 0
        sizes = tuple(image.size for image in images)
        if sizes not in self._known:
            made = self.made([text], [images], source, return_text_replacement_offsets=True)
            offsets = made.get("text_replacement_offsets")
            written = tuple(found["replacement"] for found in offsets[0]) if offsets else ()
            self._known[sizes] = written or (self.mark,) * len(sizes), self.num_patches(made)
        return self._known[sizes]

    def num_patches(self, made: Any) -> int:
        pixels = made.get("pixel_values")
        if pixels is None:
            return 0
        return math.ceil(pixels.numel() / (3 * self._patch_size**2))

    def tokens_in(self, written: Sequence[str]) -> tuple[int, ...]:
        """Return how many tokens of what is written for each image are the image's."""
        made = [
            self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in written
        ]
        return tuple(ids.count(self._image_id) for ids in made)


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
