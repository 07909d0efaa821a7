"""Names of repositories on a model hub: USER/NAME, or USER/NAME@REVISION."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from peftkit.errors import AdapterError

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?")
_MAX_LENGTH = 96


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
