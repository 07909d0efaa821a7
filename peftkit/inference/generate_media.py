"""Completions of prompts with images, audio or videos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from peftkit.data.media import Media
from peftkit.errors import AdapterError
from peftkit.formats.open_adapter import Opened
from peftkit.inference.engine import OnAnswer, Request
from peftkit.inference.generate import decoded
from peftkit.inference.open_engine import PlainEngine
from peftkit.inference.sampling import Sampling, seed_of
from peftkit.settings import DataConfig
from peftkit.tasks.media_text import MediaText, MediaTextConfig


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """A prompt with media.

    Attributes:
        text: With the processor's mark for each medium, as from `MediaEncoder.prompt`.
    """

    text: str
    media: tuple[Media, ...] = ()


def generate_with_media(
    opened: Opened, prompt: str, media: Sequence[Media] = (), **settings: Any
) -> str:
    """Return the completion of media followed by a prompt.

    Args:
        settings: max_new_tokens, temperature, top_p, top_k, seed, as in `Sampling`.

    Raises:
        AdapterError: The adapter was not trained on such media.
        DataError: A file cannot be decoded; the prompt is empty or fills the context.
    """
    task = media_task(opened)
    task.encoder.media_processor.check(media, "the prompt")
    text = task.encoder.prompt("".join(one.mark for one in media) + prompt, opened.style)
    (ids,) = complete(opened.base.model, task, [MediaPrompt(text, tuple(media))], **settings)
    return decoded(task.tokenizer, ids)


def media_task(opened: Opened) -> MediaText:
    """Return the task of an opened adapter that takes media in its prompts.

    Raises:
        AdapterError: The adapter has another task.
    """
    if not isinstance(opened.task, MediaTextConfig):
        raise AdapterError(
            f"{opened.file.folder} takes no images, audio or videos in a prompt",
            found=f"it was trained for the task {opened.task.type}",
            fix="Leave them out; adapters of the tasks image_text and audio_text take them.",
        )
    config = DataConfig(train="", max_length=None)
    task = opened.task.on(opened.base.model, opened.base.processor, config, style=opened.style)
    assert isinstance(task, MediaText)
    return task


def complete(
    model: Any,
    task: MediaText,
    prompts: Sequence[MediaPrompt],
    *,
    batch_size: int = 8,
    on_answer: OnAnswer | None = None,
    **settings: Any,
) -> list[list[int]]:
    """Return the token ids that follow each prompt, as `generate_ids` does."""
    sampling = Sampling(**settings, stops=task.encoder.stop_ids(task.prompt_style))
    answers: dict[int, list[int]] = {}
    groups: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(task.kind_of(prompt.media), []).append(index)
    with PlainEngine(model, task.tokenizer) as engine:
        for group in groups.values():
            for start in range(0, len(group), batch_size):
                chosen = group[start : start + batch_size]
                inputs = inputs_of(model, task, [prompts[index] for index in chosen])
                rows = [
                    engine.completion(Request(ids, sampling, seed_of(sampling, index)))
                    for index, ids in zip(chosen, inputs["input_ids"].tolist(), strict=True)
                ]
                engine.answer(rows, inputs)
                answers |= {index: row.ids for index, row in zip(chosen, rows, strict=True)}
                if on_answer is not None:
                    on_answer(len(answers))
    return [answers[index] for index in range(len(prompts))]


def inputs_of(model: Any, task: MediaText, prompts: Sequence[MediaPrompt]) -> dict[str, Tensor]:
    """Return the model's inputs for prompts, padded on the left."""
    encoded = task.encoder.generation_inputs([p.text for p in prompts], [p.media for p in prompts])
    return task.inputs(model, encoded)
