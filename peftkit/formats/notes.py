"""peftkit.json, beside an adapter's files: what PEFT's config has no place for.

It holds the method as asked, a copy of what the config says of the computing, the base and how it
was loaded, the prompt style, the task, and the hashes of the tensors and of these settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from peftkit.config import from_dict
from peftkit.data.encode import Style
from peftkit.errors import AdapterError, PeftkitError
from peftkit.files import sha256_of, write_json
from peftkit.formats.guard import read_json
from peftkit.formats.settings import check_config, computing, notes_changed, settings_digest
from peftkit.methods.protocol import Method
from peftkit.methods.table import METHODS


class Notes(NamedTuple):
    """What was noted: the method, and the facts of `Provenance` under their names there."""

    method: Method
    origin: Mapping[str, Any]


def write_notes(
    path: Path,
    tensors: Path,
    method: Method,
    fields: Mapping[str, Any],
    base: Mapping[str, Any],
    style: Style | None,
    task: Mapping[str, Any] | None,
) -> None:
    """Write the notes on an adapter whose other files are written.

    Args:
        tensors: Its tensor file. fields: Its config.
        base: name, hub_id, revision, fingerprint and loading.
    """
    spec, config = method.model_dump(mode="json"), computing(fields)
    notes = {
        "version": 1,
        "sha256": {
            tensors.name: sha256_of(tensors),
            "settings": settings_digest(spec, config, task),
        },
        "method": spec,
        "config": config,
        "base": dict(base),
        "prompt_style": asdict(style) if style else None,
        "task": task,
    }
    write_json(notes, path)


def read_notes(path: Path, tensors: Path, config: Path, fields: Mapping[str, Any]) -> Notes:
    """Read the notes on an adapter, and compare its other files with them.

    Args:
        tensors, config: Its other files. fields: What the config says.

    Raises:
        AdapterError: They are none, or the tensors or the settings are others than were saved.
    """
    notes = read_json(path)
    try:
        spec, base, saved = notes["method"], notes["base"], dict(notes["config"])
        digest, settings = notes["sha256"][tensors.name], notes["sha256"]["settings"]
        method = from_dict(METHODS[spec["type"]], spec, str(path))
        origin = {
            "base": base["name"],
            "hub_id": base["hub_id"],
            "revision": base["revision"],
            "fingerprint": base["fingerprint"],
            "loading": base["loading"],
            "prompt_style": Style(**notes["prompt_style"]) if notes["prompt_style"] else None,
            "task": notes.get("task"),
        }
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, PeftkitError):
            raise
        raise AdapterError(
            f"{path} is not one that peftkit wrote",
            found=f"{error} is missing or of the wrong type",
            fix="Restore it, or delete it to load the folder as a plain PEFT adapter.",
        ) from error
    if settings_digest(spec, saved, origin["task"]) != settings:
        raise notes_changed(path)
    check_config(config, fields, saved)
    if sha256_of(tensors) != digest:
        raise AdapterError(
            f"{tensors} is not the file that was saved",
            found=f"its sha256 is another one than that in {path.name}",
            fix="Get it again; or delete the notes to load it as a plain PEFT adapter.",
        )
    return Notes(method, origin)
