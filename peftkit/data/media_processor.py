"""What a processor of media and text says when it is asked: no table of models is kept."""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from peftkit.data.chat import SENTINEL, Rendered, Span
from peftkit.data.format import Message
from peftkit.data.media import ANY_MARK, KINDS, MARKS, Limits, Media, Picture, Sound
from peftkit.errors import BaseError, DataError

ReadMedia = Sequence[tuple[type[Media], Any]]
"""The media of a text, as they were read, in their order."""
MAX_KNOWN = 1_000
"""Sizes of media whose text is remembered: that of half a minute of sound has some kilobytes."""
FEATURES = ("pixel_values", "pixel_values_videos")
"""Inputs whose size tells what a vision tower has to do."""


def unsuited(name: str, kind: type[Media], found: str) -> BaseError:
    """Return the error of a processor or a model that takes no conversations with such media."""
    fix = "Give another base; docs/images.md and docs/sound.md list families that are tested."
    if importlib.util.find_spec("torchvision") is None:
        fix = (
            "It may need the package torchvision: pip install torchvision. Else give another base."
        )
    asked = f"Cannot use {name} for conversations with {kind.kind}s."
    return BaseError(asked, found=found, fix=fix)


class Asked:
    """A processor, and what it said of itself.

    Args:
        settings: The model's config.
        needed: The kind of media that it must take.
        patch_size: Of the vision tower, for the cost of an image.

    Attributes:
        marks: Its mark of each kind of media that it takes, in a text.
        media_ids: The tokens that stand for what the model sees or hears.
        of_tokens: The inputs that it makes along with the tokens, (B, T, ...).
        is_nested: Whether images lie in rows, (B, images, ...), rather than one after the other.
        takes_suffix: Whether it wants an answer apart from its prompt.

    Raises:
        BaseError: It takes no media of the kind that it must.
    """

    def __init__(
        self,
        processor: Any,
        settings: Any,
        needed: type[Media],
        limits: Limits,
        *,
        patch_size: int,
    ) -> None:
        self.processor, self.limits, self._patch_size = processor, limits, patch_size
        self.takes_suffix = "suffix" in inspect.signature(type(processor).__call__).parameters
        self.marks: dict[type[Media], str] = {}
        self.refused: dict[type[Media], str] = {}
        self.is_nested = False
        of_tokens: set[str] = set()
        for kind in KINDS:
            why = _why_not(processor, settings, kind)
            if not why:
                self.marks[kind] = str(getattr(processor, f"{kind.name}_token"))
                try:
                    of_tokens |= self._asked(kind)
                except DataError as problem:  # it is not the row's: a blank one has nothing wrong
                    why = problem.found or problem.asked
                    del self.marks[kind]
            if why:
                self.refused[kind] = why
        if Sound in self.marks and not self._hears_all():
            raise DataError(
                f"Sounds of {limits.max_seconds:g} s are too long for this base.",
                found=f"Its {type(processor).__name__} cuts them off.",
                fix="Set task.max_seconds lower, to 30 for most.",
            )
        if needed in self.refused:
            raise unsuited(type(processor).__name__, needed, self.refused[needed])
        self.of_tokens = frozenset(of_tokens)
        self.any_mark = re.compile("|".join(re.escape(mark) for mark in self.marks.values()))
        ids = (media_id(settings, kind) for kind in self.marks)
        self.media_ids = frozenset(token for token in ids if token is not None)
        self._known: dict[tuple[object, ...], tuple[tuple[str, ...], int]] = {}

    def _asked(self, kind: type[Media]) -> set[str]:
        """Ask which inputs go along with the tokens; of images, whether they lie in rows."""
        what, mark = f"a blank {kind.kind}", self.marks[kind]
        blank = (kind, kind.blank(self.limits))
        short = self.made([f"{mark} a"], [[blank]], what)
        long = self.made([f"{mark} a" + " b" * 40], [[blank]], what)
        lengths = [made["input_ids"].shape[1] for made in (short, long)]
        if kind is Picture:
            try:
                two = self.made([f"{mark} {mark} a"], [[blank, blank]], "two blank images")
                self.is_nested = two["pixel_values"].shape[0] == 1
            except DataError:  # one image a row: whatever they lie in, counts never differ
                self.is_nested = True
        return {
            name
            for name in short
            if [made[name].shape[1] if made[name].ndim > 1 else 0 for made in (short, long)]
            == lengths
        }

    def _hears_all(self) -> bool:
        """Tell whether the last tenth of a second of the longest sound makes a difference."""
        times = torch.arange(round(self.limits.rate * self.limits.max_seconds)) / self.limits.rate
        sound = 0.1 * torch.sin(600 * times)
        other = sound.clone()
        other[-self.limits.rate // 10 :] *= 0.5
        text = f"{self.marks[Sound]} a"
        one, two = (
            self.made([text], [[(Sound, each.numpy())]], "a long sound") for each in (sound, other)
        )
        return any(not torch.equal(one[name], two[name]) for name in one)

    def made(
        self,
        texts: Sequence[str],
        media: Sequence[ReadMedia],
        source: str,
        *,
        padding_side: str | None = None,
        **more: Any,
    ) -> Any:
        """Return what the processor makes of texts and their media, as tensors.

        Args:
            padding_side: Of the texts; sounds are padded as the processor has it.
        """
        written: dict[str, Any] = {"add_special_tokens": False}
        if padding_side is not None:
            written |= {"padding": True, "padding_side": padding_side}
        for kind in KINDS:
            rows = [[read for own, read in row if own is kind] for row in media]
            if any(rows):
                more |= kind.given(rows, self.limits)
        try:
            with warnings.catch_warnings():  # of what libraries mean to change: none is the row's
                warnings.simplefilter("ignore")
                return self.processor(
                    text=list(texts), text_kwargs=written, return_tensors="pt", **more
                )
        except Exception as problem:  # processors check in ways of their own
            raise DataError(
                f"The processor of the base cannot take {source}.",
                found=f"It says: {str(problem) or type(problem).__name__}",
                fix="Change the row or its media.",
            ) from problem

    def check(self, media: Sequence[Media], source: str, text: str | None = None) -> None:
        """Refuse media of a kind that the base does not take, and texts with other marks than them.

        Args:
            text: With the processor's marks.

        Raises:
            DataError: Names the first.
        """
        for one in media:
            if why := self.refused.get(type(one)):
                raise DataError(
                    f"Cannot use {one.which} of {one.source}.",
                    found=f"The base takes no {one.kind}s. {why}",
                    fix=f"Leave {one.kind}s out, or give another base.",
                )
        found = [] if text is None else self.any_mark.findall(text)
        wanted = [self.marks[type(one)] for one in media]
        if text is not None and found != wanted:
            raise DataError(
                f"Cannot tell where the media of {source} stand.",
                found=f"It has {len(wanted)} of them, and its text has {len(found)} of the "
                f"processor's marks {' '.join(self.marks.values())}.",
                fix="Take the marks out of the row's texts, or mend the chat template.",
            )

    def read(self, media: Sequence[Media]) -> list[tuple[type[Media], Any]]:
        """Return media as the processor takes them.

        Raises:
            DataError: One cannot be read.
        """
        return [(type(one), one.read(self.limits)) for one in media]

    def written(self, text: str, media: ReadMedia, source: str) -> tuple[tuple[str, ...], int]:
        """Return what the processor writes for each medium, and what they cost in patches.

        Both follow from the sizes; should they not, the batch that finds other tokens says so.
        """
        if not media:
            return (), 0
        sizes = tuple((kind, kind.size(read)) for kind, read in media)
        if sizes not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            made = self.made([text], [media], source, return_text_replacement_offsets=True)
            offsets = made.get("text_replacement_offsets")
            written = tuple(found["replacement"] for found in offsets[0]) if offsets else ()
            written = written or tuple(self.marks[kind] for kind, _ in media)
            self._known[sizes] = written, self.patches(made)
        return self._known[sizes]

    def patches(self, made: Mapping[str, Any]) -> int:
        """Return what media cost the towers, in their own tokens."""
        pixels = sum(made[name].numel() for name in FEATURES if name in made)
        heard = (value for name, value in made.items() if name.endswith("input_features"))
        # two frames of sound are a position of most encoders
        frames = sum(value.numel() // min(value.shape[-2:]) for value in heard) // 2
        return math.ceil(pixels / (3 * self._patch_size**2)) + frames

    def tokens_in(self, written: Sequence[str]) -> tuple[int, ...]:
        """Return how many tokens of what is written for each medium are the medium's."""
        tokenizer = self.processor.tokenizer
        made = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in written]
        return tuple(sum(token in self.media_ids for token in ids) for ids in made)


def _why_not(processor: Any, settings: Any, kind: type[Media]) -> str:
    """Return why a model takes no media of a kind, as far as processor and config say."""
    reader = next((getattr(processor, n) for n in kind.readers if hasattr(processor, n)), None)
    if media_id(settings, kind) is None or reader is None:
        return f"It has no token for {kind.kind}s." if reader else f"It reads no {kind.kind}s."
    if getattr(settings, f"{kind.name}_config", kind) is None:
        return f"It has no tower for {kind.kind}s."
    if not getattr(processor, f"{kind.name}_token", None):
        return f"It does not say which text stands for one ({kind.name}_token)."
    try:
        kind.require()
    except DataError as problem:
        return f"{problem.found} {problem.fix}"
    return ""


def media_id(settings: Any, kind: type[Media]) -> int | None:
    """Return the token that stands for what a model sees or hears of one kind, by its config."""
    towers = (getattr(settings, f"{name}_config", None) for name in ("vision", "audio"))
    found = (getattr(place, f"{kind.name}_token_id", None) for place in (settings, *towers))
    return next((int(token) for token in found if token is not None), None)


class MediaTemplate:
    """A processor's chat template, asked with messages whose texts have marks of media.

    Templates of such models read a content in parts; those of text models one text, where the
    processor's own mark may stand.

    Args:
        marks: The processor's own. needed: The kind that it must write.

    Attributes:
        chat_template: What is used; None if there is none.
    """

    def __init__(
        self,
        processor: Any,
        marks: Mapping[type[Media], str],
        needed: type[Media],
        template: str | None,
    ) -> None:
        own = getattr(processor, "chat_template", None)
        self.chat_template = template or own or processor.tokenizer.chat_template
        self._marks, self._processor = marks, processor
        self._in_parts = True
        if self.chat_template and not self._writes(needed):
            self._in_parts = False
            if not self._writes(needed):
                raise DataError(
                    f"The chat template writes no {needed.kind}s.",
                    found=f"One in a user's message leaves no {marks[needed]} in the text.",
                    fix="Set data.chat_template to a .jinja file that writes parts of the type "
                    f"{needed.name}, or leave it out to use the processor's own.",
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

    def bare(self, text: str) -> str:
        """Return a text with the processor's marks in place of ours."""
        return ANY_MARK.sub(lambda found: self._marks[MARKS[found[1]]], text)

    def _written(self, message: Message) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, str):
            return dict(message)
        if not self._in_parts:
            return {**message, "content": self.bare(content)}
        parts = [
            {"type": MARKS[piece].name} if piece in MARKS else {"type": "text", "text": piece}
            for piece in ANY_MARK.split(content)
            if piece
        ]
        return {**message, "content": parts}

    def _writes(self, kind: type[Media]) -> bool:
        turns = (
            {"role": "user", "content": f"{kind.mark}{SENTINEL}A"},
            {"role": "assistant", "content": f"{SENTINEL}B"},
        )
        try:
            text = self.apply_chat_template(turns)
        except Exception:  # a template is a program: it can raise anything
            return False
        wanted = (self._marks[kind], f"{SENTINEL}A", f"{SENTINEL}B")
        return all(text.count(part) == 1 for part in wanted)


def expanded(rendered: Rendered, marks: re.Pattern[str], written: Sequence[str]) -> Rendered:
    """Return a text with what the processor writes for each medium, its spans moved along.

    Args:
        marks: What finds the processor's own.
    """
    text, places = "", list[tuple[int, int]]()  # where a mark ends, by how much it grows
    at = 0
    for found, own in zip(marks.finditer(rendered.text), written, strict=True):
        text += rendered.text[at : found.start()] + own
        at = found.end()
        places.append((at, len(own) - len(found[0])))
    text += rendered.text[at:]

    def moved(place: int) -> int:
        return place + sum(grown for end, grown in places if end <= place)

    spans = (Span(moved(span.start), moved(span.end), span.ended) for span in rendered.spans)
    return Rendered(text, tuple(spans), rendered.as_generated)
