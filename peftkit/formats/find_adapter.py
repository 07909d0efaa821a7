"""Where an adapter is: a folder on this machine, or a repository on the hub.

A repository is USER/NAME, or USER/NAME@REVISION.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from peftkit.errors import AdapterError, first_few, neighbours

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?")
_MAX_LENGTH = 96


def adapter_folder(adapter: str | Path) -> Path:
    """Return the folder of an adapter; one on the hub is fetched first.

    Only names are looked at, without torch, so that a misspelt path is answered at once.

    Raises:
        AdapterError: There is no such folder or no adapter in it; or the hub does not have it, or
            does not answer.
    """
    text = str(adapter)
    folder = Path(text).expanduser()
    if folder.name in ("adapter_config.json", "adapter_model.safetensors"):
        folder = folder.parent
    right = "Give the folder that holds adapter_config.json."
    if is_hub_id(text):
        from peftkit.formats.hub import fetch

        asked = f"there is no folder {text!r} here, and the adapter {text} cannot be had"
        return fetch(text, f"{asked} from the hub").folder
    if not folder.exists():
        raise AdapterError(
            f"there is no adapter folder '{text}'.", found=neighbours(folder), fix=right
        )
    if not folder.is_dir():
        raise AdapterError(f"'{text}' is a file, and an adapter is a folder.", fix=right)
    if not (folder / "adapter_config.json").is_file():
        names = sorted(path.name for path in folder.iterdir())
        inside = sorted(str(path.parent) for path in folder.glob("*/adapter_config.json"))
        if inside:
            right = f"Give one of the adapters in it: {first_few(inside, 8, ', ')}"
        elif "checkpoints" in names:
            right = "The run has not finished: go on with peftkit train RECIPE.yaml --resume"
        raise AdapterError(
            f"'{text}' holds no adapter_config.json.",
            found=f"It holds: {first_few(names, 8, ', ') or 'nothing'}.",
            fix=right,
        )
    return folder


class HubId(NamedTuple):
    """A repository, and the branch, tag or commit that is meant; None is its main branch."""

    repo: str
    revision: str | None = None


def parse_hub_id(text: str) -> HubId:
    """Read USER/NAME or USER/NAME@REVISION.

    Raises:
        AdapterError: It is neither.
    """
    match = _ID.fullmatch(text)
    if not match or ".." in text or "--" in match["repo"] or len(match["repo"]) > _MAX_LENGTH:
        raise AdapterError(
            f"{text!r} is not the name of a repository on the hub",
            found="A name is USER/NAME of letters, digits and single - _ . between them.",
            fix="Write it as on its page: USER/NAME, or USER/NAME@REVISION.",
        )
    return HubId(match["repo"], match["revision"])


def is_hub_id(text: str) -> bool:
    """True if this names a hub repository rather than a path.

    An existing path is a path; so is one whose first folder exists, which is then misspelt.
    """
    if not _ID.fullmatch(text) or ".." in text:
        return False
    return not Path(text).exists() and not Path(text.partition("/")[0]).exists()
