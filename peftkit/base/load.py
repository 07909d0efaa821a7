"""Load the frozen base: open or build it, quantise it if requested, and audit its weights.

`load_base` is the public function; runs call `open_base`. The cache stores large packed bases
(store.py), and bases that several processes open together (sharding.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peftkit.base.locate import Location, locate
from peftkit.base.pretrained import (
    Processors,
    files_of,
    is_packed,
    load_tokenizer,
    oom_as_error,
    published_codes,
    reachable,
)
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.base.request import BaseRequest, compute_dtype, place_weights, request_of
from peftkit.base.skeleton import weight_bytes
from peftkit.config.schema import from_dict
from peftkit.errors import BaseError
from peftkit.events import Listener, Notice, Stage, ignore
from peftkit.execution.environment import Environment, as_current, free_now, select_device
from peftkit.execution.plan import ExecutionPlan
from peftkit.execution.world import World
from peftkit.quant.audit import Audit, audit
from peftkit.settings import BaseConfig

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Base:
    """A frozen model in eval mode, with its tokenizer and its identity.

    Attributes:
        model: A transformers model; no parameter requires a gradient.
        tokenizer: Its tokenizer, with a pad token; None for an image model.
        name: The name for `load_base`: short name or hub id as given, or an absolute path.
        hub_id: Its id on the hub; None for a folder.
        revision: Commit on the hub, or None.
        fingerprint: Digest of config and weights before quantisation.
        trunk: Digest without the head; "" if unknown.
        audit: How every parameter is stored.
        device: The device that computes.
        image_processor: The processor of image inputs.
        multimodal: The processor of inputs with images and text.
        stored: The format of its files ("awq, 4 bits, groups of 128"), if their codes are kept.
        head: Module paths of its classification head, which is trained fully.
    """

    model: Any
    tokenizer: Any
    name: str
    hub_id: str | None
    revision: str | None
    fingerprint: str
    audit: Audit
    device: torch.device
    image_processor: Any = None
    head: tuple[str, ...] = ()
    multimodal: Any = None
    stored: str = ""
    trunk: str = ""

    @property
    def processor(self) -> Any:
        """The processor of all inputs."""
        return self.multimodal or self.image_processor or self.tokenizer


def load_base(
    model: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    quantize: str = "none",
    double_quant: bool = True,
    quantize_towers: bool = False,
    quantize_embeddings: str = "none",
    purpose: Purpose = CAUSAL_LM,
    device: torch.device | str | None = None,
    placement: str = "auto",
    store: str = "auto",
    sharing: World | None = None,
    on_event: Listener = ignore,
) -> Base:
    """Load a base model for an adapter.

    Args:
        model: Folder, GGUF file, hub id or short name.
        revision: Branch, tag or commit on the hub.
        dtype: "bf16", "fp16", "fp32", or "auto": bf16 if it is fast on this machine.
        quantize: "none", "nf4", "fp4" or "int8". Weights are quantised one by one while loading:
            at most one is in memory in 16 bits. A CPU with enough free memory also keeps
            dequantised copies, for speed. "none" keeps the weights in 16 or 32 bits, or the codes
            of a quantised checkpoint.
        double_quant: Quantise the scales of nf4 and fp4 as well.
        quantize_towers: Quantise image and audio towers and their projectors as well.
        quantize_embeddings: Like `quantize`, for the token embedding and the output layer.
        purpose: The task's model class, inputs and head.
        device: By default a GPU if there is one; the CPU if the GPU can neither hold nor stream the
            base.
        placement: "device"; "stream": main memory keeps packed weights, and two blocks at a time
            are on the device; "auto": stream a packed base that does not fit a GPU.
        store: "auto": open the packed base from the cache, and store a large one there; "off":
            neither.
        sharing: Processes that load the base together into main memory before each keeps a shard.
            Weights are then memory-mapped, and take memory only when they are read.

    Raises:
        BaseError: The model does not exist, its files are damaged or incomplete, it cannot be
            quantised, or it does not fit into memory.
        ConfigError: dtype, quantize, placement or store has an unknown value.
    """
    given = {
        "model": model,
        "revision": revision,
        "dtype": dtype,
        "quantize": quantize,
        "double_quant": double_quant,
        "quantize_towers": quantize_towers,
        "quantize_embeddings": quantize_embeddings,
        "placement": placement,
        "store": store,
    }
    settings = from_dict(BaseConfig, given, "load_base(...)")
    compute = None if device is None else as_current(torch.device(device))
    return _open(settings, purpose, settings.placement, compute, sharing, on_event)


def open_base(
    settings: BaseConfig,
    purpose: Purpose,
    plan: ExecutionPlan,
    *,
    world: World | None = None,
    on_event: Listener = ignore,
) -> Base:
    """Load a recipe's base as its plan places it, and emit the table of stored weights.

    Args:
        world: The run's processes, which load a base together if the plan shards it.

    Raises:
        BaseError: See `load_base`.
    """
    sharing = world if plan.is_sharded else None
    base = _open(settings, purpose, plan.placement, None, sharing, on_event)
    on_event(base.audit.table())
    return base


def _open(
    settings: BaseConfig,
    purpose: Purpose,
    placement: str,
    device: torch.device | None,
    sharing: World | None,
    on_event: Listener,
) -> Base:
    """Load a base for a device (None: the default), or for processes that share it."""
    location = find_base(settings.model, settings.revision, on_event)
    on_event(Stage(f"Loading the base {location.name}"))
    with ExitStack() as stack:
        if location.gguf:
            from peftkit.base.gguf_file import parsed_once

            stack.enter_context(parsed_once(location))
        stack.enter_context(oom_as_error(location.name))
        inputs = processors_of(location, purpose, on_event)
        compute = select_device() if device is None else device
        from peftkit.execution.gpu_support import gpu_fallbacks

        for fallback in gpu_fallbacks():
            on_event(fallback.notice)
        dtype = compute_dtype(settings, compute)
        target = compute if sharing is None else CPU
        request = request_of(settings, purpose, location, target, dtype)
        request = request.with_tokens_of(inputs.tokenizer, on_event)
        request, streams_to = _placed(request, placement, device is None, on_event)
        if sharing is None:
            from peftkit.base.store import open_or_build

            loaded = open_or_build(request, on_event)  # below 500 MB: built in memory
        else:
            from peftkit.base.sharding import open_together

            loaded = open_together(request, sharing, on_event)
    if streams_to is not None:
        from peftkit.base.streaming import BlockStream

        BlockStream(loaded.model, streams_to)
    elif sharing is None and not free_now(request.device).on_gpu:
        from peftkit.quant.layers import keep_copies

        keep_copies(loaded.model)
    checkpoint = published_codes(request.config, settings)
    if checkpoint is not None:
        on_event(Notice(checkpoint.notice))
    return Base(
        model=loaded.model,
        tokenizer=inputs.tokenizer,
        name=location.name,
        hub_id=location.hub_id,
        revision=getattr(loaded.model.config, "_commit_hash", None) or location.revision,
        fingerprint=loaded.fingerprint,
        audit=audit(loaded.model),
        device=streams_to or request.device,
        image_processor=inputs.image_processor,
        head=loaded.head,
        multimodal=inputs.multimodal,
        stored=checkpoint.description if checkpoint is not None else "",
        trunk=loaded.trunk,
    )


def _placed(
    request: BaseRequest, placement: str, may_use_cpu: bool, on_event: Listener
) -> tuple[BaseRequest, torch.device | None]:
    """Return the request for the device that keeps the weights, and the device to stream them to.

    Raises:
        BaseError: The base does not fit, or cannot be streamed.
    """
    device, environment = request.device, free_now(request.device)
    can_stream = is_packed(request.config, request.settings)
    if placement == "stream" and not can_stream:
        raise BaseError(
            "a base that is not packed cannot be streamed.",
            found="base.quantize is none.",
            fix="Set base.quantize to nf4, fp4 or int8, or base.placement: device.",
        )
    if placement == "auto" and environment.on_gpu:
        return _placed_by_size(request, environment, may_use_cpu, on_event)
    if placement == "stream":
        return replace(request, device=CPU, packs_on=device), device
    return request, None


def _placed_by_size(
    request: BaseRequest, environment: Environment, may_use_cpu: bool, on_event: Listener
) -> tuple[BaseRequest, torch.device | None]:
    size = weight_bytes(request.config, request.settings, request.purpose, request.dtype)
    can_stream = environment.kind == "cuda" and is_packed(request.config, request.settings)
    place = place_weights(size, environment.usable, can_stream=lambda: can_stream)
    if not place.fits and may_use_cpu:
        on_event(Notice(f"The base runs on the CPU. {place.notice}"))
        dtype = compute_dtype(request.settings, CPU)
        return replace(request, device=CPU, dtype=dtype), None
    if not place.fits:
        raise BaseError(
            "the base does not fit the GPU.",
            found=place.notice,
            fix="Set base.quantize: nf4 and base.placement: auto; peftkit plan MODEL shows "
            "the longest rows that fit.",
        )
    if place.notice:
        on_event(Notice(place.notice))
    if place.placement == "stream":
        return replace(request, device=CPU, packs_on=request.device), request.device
    return request, None


def find_base(model: str, revision: str | None, on_event: Listener) -> Location:
    """Return the location of a base on this machine or the hub.

    Raises:
        BaseError: The model does not exist, or can neither be read nor downloaded.
        OutputError: The cache, which receives a converted GGUF file, cannot be written.
    """
    location = locate(model, revision)
    if location.convert_to is not None:
        from peftkit.base.gguf import convert

        location = convert(location, on_event)
    return reachable(location)


def processors_of(location: Location, purpose: Purpose, on_event: Listener) -> Processors:
    if purpose.processor == "tokenizer":
        return Processors(load_tokenizer(location, on_event))
    from peftkit.base.processors import load_processors

    return load_processors(location, purpose.processor, on_event)


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """Return the local folder with a base's config and safetensors; None if there is none.

    Raises:
        BaseError: The model does not exist.
    """
    location = locate(model, revision)
    return None if location.gguf else files_of(location)
