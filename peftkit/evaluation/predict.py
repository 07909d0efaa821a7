"""Predictions of an opened adapter: labels, scores, transcripts, completions with media."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from peftkit.data.media.files import Media
from peftkit.data.records import read_records
from peftkit.data.style import Style
from peftkit.data.tokens import decoded
from peftkit.errors import AdapterError, DataError
from peftkit.evaluation.evaluate import trained_length
from peftkit.events import Listener, Saved, Stage, ignore
from peftkit.files.disk import write_text
from peftkit.formats.open_adapter import Opened
from peftkit.settings import DataConfig
from peftkit.tasks.config import Predicts
from peftkit.tasks.media.media_text import MediaPrompt, MediaText
from peftkit.tasks.table import TASKS


def build_task(
    opened: Opened, is_suited: bool, complaint: str, fix: str, max_length: int | None = None
) -> Any:
    """Return an adapter's task, on its base.

    Args:
        is_suited: Whether the adapter's task does what is requested.
        complaint, fix: What an adapter of another task does not do, and what to do about it.
        max_length: Longest row in tokens; None: the model's.

    Raises:
        AdapterError: The adapter has another task.
    """
    if not is_suited:
        raise AdapterError(
            f"{opened.file.folder} {complaint}",
            found=f"it was trained for the task {opened.task.type}",
            fix=fix,
        )
    data = DataConfig(train="", max_length=max_length)
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
    task = _predicting(opened, "texts")
    return cast(list[dict[str, float]], task.predict_texts(opened.base.model, texts))


def predict_file(
    opened: Opened, data: str | Path, *, on_event: Listener = ignore
) -> list[dict[str, object]]:
    """Return each row of a file with its prediction, score or embedding.

    Raises:
        AdapterError: The adapter's task does not predict.
        DataError: The rows cannot be read, or have a field of that name already.
    """
    task = _predicting(opened, "rows")
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
    task = build_task(opened, "audio" in opened.task.predicts, "does not transcribe", fix)
    return task.transcribe(opened.base.model, files)


def _predicting(opened: Opened, what: Predicts) -> Any:
    is_suited, fix = what in opened.task.predicts, ""
    if not is_suited:
        names = [name for name in TASKS if what in TASKS[name].predicts]
        fix = f"Adapters of these tasks classify, score or embed: {', '.join(names)}."
    length = trained_length(opened.file.folder)
    return build_task(opened, is_suited, f"predicts nothing for {what}", fix, length)


def write_rows(
    rows: Sequence[dict[str, object]], path: Path, *, on_event: Listener = ignore
) -> None:
    """Write rows as JSON Lines, atomically."""
    write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), path)
    on_event(Saved("rows", path))


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
    (ids,) = task.complete(opened.base.model, [MediaPrompt(text, tuple(media))], **settings)
    return decoded(task.tokenizer, ids)


def media_task(opened: Opened) -> MediaText:
    """Return the task of an adapter that takes media in prompts; raises AdapterError for others."""
    fix = "Leave them out; adapters of the tasks image_text and audio_text take them."
    complaint = "takes no images, audio or videos in a prompt"
    task = build_task(opened, bool(opened.task.prompt_media), complaint, fix)
    assert isinstance(task, MediaText)
    return task
