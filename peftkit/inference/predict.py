"""What an opened adapter answers: labels and scores, transcriptions, completions with media."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from peftkit.data.media.files import Media
from peftkit.data.records import read_records
from peftkit.data.style import Style
from peftkit.errors import AdapterError, DataError
from peftkit.events import Listener, Saved, Stage, ignore
from peftkit.files.disk import write_text
from peftkit.formats.open_adapter import Opened
from peftkit.inference.engine import Completion, OnAnswer, OnFewer, Request, log_fewer
from peftkit.inference.generate import decoded
from peftkit.inference.open_engine import PlainEngine
from peftkit.inference.sampling import Sampling, seed_of
from peftkit.model.blocks import is_sharded
from peftkit.settings import DataConfig
from peftkit.tasks.batches import NO_ROOM, batches_that_fit, equal_parts
from peftkit.tasks.media.media_text import MediaText

SCORING = ("sequence_classification", "reward", "reranker")
PREDICTING = (*SCORING, "embedding", "image_classification", "audio_classification")
"""Tasks that predict something for texts, and for the rows of a file."""


def build_task(opened: Opened, types: Sequence[str], complaint: str, fix: str) -> Any:
    """Return an adapter's task, on its base.

    Args:
        types: The tasks that are suited.
        complaint, fix: What an adapter of another task does not do, and what to do about it.

    Raises:
        AdapterError: The adapter has another task.
    """
    if opened.task.type not in types:
        raise AdapterError(
            f"{opened.file.folder} {complaint}",
            found=f"it was trained for the task {opened.task.type}",
            fix=fix,
        )
    data = DataConfig(train="", max_length=None)
    style = opened.style if opened.is_causal else opened.file.provenance.prompt_style
    return opened.task.on(opened.base.model, opened.base.processor, data, style=style)


def predict(opened: Opened, texts: Sequence[str | tuple[str, str]]) -> list[dict[str, float]]:
    """Classify or score texts, or pairs of texts.

    Returns:
        For each text the probability of each label, the most likely first; for regression its
        "value"; of a reward model its "score".

    Raises:
        AdapterError: The adapter was not trained to classify or score texts.
        DataError: A text is empty, or single texts were given for a task of pairs, or the reverse.
    """
    return _predicting(opened, SCORING).predict_texts(opened.base.model, texts)


def predict_file(
    opened: Opened, data: str | Path, *, on_event: Listener = ignore
) -> list[dict[str, Any]]:
    """Return each row of a file with its prediction, score or embedding.

    Raises:
        AdapterError: The adapter's task does not predict.
        DataError: The rows cannot be read, or have a field of that name already.
    """
    task = _predicting(opened, PREDICTING)
    on_event(Stage(f"Reading {data}"))
    records = read_records(str(data))
    predictions = task.predict_rows(opened.base.model, records, on_event)
    rows = []
    for record, prediction in zip(records, predictions, strict=True):
        if both := set(record.fields) & set(prediction):
            raise DataError(
                f"{record.source} has a field {sorted(both)[0]!r} already.",
                fix="Rename it: the prediction would replace it.",
            )
        rows.append({**record.fields, **prediction})
    return rows


def transcribe(opened: Opened, files: Sequence[Path]) -> list[str]:
    """Return the text of each audio file, decoded greedily.

    Raises:
        AdapterError: The adapter's task is not transcription or ctc.
        DataError: A file cannot be decoded.
    """
    fix = "Give --prompt; adapters of transcription and ctc take --audio alone."
    task = build_task(opened, ("transcription", "ctc"), "does not transcribe", fix)
    return task.transcribe(opened.base.model, files)


def _predicting(opened: Opened, types: Sequence[str]) -> Any:
    fix = f"Adapters of these tasks classify, score or embed: {', '.join(types)}."
    return build_task(opened, types, "predicts nothing of this", fix)


def write_rows(rows: Sequence[dict[str, Any]], path: Path, *, on_event: Listener = ignore) -> None:
    """Write rows as JSON Lines, atomically."""
    write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), path)
    on_event(Saved("rows", path))


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """A prompt with media.

    Attributes:
        text: With the processor's mark for each medium, as from `MediaEncoder.prompt`.
    """

    text: str
    media: tuple[Media, ...] = ()


def generate_with_media(
    opened: Opened,
    prompt: str,
    media: Sequence[Media] = (),
    *,
    style: Style | None = None,
    **settings: Any,
) -> str:
    """Return the completion of media followed by a prompt.

    Args:
        style: The prompt format; by default the adapter's.
        settings: max_new_tokens, temperature, top_p, top_k, seed, as in `Sampling`.

    Raises:
        AdapterError: The adapter was not trained on such media.
        DataError: A file cannot be decoded; the prompt is empty or fills the context.
    """
    task = media_task(opened)
    task.encoder.media_processor.check(media, "the prompt")
    text = "".join(one.mark for one in media) + prompt
    text = task.encoder.prompt(text, style or opened.style)
    (ids,) = complete(opened.base.model, task, [MediaPrompt(text, tuple(media))], **settings)
    return decoded(task.tokenizer, ids)


def media_task(opened: Opened) -> MediaText:
    """Return the task of an opened adapter that takes media in its prompts.

    Raises:
        AdapterError: The adapter has another task.
    """
    fix = "Leave them out; adapters of the tasks image_text and audio_text take them."
    complaint = "takes no images, audio or videos in a prompt"
    task = build_task(opened, ("image_text", "audio_text"), complaint, fix)
    assert isinstance(task, MediaText)
    return task


def complete(
    model: Any,
    task: MediaText,
    prompts: Sequence[MediaPrompt],
    *,
    batch_size: int = 8,
    on_answer: OnAnswer | None = None,
    on_fewer: OnFewer | None = None,
    **settings: Any,
) -> list[list[int]]:
    """Return the token ids that follow each prompt, as `generate_ids` does."""
    sampling = Sampling(**settings, stops=task.encoder.stop_ids(task.prompt_style))
    answers: dict[int, list[int]] = {}
    groups: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(task.kind_of(prompt.media), []).append(index)
    with PlainEngine(model, task.tokenizer) as engine:

        def answered(part: Sequence[int]) -> list[Completion]:
            inputs = inputs_of(model, task, [prompts[index] for index in part])
            rows = [
                engine.completion(Request(ids, sampling, seed_of(sampling, index)))
                for index, ids in zip(part, inputs["input_ids"].tolist(), strict=True)
            ]
            engine.answer(rows, inputs)
            return rows

        for group in groups.values():
            for part, rows, _ in batches_that_fit(
                group,
                batch_size,
                equal_parts,
                answered,
                fix=NO_ROOM,
                on_fewer=on_fewer or log_fewer,
                is_shared=is_sharded(model),
            ):
                answers |= {index: row.ids for index, row in zip(part, rows, strict=True)}
                if on_answer is not None:
                    on_answer(len(answers))
    return [answers[index] for index in range(len(prompts))]


def inputs_of(model: Any, task: MediaText, prompts: Sequence[MediaPrompt]) -> dict[str, Tensor]:
    """Return the model's inputs for prompts, padded on the left."""
    encoded = task.encoder.generation_inputs([p.text for p in prompts], [p.media for p in prompts])
    return task.inputs(model, encoded)
