"""A base built out of its files: whole, frozen, on its device, packed if asked; or a BaseError.

Weights that are missing, which transformers would fill with random numbers, are an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from peftkit.base.class_head import head_of_classes, owners, renew, start_from_words
from peftkit.base.download import told
from peftkit.base.fingerprint import fingerprint
from peftkit.base.gguf import open_gguf, parsed_once
from peftkit.base.loader_hooks import Broken, StreamConfig
from peftkit.base.locate import Location
from peftkit.base.packing_loader import PackingLoader, kept_in_float32
from peftkit.base.pretrained import (
    check_config,
    check_weights,
    explained,
    load_tokenizer,
    loader_arguments,
    quiet,
)
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.base.quantized import (
    TAKEN_OVER,
    check_readable,
    dense_config,
    one_at_a_time,
    published,
    quantized_by,
)
from peftkit.base.shapes import on_meta
from peftkit.base.spill import Spill
from peftkit.base.storage_format import LoadedModel, StorageFormat
from peftkit.errors import BaseError, OutputError, first_few
from peftkit.events import Listener, Notice, Progress, Stage, ignore
from peftkit.files.folders import alone, new_folder
from peftkit.kernels.packing import Packing
from peftkit.quant.quantize import adopt_bitsandbytes, quantize_model, tower_paths


def build(
    location: Location,
    revision: str | None,
    purpose: Purpose,
    config: Any,
    form: StorageFormat,
    *,
    pad_token_id: int | None = None,
    spill: Spill | None = None,
    on_event: Listener = ignore,
) -> LoadedModel:
    """Build a base out of its files.

    Safetensors and GGUF files are packed weight by weight, on their device: main memory holds what
    is kept and the weight in hand. A checkpoint of bitsandbytes keeps its bits.

    Args:
        config: What `check_config` says of it.
        pad_token_id: For a decoder with a head of classes that does not know its own.
        spill: Where weights are kept meanwhile; by default in memory.

    Raises:
        BaseError: The files are damaged, incomplete, no model for this task, quantised in a way
            that is not read here, or cannot be packed.
    """
    check_readable(location.name, config, form.quantize)
    stream = None
    if quantized_by(config) != TAKEN_OVER:
        stream = PackingLoader(
            form.quantize,
            form.dtype,
            form.device,
            double_quant=form.double_quant,
            has_head=purpose.head is not None,
            towers=form.quantize_towers,
            settings=published(config),
            on_event=on_event,
            **({"put": spill.moved} if spill else {}),
        )
    model, fresh = load_model(
        location, revision, purpose, form.dtype, stream, on_event, form.device
    )
    model.requires_grad_(False).eval()
    if purpose.head is not None:
        pad_with(model.config, pad_token_id)
    head = _trained_head(model, fresh) if purpose.head else ()
    adopt_bitsandbytes(model, form.dtype)
    forget_quantization(model)
    identity = fingerprint(model, without=fresh, taken=stream.taken if stream else None)
    if stream is not None:
        stream.install(model)
    cast(model, form.dtype)
    if form.quantize != "none":  # what did not come through the stream
        quantize_model(
            model,
            form.quantize,
            double_quant=form.double_quant,
            device=form.device,
            keep=head if form.quantize_towers else (*head, *tower_paths(model)),
            on_event=ignore if stream else on_event,
        )
    return LoadedModel(model.to(form.device), identity, head)


def pad_with(config: Any, pad_token_id: int | None) -> None:
    """Say what rows are padded with, where a config does not: a head reads the last token."""
    text = config.get_text_config()
    if getattr(text, "pad_token_id", None) is None and pad_token_id is not None:
        text.pad_token_id = pad_token_id


def _trained_head(model: Any, fresh: tuple[str, ...]) -> tuple[str, ...]:
    head = head_of_classes(model)
    return tuple(dict.fromkeys((*owners(fresh, head).values(), *head)))


def load_model(
    location: Location,
    revision: str | None,
    purpose: Purpose,
    dtype: torch.dtype,
    stream: PackingLoader | None = None,
    on_event: Listener = ignore,
    device: torch.device | None = None,
) -> tuple[Any, tuple[str, ...]]:
    """Load a model; its weights come in `dtype`, or, for float16, in the files' own.

    (What float16 rounds away the fingerprint would miss: it is rounded afterwards.)

    Args:
        device: Where to, without a stream that knows it; a checkpoint of bitsandbytes would go to a
            GPU, where there is one.

    Returns:
        The model, and the names of the parameters of its head that the files do not hold.

    Raises:
        BaseError: The files are damaged, incomplete, or no model for this task.
    """
    with quiet(), explained(location):
        if location.gguf:
            cls, source, where = _gguf_arguments(location, purpose, stream)
        else:
            cls, source, where = _arguments(location, revision, purpose, dtype, stream)
            where |= {} if location.is_local else told(on_event)
        if device is not None and (device.type != "cpu" or stream is None):
            where["device_map"] = {"": str(device)}
        try:
            with one_at_a_time():
                model, info = cls.from_pretrained(
                    source, output_loading_info=True, ignore_mismatched_sizes=True, **where
                )  # what does not match is looked at below
        except Broken as broken:
            raise broken.error from None
    if getattr(model, "_hf_peft_config_loaded", False):
        raise BaseError(
            f"{location.name} is not a base model.", found="It is an adapter.", fix="Name its base."
        )
    fresh = _fresh(location.name, model, purpose, info)
    if info["unexpected_keys"]:
        keys = first_few(sorted(info["unexpected_keys"]), 5, ", ")
        on_event(Notice(f"{type(model).__name__} does not use these weights of its files: {keys}"))
    return model, fresh


def _arguments(
    location: Location,
    revision: str | None,
    purpose: Purpose,
    dtype: torch.dtype,
    stream: PackingLoader | None,
) -> tuple[Any, str | None, dict[str, Any]]:
    """Return the class, the place and the arguments with which transformers loads a folder."""
    where = loader_arguments(location, revision)
    if purpose.head is not None:
        where["config"] = check_config(location, revision, purpose)
    where["dtype"] = "auto" if dtype == torch.float16 else dtype
    where["use_safetensors"] = True
    if stream is not None:
        config = check_config(location, revision, purpose)
        if quantized_by(config):
            where["config"] = dense_config(config)
        where["quantization_config"] = StreamConfig(stream)
    if location.is_local:
        check_weights(Path(location.source))
    return getattr(transformers, purpose.auto_class), location.source, where


def _gguf_arguments(
    location: Location, purpose: Purpose, stream: PackingLoader | None
) -> tuple[Any, str | None, dict[str, Any]]:
    """Return the class and the arguments with which transformers loads a GGUF file's tensors."""
    assert stream is not None, "a GGUF file is read through a stream"
    with parsed_once(location):
        config = check_config(location, None, purpose)
        bare = on_meta(config, purpose, torch.float32)
        tensors, conversions = open_gguf(location.gguf_path, bare)
    where = {"state_dict": tensors, "config": config, "dtype": torch.float32}
    return type(bare), None, where | {"quantization_config": StreamConfig(stream, conversions)}


