"""What is said in sounds, as an opened adapter hears it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from peftkit.data.load import DataConfig
from peftkit.errors import AdapterError
from peftkit.formats.open_adapter import Opened
from peftkit.tasks.ctc import CTC
from peftkit.tasks.transcription import Transcription


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
