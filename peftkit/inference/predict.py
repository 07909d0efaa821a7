"""Predictions of an adapter for texts and for the rows of a file, and transcriptions of audio."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peftkit.data.load import read_records
from peftkit.errors import AdapterError, DataError
from peftkit.events import Listener, Saved, Stage, ignore
from peftkit.files.disk import write_text
from peftkit.formats.open_adapter import Opened
from peftkit.settings import DataConfig
from peftkit.tasks.base import Task
from peftkit.tasks.ctc import CTC
from peftkit.tasks.transcription import Transcription

PREDICTING = (
    *("sequence_classification", "reward", "embedding", "reranker"),
    *("image_classification", "audio_classification"),
)


def predict(opened: Opened, texts: Sequence[str | tuple[str, str]]) -> list[dict[str, float]]:
    """Classify or score texts, or pairs of texts.

    Returns:
        For each text the probability of each label, the most likely first; for regression its
        "value"; of a reward model its "score".

    Raises:
        AdapterError: The adapter was not trained to classify or score texts.
        DataError: A text is empty, or single texts were given for a task of pairs, or the reverse.
    """
    return _task(opened, ("sequence_classification", "reward", "reranker")).predict_texts(
        opened.base.model, texts
    )


def predict_file(
    opened: Opened, data: str | Path, *, on_event: Listener = ignore
) -> list[dict[str, Any]]:
    """Return each row of a file with its prediction, score or embedding.

    Raises:
        AdapterError: The adapter's task does not predict.
        DataError: The rows cannot be read, or have a field of that name already.
    """
    task = _task(opened, PREDICTING)
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


def transcribe(opened: Opened, sounds: Sequence[Path]) -> list[str]:
    """Return the text of each audio file, decoded greedily.

    Raises:
        AdapterError: The adapter's task is not transcription or ctc.
        DataError: A file cannot be decoded.
    """
    base = opened.base
    task = opened.task.on(base.model, base.processor, DataConfig(train=""))
    if not isinstance(task, Transcription | CTC):
        raise AdapterError(
            f"{opened.file.folder} does not transcribe",
            found=f"it was trained for the task {opened.task.type}",
            fix="Give --prompt; adapters of transcription and ctc take --audio alone.",
        )
    return task.transcribe(base.model, sounds)


def write_rows(rows: Sequence[dict[str, Any]], path: Path, *, on_event: Listener = ignore) -> None:
    """Write rows as JSON Lines, atomically."""
    write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), path)
    on_event(Saved("rows", path))


def _task(opened: Opened, kinds: Sequence[str]) -> Task:
    if opened.task.type not in kinds:
        raise AdapterError(
            f"{opened.file.folder} predicts nothing of this",
            found=f"it was trained for the task {opened.task.type}",
            fix=f"Adapters of these tasks classify, score or embed: {', '.join(kinds)}.",
        )
    config = DataConfig(train="", max_length=None)
    style = opened.file.provenance.prompt_style
    return opened.task.on(opened.base.model, opened.base.processor, config, style=style)
