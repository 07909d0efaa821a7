"""Multimodal processors, probed with blank media instead of a table of models."""

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
from peftkit.data.media.files import ANY_MARK, KINDS, MARKS, Audio, Limits, Media, Picture
from peftkit.data.messages import Message
from peftkit.errors import BaseError, DataError

ReadMedia = Sequence[tuple[type[Media], Any]]
"""The decoded media of a text, in order, each with its kind."""
MAX_SIZES = 1_000
"""Cached sizes: the replacement text for 30 s of audio takes a few kilobytes."""
FEATURES = ("pixel_values", "pixel_values_videos")
"""Inputs whose size determines the cost of a vision tower."""


def unsuited(name: str, kind: type[Media], reason: str) -> BaseError:
    """Return the error for a processor or a model that does not support a kind of media."""
    fix = "Give another base; docs/images.md and docs/sound.md list families that are tested."
    if importlib.util.find_spec("torchvision") is None:
        fix = "It may need the package torchvision: pip install torchvision. Or give another base."
    return BaseError(
        f"Cannot use {name} for conversations with {kind.kind}s.", found=reason, fix=fix
    )


class MediaProcessor:
    """A multimodal processor and its properties, found by probing it with blank media.

    Args:
        settings: The model's config.
        needed: The kind of media that it must support.
        patch_size: Patch size of the vision tower, for the cost of an image.

    Attributes:
        marks: Its placeholder text for each supported kind of media.
        refused: The reason for each unsupported kind.
        media_ids: The tokens that the model replaces with features.
        token_inputs: Names of inputs that are aligned with the tokens, (B, T, ...).
        is_nested: Whether images are nested, (B, images, ...), instead of concatenated.
        takes_suffix: Whether it accepts an answer separately from its prompt.

    Raises:
        BaseError: The processor does not support the needed kind.
        DataError: It truncates audio clips of `limits.max_seconds`.
    """

    def __init__(
        self, processor: Any, settings: Any, needed: type[Media], limits: Limits, *, patch_size: int
    ) -> None:
        self.processor, self.limits, self._patch_size = processor, limits, patch_size
        self.takes_suffix = "suffix" in inspect.signature(type(processor).__call__).parameters
        self.marks: dict[type[Media], str] = {}
        self.refused: dict[type[Media], str] = {}
        self.is_nested = False
        token_inputs: set[str] = set()
        for kind in KINDS:
            why = _why_not(processor, settings, kind)
            if not why:
                self.marks[kind] = str(getattr(processor, f"{kind.name}_token"))
                try:
                    token_inputs |= self._probe(kind)
                except DataError as problem:  # the blank medium fails, so any row would
                    why = problem.found or problem.problem
                    del self.marks[kind]
            if why:
                self.refused[kind] = why
        if Audio in self.marks and not self._reads_whole_clip():
            raise DataError(
                f"Audio clips of {limits.max_seconds:g} s are too long for this base.",
                found=f"Its {type(processor).__name__} truncates them.",
                fix="Lower task.max_seconds; 30 suits most bases.",
            )
        if needed in self.refused:
            raise unsuited(type(processor).__name__, needed, self.refused[needed])
        self.token_inputs = frozenset(token_inputs)
        self.any_mark = re.compile("|".join(re.escape(mark) for mark in self.marks.values()))
        ids = (media_id(settings, kind) for kind in self.marks)
        self.media_ids = frozenset(token for token in ids if token is not None)
        self._by_sizes: dict[tuple[object, ...], tuple[tuple[str, ...], int]] = {}

    def _probe(self, kind: type[Media]) -> set[str]:
        """Return the inputs aligned with the tokens; for images, also set `is_nested`."""
        what, mark = f"a blank {kind.kind}", self.marks[kind]
        blank = (kind, kind.blank(self.limits))
        short = self.process([f"{mark} a"], [[blank]], what)
        long = self.process([f"{mark} a" + " b" * 40], [[blank]], what)
        if kind is Picture:
            try:
                two = self.process([f"{mark} {mark} a"], [[blank, blank]], "two blank images")
                self.is_nested = two["pixel_values"].shape[0] == 1
            except DataError:  # one image a row: nested or not, counts never differ
                self.is_nested = True

        def lengths(name: str) -> list[int]:
            return [each[name].shape[1] if each[name].ndim > 1 else 0 for each in (short, long)]

        return {name for name in short if lengths(name) == lengths("input_ids")}

    def _reads_whole_clip(self) -> bool:
        """Return whether the last tenth of a second of the longest audio changes the inputs."""
        times = torch.arange(round(self.limits.rate * self.limits.max_seconds)) / self.limits.rate
        audio = 0.1 * torch.sin(600 * times)
        other = audio.clone()
        other[-self.limits.rate // 10 :] *= 0.5
        text = f"{self.marks[Audio]} a"
        one, two = (
            self.process([text], [[(Audio, each.numpy())]], "long audio") for each in (audio, other)
        )
        return any(not torch.equal(one[name], two[name]) for name in one)

    def process(
        self,
        texts: Sequence[str],
        media: Sequence[ReadMedia],
        source: str,
        *,
        padding_side: str | None = None,
        **more: object,
    ) -> Any:
        """Return the processor's inputs for texts and their media, as tensors.

        Args:
            padding_side: Padding side of the texts; the processor chooses that of audio.
            source: The row, for messages.

        Raises:
            DataError: The processor raises an error.
        """
        text_kwargs: dict[str, Any] = {"add_special_tokens": False}
        if padding_side is not None:
            text_kwargs |= {"padding": True, "padding_side": padding_side}
        for kind in KINDS:
            rows = [[read for its_kind, read in row if its_kind is kind] for row in media]
            if any(rows):
                more |= kind.arguments(rows, self.limits)
        try:
            with warnings.catch_warnings():  # deprecations in libraries
                warnings.simplefilter("ignore")
                return self.processor(
                    text=list(texts), text_kwargs=text_kwargs, return_tensors="pt", **more
                )
        except Exception as problem:  # processors raise any type
            raise DataError(
                f"The base's processor cannot use {source}.",
                found=f"Its error: {str(problem) or type(problem).__name__}",
                fix="Change the row or its media.",
            ) from problem

    def check(self, media: Sequence[Media], source: str, text: str | None = None) -> None:
        """Check that the base supports the media and that the marks in the text match them.

        Args:
            text: Text with the processor's marks.

        Raises:
            DataError: A kind is not supported, or the marks differ from the media.
        """
        for one in media:
            if why := self.refused.get(type(one)):
                raise DataError(
                    f"Cannot use {one.which} of {one.source}.",
                    found=f"The base does not support {one.kind}s. {why}",
                    fix=f"Remove the {one.kind}s, or give another base.",
                )
        marks = [] if text is None else self.any_mark.findall(text)
        if text is not None and marks != [self.marks[type(one)] for one in media]:
            raise DataError(
                f"Cannot locate the media of {source} in its text.",
                found=f"It has {len(media)} media, and its text has {len(marks)} of the "
                f"processor's marks {' '.join(self.marks.values())}.",
                fix="Remove the marks from the row's texts, or change the chat template.",
            )

    def read(self, media: Sequence[Media]) -> list[tuple[type[Media], object]]:
        """Decode media for the processor; raises DataError if one cannot be read."""
        return [(type(one), one.read(self.limits)) for one in media]

    def replacements(self, text: str, media: ReadMedia, source: str) -> tuple[tuple[str, ...], int]:
        """Return the processor's text for each medium, and the total cost in patches.

        Both depend only on the sizes; `MediaEncoder.inputs` detects processors where they do not.
        """
        if not media:
            return (), 0
        sizes = tuple((kind, kind.size(read)) for kind, read in media)
        if sizes not in self._by_sizes:
            if len(self._by_sizes) >= MAX_SIZES:
                self._by_sizes.clear()
            inputs = self.process([text], [media], source, return_text_replacement_offsets=True)
            offsets = inputs.get("text_replacement_offsets")
            texts = tuple(offset["replacement"] for offset in offsets[0]) if offsets else ()
            texts = texts or tuple(self.marks[kind] for kind, _ in media)
            self._by_sizes[sizes] = texts, self.patches(inputs)
        return self._by_sizes[sizes]

    def patches(self, inputs: Mapping[str, Any]) -> int:
        """Return the cost of media in their encoders, in encoder tokens."""
        pixels = sum(inputs[name].numel() for name in FEATURES if name in inputs)
        features = (value for name, value in inputs.items() if name.endswith("input_features"))
        # most audio encoders make one position of two frames
        frames = sum(value.numel() // min(value.shape[-2:]) for value in features) // 2
        return math.ceil(pixels / (3 * self._patch_size**2)) + frames

    def tokens_in(self, replacements: Sequence[str]) -> tuple[int, ...]:
        """Return how many tokens of each medium's text the model replaces with features."""
        tokenizer = self.processor.tokenizer
        encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in replacements]
        return tuple(sum(token in self.media_ids for token in ids) for ids in encoded)


def _why_not(processor: object, settings: object, kind: type[Media]) -> str:
    """Return why the processor or config does not support a kind of media; "" if it does."""
    reader = next((getattr(processor, n) for n in kind.readers if hasattr(processor, n)), None)
    if media_id(settings, kind) is None or reader is None:
        return f"It has no token for {kind.kind}s." if reader else f"It cannot read {kind.kind}s."
    if getattr(settings, f"{kind.name}_config", kind) is None:
        return f"It has no tower for {kind.kind}s."
    if not getattr(processor, f"{kind.name}_token", None):
        return f"It does not define its placeholder text ({kind.name}_token)."
    try:
        kind.require()
    except DataError as problem:
        return f"{problem.found} {problem.fix}"
    return ""


def media_id(settings: object, kind: type[Media]) -> int | None:
    """Return the token of a model's config that is replaced with features of a kind of media."""
    towers = (getattr(settings, f"{name}_config", None) for name in ("vision", "audio"))
    tokens = (getattr(config, f"{kind.name}_token_id", None) for config in (settings, *towers))
    return next((int(token) for token in tokens if token is not None), None)


class MediaTemplate:
    """A processor's chat template, for messages whose texts contain marks of media.

    Multimodal templates take content as a list of parts. Text templates take one text, which here
    contains the processor's marks.

    Args:
        marks: The processor's marks.
        needed: The kind of media that the template must render.

    Attributes:
        chat_template: The template in use, if any.

    Raises:
        DataError: The template does not render the needed kind.
    """

    def __init__(
        self,
        processor: Any,
        marks: Mapping[type[Media], str],
        needed: type[Media],
        template: str | None,
    ) -> None:
        default = getattr(processor, "chat_template", None) or processor.tokenizer.chat_template
        self.chat_template = template or default
        self._marks, self._processor = marks, processor
        self._in_parts = True
        if self.chat_template and not self._writes(needed):
            self._in_parts = False
            if not self._writes(needed):
                raise DataError(
                    f"The chat template does not render {needed.kind}s.",
                    found=f"A user message with media renders without {marks[needed]}.",
                    fix="Set data.chat_template to a .jinja file that renders parts of the type "
                    f"{needed.name}, or leave it out to use the processor's own.",
                )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: object = None,
        chat_template: str | None = None,
        tokenize: bool = False,
        **variables: object,
    ) -> str:
        """Return a conversation as text; the interface of a tokenizer's method."""
        text: str = self._processor.apply_chat_template(
            [self._written(message) for message in messages],
            tools=tools,
            chat_template=self.chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **variables,
        )
        return text

    def bare(self, text: str) -> str:
        """Return a text in which the processor's marks replace peftkit's."""
        return ANY_MARK.sub(lambda mark: self._marks[MARKS[mark[1]]], text)

    def _written(self, message: Message) -> dict[str, object]:
        content = message.get("content")
        if not isinstance(content, str):
            return dict(message)
        if not self._in_parts:
            return {**message, "content": self.bare(content)}
        parts = [
            {"type": MARKS[segment].name} if segment in MARKS else {"type": "text", "text": segment}
            for segment in ANY_MARK.split(content)
            if segment
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
        expected = (self._marks[kind], f"{SENTINEL}A", f"{SENTINEL}B")
        return all(text.count(part) == 1 for part in expected)


def expanded(rendered: Rendered, marks: re.Pattern[str], replacements: Sequence[str]) -> Rendered:
    """Replace each mark with the processor's text for the medium, and shift the spans.

    Args:
        marks: Pattern of the processor's marks.
    """
    text, growths = "", list[tuple[int, int]]()  # the end of a mark, and its growth
    at = 0
    for mark, replacement in zip(marks.finditer(rendered.text), replacements, strict=True):
        text += rendered.text[at : mark.start()] + replacement
        at = mark.end()
        growths.append((at, len(replacement) - len(mark[0])))
    text += rendered.text[at:]

    def moved(place: int) -> int:
        return place + sum(growth for end, growth in growths if end <= place)

    spans = (Span(moved(span.start), moved(span.end), span.ended) for span in rendered.spans)
    return Rendered(text, tuple(spans), rendered.as_generated)
