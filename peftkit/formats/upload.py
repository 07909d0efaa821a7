"""Upload a finished run to object storage, or its adapter to a model hub."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path

from peftkit.errors import PeftkitError, RunError
from peftkit.events import Listener, Stage
from peftkit.files.remote import check_vacant, check_writable, upload
from peftkit.files.strict_json import JsonMap
from peftkit.formats.folders import ADAPTER_FILES, CONFIG, FINISHED, RECORDS

HUB = "hf://"
FILES = (*ADAPTER_FILES, CONFIG, *(name for name in RECORDS if name != FINISHED))


def check_upload(url: str, settings: JsonMap) -> None:
    """Check before a run that it can be uploaded.

    Args:
        settings: The run's settings, as in `finished.json`.

    Raises:
        PeftkitError: The URL cannot be written to, or holds another run.
    """
    if url.startswith(HUB):
        from peftkit.formats.folders import parse_hub_id

        parse_hub_id(url.removeprefix(HUB))
    else:
        check_writable(url)
        check_vacant(url, FILES, FINISHED, partial(_is_same, settings))


def _is_same(settings: JsonMap, mark: bytes) -> bool:
    with suppress(ValueError, TypeError, KeyError):
        return bool(json.loads(mark)["settings"] == settings)
    return False


def upload_run(folder: Path, url: str, record: JsonMap, on_event: Listener) -> None:
    """Upload the adapter and the records of a run, without checkpoints; `finished.json` is last.

    Raises:
        RunError: The upload failed; `finished.json` is not there.
    """
    on_event(Stage(f"Uploading the run to {url}"))
    try:
        if url.startswith(HUB):
            from peftkit.formats.hub import push_adapter

            push_adapter(folder, url.removeprefix(HUB), on_event=on_event)
            return
        files = {name: folder / name for name in FILES if (folder / name).is_file()}
        mark = json.dumps(record, indent=2, sort_keys=True).encode()
        upload(files, url, (FINISHED, mark), partial(_is_same, record["settings"]))
    except PeftkitError as problem:
        raise RunError(
            problem.problem,
            found=problem.found,
            fix=f"The adapter is in {folder}. To upload it again, run the command with "
            "--resume auto.",
        ) from problem
