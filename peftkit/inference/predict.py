"""What an adapter predicts of texts, of the rows of a file, and what it hears in sounds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peftkit.data.load import DataConfig, read_records
from peftkit.errors import AdapterError, DataError
from peftkit.events import Listener, Saved, Stage, ignore
from peftkit.files.disk import write_text
from peftkit.formats.open_adapter import Opened
from peftkit.tasks.ctc import CTC
from peftkit.tasks.protocol import Task
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
    """Return each row of a file with what is predicted of it: prediction, score or embedding.

    Raises:
        AdapterError: The adapter was not trained to predict anything of texts.
        DataError: The rows cannot be read, or have such a field already.
    """
    task = _task(opened, PREDICTING)
    on_event(Stage(f"Reading {data}"))
    records = read_records(str(data))
    found = task.predict_rows(opened.base.model, records, on_event)
    for record, more in zip(records, found, strict=True):
        if both := set(record.fields) & set(more):
            raise DataError(
                f"{record.source} has a field {sorted(both)[0]!r} already.",
                fix="Rename it: it would be replaced by what is predicted.",
            )
    return [{**record.fields, **more} for record, more in zip(records, found, strict=True)]


def transcribe(opened: Opened, sounds: Sequence[Path]) -> list[str]:
    """Return what is said in each file, greedily.

    Raises:
        AdapterError: The adapter was not trained to write down what it hears.
        DataError: A file cannot be heard.
    """
    base = opened.base
    task = opened.task.on(base.model, base.processor, DataConfig(train=""))
    if not isinstance(task, Transcription | CTC):
        raise AdapterError(
            f"{opened.file.folder} writes down no sounds",
            found=f"it was trained for the task {opened.task.type}",
            fix="Give --prompt; adapters of transcription and ctc take --audio alone.",
        )
    return task.transcribe(base.model, sounds)


def write_rows(rows: Sequence[dict[str, Any]], path: Path, *, on_event: Listener = ignore) -> None:
    """Write rows as JSON Lines, whole or not at all."""
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
