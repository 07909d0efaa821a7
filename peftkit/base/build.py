"""Build a base from its files: complete, frozen, on its device, and packed if requested.

Missing weights, which transformers would fill with random numbers, are an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peftkit.base.pack import (
    LoadingAborted,
    PackingLoader,
    fingerprint,
    folder_arguments,
    kept_in_float32,
)
from peftkit.base.pretrained import download_progress, explained, published, quiet
from peftkit.base.purpose import Purpose
from peftkit.base.request import BaseRequest
from peftkit.config.lazy import LazyTable
from peftkit.errors import BaseError, first_few
from peftkit.events import Listener, Notice, ignore
from peftkit.model.places import head_modules
from peftkit.quant.layers import Packing
from peftkit.quant.quantize import quantize_model, tower_paths
from peftkit.quant.weights import adopt_bitsandbytes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A frozen model in eval mode.

    Attributes:
        fingerprint: Hash of config and weights before packing.
        trunk: Hash without any head, which models of one base for different tasks share.
        head: Paths of the modules of its classification head, if it has one.
    """

    model: Any
    fingerprint: str
    head: tuple[str, ...]
    trunk: str = ""


def build(
    request: BaseRequest,
    *,
    put: Callable[[Tensor], Tensor] | None = None,
    on_event: Listener = ignore,
) -> LoadedModel:
    """Build a base from its files.

    Safetensors and GGUF files are packed weight by weight on the device: memory holds the packed
    model and one more weight. A bitsandbytes checkpoint keeps its codes.

    Args:
        put: Moves each finished tensor to its final storage; by default it stays in memory.

    Raises:
        BaseError: The files are damaged or incomplete, contain another kind of model, have an
            unsupported quantisation, or cannot be packed.
    """
    settings, purpose = request.settings, request.purpose
    loader = _loader_of(request, put, on_event)
    model, fresh = load_model(request, loader, on_event)
    model.requires_grad_(False).eval()
    head: tuple[str, ...] = ()
    if purpose.head:
        from peftkit.base.heads import owners

        paths = head_modules(model)
        head = tuple(dict.fromkeys((*owners(fresh, paths).values(), *paths)))
    adopt_bitsandbytes(model, request.dtype)
    forget_quantization(model)
    samples = loader.samples() if loader else None
    digest = fingerprint(model, without=fresh, samples=samples)
    prefixes = tuple(f"{path}." for path in head_modules(model))
    head_names = [name for name in model.state_dict() if name.startswith(prefixes)]
    trunk = fingerprint(model, without=head_names, samples=samples)
    if loader is not None:
        loader.install(model)
    cast(model, request.dtype)
    if settings.quantize != "none":  # weights that the loader did not pack
        quantize_model(
            model,
            settings.quantize,
            double_quant=settings.double_quant,
            device=request.device,
            keep=head if settings.quantize_towers else (*head, *tower_paths(model)),
            embeddings=settings.quantize_embeddings,
            on_event=ignore if loader else on_event,
        )
    return LoadedModel(model.to(request.device), digest, head, trunk)


LOADERS = LazyTable[PackingLoader](
    {
        "safetensors": "peftkit.base.pack:PackingLoader",
        "gguf": "peftkit.base.gguf:GGUFLoader",
        "codes": "peftkit.base.published.loader:CodesLoader",
        "gguf blocks": "peftkit.base.gguf:BlocksLoader",
    },
    "peftkit.loaders",
)
"""The loader for each kind of files. A plug-in's loader is used if its `reads` returns True."""


def _loader_of(
    request: BaseRequest, put: Callable[[Tensor], Tensor] | None, on_event: Listener
) -> PackingLoader | None:
    """Return the loader for a base's files; None if transformers loads them unchanged."""
    for name in LOADERS.plugins:
        if LOADERS[name].reads(request):
            return LOADERS[name](request, put=put, on_event=on_event)
    kind = "gguf" if request.location.gguf else "safetensors"
    if (checkpoint := published(request.config)) is not None:
        checkpoint.check(request.location.name, request.settings.quantize)
        if checkpoint.is_bitsandbytes:
            return None
        if not checkpoint.is_gguf:
            kind = "codes"
        elif request.settings.quantize == "none":
            kind = "gguf blocks"
    return LOADERS[kind](request, put=put, on_event=on_event)