def _fresh(name: str, model: Any, purpose: Purpose, info: Mapping[str, Any]) -> tuple[str, ...]:
    """Make what the files lack of a head of classes; lacking anything else is an error."""
    head = head_of_classes(model) if purpose.head else ()
    lacking = owners(info["missing_keys"], head) if purpose.head else {}
    if purpose.head and purpose.head.fresh:
        lacking |= owners((n for n, _ in model.named_parameters() if n.startswith(head)), head)
    problems = [f"missing: {key}" for key in sorted(info["missing_keys"] - lacking.keys())]
    problems += [
        f"misshapen: {key} is {tuple(found)}, not {tuple(wanted)}"
        for key, found, wanted in sorted(info["mismatched_keys"])
        if key not in lacking
    ]
    if problems:
        fix = "These weights would be random. Download it again, or give another model."
        if all(problem.split()[1].startswith(head) for problem in problems) and head:
            fix = "It was made for other labels. Set task.fresh_head: true to make a new head."
        raise BaseError(
            f"{name} is not a whole {type(model).__name__}.",
            found=first_few(problems, 5),
            fix=fix,
        )
    renew(model, lacking)
    if purpose.head and purpose.head.word_ids:
        start_from_words(model, lacking, purpose.head.word_ids, name)
    return tuple(sorted(lacking))


def convert(location: Location, on_event: Listener) -> Location:
    """Convert a GGUF file out of a package into the folder in the cache that it is to have.

    Raises:
        BaseError: The file cannot be read.
        OutputError: The cache cannot be written.
    """
    target = location.convert_to
    if target is None:
        return location
    waiting = Notice(f"Another process is writing {target}; this one waits for it.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with alone(target, lambda: on_event(waiting)):
            if not target.exists():
                _convert_into(target, location, on_event)
    except OSError as error:
        raise OutputError(
            f"cannot write {target}.", found=str(error), fix="Set PEFTKIT_CACHE to another folder."
        ) from error
    return Location(location.name, str(target), location.hub_id)


def _convert_into(target: Path, location: Location, on_event: Listener) -> None:
    on_event(Stage(f"Converting {location.gguf} into {target} (once)"))
    doing = f"Converting {location.gguf}"
    stream = PackingLoader("none", torch.float32, torch.device("cpu"), on_event=ignore)
    with parsed_once(location):
        tokenizer = load_tokenizer(location, None, on_event)
        on_event(Progress(doing, 2, 4))
        model, _ = load_model(location, None, CAUSAL_LM, torch.float32, stream, on_event)
    on_event(Progress(doing, 3, 4))
    forget_quantization(model)
    with new_folder(target) as made:
        with quiet():
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
        mode = (made / "config.json").stat().st_mode  # safetensors writes for its owner alone
        for path in made.iterdir():
            path.chmod(mode)
    on_event(Progress(doing, 4, 4))


def forget_quantization(model: Any) -> None:
    """Take away what transformers says of a quantisation that is not, or no longer, its own."""
    for name in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        model.__dict__.pop(name, None)
    model.is_quantized = False
    model.config.__dict__.pop("quantization_config", None)


def cast(model: Any, dtype: torch.dtype) -> None:
    """Cast the parameters that are not packed, but for those that the model keeps in float32."""
    in_float32 = kept_in_float32(model, dtype)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            kept = isinstance(module, Packing) or in_float32(f"{path}.{name}")
            if parameter is not None and parameter.is_floating_point() and not kept:
                parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
