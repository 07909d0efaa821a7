"""The location of an adapter: a folder on this machine, or a repository on the hub.

Only file names are checked, without importing torch, to report misspelt paths immediately.
"""

from __future__ import annotations

from pathlib import Path

from peftkit.errors import AdapterError, first_few, neighbours
from peftkit.files.disk import RUN_LOCK, is_locked
from peftkit.formats.folders import CONFIG, TENSORS, is_hub_id


def adapter_folder(adapter: str | Path) -> Path:
    """Return the folder of an adapter; an adapter on the hub is downloaded first.

    Raises:
        AdapterError: The folder does not exist or has no adapter, or the download fails.
    """
    text = str(adapter)
    folder = Path(text).expanduser()
    if folder.name in (CONFIG, TENSORS):
        folder = folder.parent
    right = f"Use the folder that holds {CONFIG}."
    if is_hub_id(text):
        from peftkit.formats.hub import fetch

        message = f"there is no folder {text!r}, and the adapter {text} cannot be downloaded"
        return fetch(text, f"{message} from the hub").folder
    if not folder.exists():
        raise AdapterError(
            f"there is no adapter folder '{text}'.", found=neighbours(folder), fix=right
        )
    if not folder.is_dir():
        raise AdapterError(f"'{text}' is a file, and an adapter is a folder.", fix=right)
    if not (folder / CONFIG).is_file():
        names = sorted(path.name for path in folder.iterdir())
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{CONFIG}"))
        is_training = is_locked(folder / RUN_LOCK)
        checkpoints = [path.parent for path in folder.glob(f"checkpoints/step-*/{CONFIG}")]
        if checkpoints:
            newest = max(checkpoints, key=lambda path: int(path.name.rpartition("-")[2]))
            right = (
                f"The run is still training: wait until it ends, or use the checkpoint {newest}."
            )
            if not is_training:
                right = (
                    "The run has not finished: resume it with peftkit train RECIPE.yaml --resume "
                    f"--out {folder}; or use a checkpoint, such as {newest}."
                )
        elif is_training:
            right = (
                "The run is still training and has saved no step: wait for its first checkpoint."
            )
        elif inside:
            right = f"Use one of the adapters in it: {first_few(inside, 8, ', ')}"
        elif "checkpoints" in names:
            right = "The run ended before it saved a step: train again, without --resume."
        raise AdapterError(
            f"'{text}' holds no {CONFIG}.",
            found=f"It holds: {first_few(names, 8, ', ') or 'nothing'}.",
            fix=right,
        )
    return folder