def load_model(
    request: BaseRequest, loader: PackingLoader | None = None, on_event: Listener = ignore
) -> tuple[Any, tuple[str, ...]]:
    """Load a model in the requested dtype, or for float16 in the dtype of its files.

    The fingerprint is taken before rounding to float16, which would lose information.

    Returns:
        The model, and the names of the head's parameters that the files lack.

    Raises:
        BaseError: The files are damaged or incomplete, or contain another kind of model.
    """
    location, device = request.location, request.device
    with quiet(), explained(location):
        arguments = folder_arguments(request) if loader is None else loader.arguments()
        cls, source, kwargs = arguments
        kwargs |= download_progress(location, on_event)
        if device.type != "cpu" or loader is None:  # bitsandbytes moves itself to a GPU
            kwargs["device_map"] = {"": str(device)}
        try:
            with one_at_a_time():
                model, info = cls.from_pretrained(
                    source, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
                )  # mismatches are checked below
        except LoadingAborted as aborted:
            raise aborted.error from None
    if getattr(model, "_hf_peft_config_loaded", False):
        raise BaseError(
            f"{location.name} is not a base model.", found="It is an adapter.", fix="Use its base."
        )
    fresh = _new_head(location.name, model, request.purpose, info)
    if info["unexpected_keys"]:
        keys = first_few(sorted(info["unexpected_keys"]), 5, ", ")
        on_event(Notice(f"{type(model).__name__} does not use these weights of its files: {keys}"))
    return model, fresh


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let transformers read tensors one at a time instead of ahead, in several threads."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _new_head(name: str, model: Any, purpose: Purpose, info: Mapping[str, Any]) -> tuple[str, ...]:
    """Initialise the missing parameters of a classification head; other missing ones are an error.

    Returns:
        The names of the new parameters.
    """
    head: tuple[str, ...] = ()
    fresh: dict[str, str] = {}
    if purpose.head:
        from peftkit.base.heads import owners, renew, start_from_words

        head = head_modules(model)
        fresh = owners(info["missing_keys"], head)
        if purpose.head.fresh:
            names = (name for name, _ in model.named_parameters() if name.startswith(head))
            fresh |= owners(names, head)
    problems = [f"missing: {key}" for key in sorted(info["missing_keys"] - fresh.keys())]
    problems += [
        f"misshapen: {key} is {tuple(shape)}, not {tuple(expected)}"
        for key, shape, expected in sorted(info["mismatched_keys"])
        if key not in fresh
    ]
    if problems:
        fix = "These weights would be random. Download it again, or use another model."
        if head and all(problem.split()[1].startswith(head) for problem in problems):
            fix = "Its head has other labels. Set task.fresh_head: true to initialise a new one."
        kind = type(model).__name__
        raise BaseError(f"{name} is not a complete {kind}.", found=first_few(problems, 5), fix=fix)
    if purpose.head:
        renew(model, fresh)
        if purpose.head.word_ids:
            start_from_words(model, fresh, purpose.head.word_ids, name)
    return tuple(sorted(fresh))


def forget_quantization(model: Any) -> None:
    """Remove transformers' attributes for a quantisation that it does not compute."""
    for name in ("hf_quantizer", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        model.__dict__.pop(name, None)
    model.is_quantized = False
    model.config.__dict__.pop("quantization_config", None)


def cast(model: Any, dtype: torch.dtype) -> None:
    """Cast the parameters that are neither packed nor kept in float32 by the model."""
    in_float32 = kept_in_float32(model, dtype)
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            skipped = isinstance(module, Packing) or in_float32(f"{path}.{name}")
            if parameter is not None and parameter.is_floating_point() and not skipped:
                parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
