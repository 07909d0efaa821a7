"""The frozen base: found, opened or built, fingerprinted, quantised if requested, and audited.

`load_base` is for callers from outside, `open_base` for runs. The cache keeps a large packed base
(store.py), and one that several processes open together (sharding.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peftkit.base.locate import Location, locate
from peftkit.base.pretrained import (
    Processors,
    files_of,
    load_tokenizer,
    oom_as_error,
    published_codes,
    reachable,
)
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.base.request import compute_dtype, place_of_weights, request_of
from peftkit.config.schema import from_dict
from peftkit.events import Listener, Notice, Stage, ignore
from peftkit.execution.environment import as_current, default_device, free_now
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
        tokenizer: Its tokenizer, which has a pad token; None for a model of images.
        name: What loads it again: short name or hub id as given, or an absolute path.
        hub_id: What other tools find it by: of a short name its hub id; of a folder None.
        revision: Commit on the hub, or None.
        fingerprint: Of config and weights as they were before quantising.
        trunk: The same without any head; "" if unknown.
        audit: How every parameter is stored.
        device: Where the model computes.
        image_processor: What makes its inputs, if these are images.
        multimodal: What makes its inputs, if these are images and text.
        stored: The format of its files ("awq, 4 bits, groups of 128") where their bits are kept.
        head: Paths of the modules of its head, if it was loaded with one: they are trained fully.
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
        """What makes its inputs."""
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
    """Load a base model to put an adapter on.

    Args:
        model: Folder, GGUF file, hub id or short name.
        revision: Branch, tag or commit on the hub.
        dtype: "bf16", "fp16", "fp32", or "auto": bf16 where this machine is fast at it.
        quantize: "none", "nf4", "fp4" or "int8"; weight by weight as they are loaded, so that
            no more than one is held in 16 bits. On a CPU with memory to spare the dequantised
            weights are kept as well, for speed. "none" keeps what the files hold: 16 or 32 bits, or
            the codes of a quantised checkpoint.
        double_quant: Quantise the scales of nf4 and fp4 as well.
        quantize_towers: Quantise towers for images and sound too, and their projectors.
        quantize_embeddings: As `quantize`, of the embedding of tokens and the output layer.
        purpose: The task's model class, inputs and head.
        device: By default a GPU where there is one, and the CPU for a base that it does not hold
            and that cannot be streamed.
        placement: "device"; "stream": packed weights wait in main memory, and two blocks at a time
            are on the device; "auto": streamed where a packed base does not fit a GPU.
        store: "auto": open the packed base that the cache keeps, and keep a large one there;
            "off": neither.
        sharing: Processes that load it together into main memory, each to keep a part: weights are
            then pages of files, which take memory only where they are read.

    Raises:
        BaseError: There is no such model, its files are damaged or incomplete, it could not be
            quantised, or does not fit into memory.
        ConfigError: dtype, quantize, placement or store is none of these.
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
    compute = default_device() if device is None else as_current(torch.device(device))
    return _open(
        settings,
        purpose,
        settings.placement,
        compute,
        may_use_cpu=device is None,
        sharing=sharing,
        on_event=on_event,
    )


def open_base(
    settings: BaseConfig,
    purpose: Purpose,
    plan: ExecutionPlan,
    *,
    world: World | None = None,
    on_event: Listener = ignore,
) -> Base:
    """Load the base of a recipe where its plan places it, and show how its weights are stored.

    Args:
        world: The processes of the run, which load a base together if the plan shards it.

    Raises:
        BaseError: As `load_base`.
    """
    base = _open(
        settings,
        purpose,
        plan.placement,
        default_device(),
        may_use_cpu=True,
        sharing=world if plan.is_sharded else None,
        on_event=on_event,
    )
    on_event(base.audit.table())
    return base


def _open(
    settings: BaseConfig,
    purpose: Purpose,
    placement: str,
    device: torch.device,
    *,
    may_use_cpu: bool,
    sharing: World | None,
    on_event: Listener,
) -> Base:
    """Load a base for a device, or for processes that share it in main memory."""
    is_shared = sharing is not None
    location = find_base(settings.model, settings.revision, on_event)
    on_event(Stage(f"Loading the base {location.name}"))
    with _parsed_once(location), oom_as_error(location.name):
        inputs = _load_processors(location, purpose, on_event)
        dtype = compute_dtype(settings, device)
        request = request_of(settings, purpose, location, CPU if is_shared else device, dtype)
        request = request.with_tokens_of(inputs.tokenizer)
        may_use_cpu = may_use_cpu and not is_shared
        weights = place_of_weights(request, placement, may_use_cpu=may_use_cpu)
        if weights.notice:
            on_event(Notice(weights.notice))
        if weights.streamed:
            request = replace(request, device=CPU)
        elif weights.device != request.device:
            dtype = compute_dtype(settings, weights.device)
            request = replace(request, device=weights.device, dtype=dtype)
        if sharing is None:
            from peftkit.base.store import open_or_build

            loaded = open_or_build(request, on_event)  # below 500 MB: built in memory
        else:
            from peftkit.base.sharding import open_together

            loaded = open_together(request, sharing, on_event)
    if weights.streamed:
        from peftkit.base.streaming import BlockStream

        BlockStream(loaded.model, weights.device)
    elif not is_shared and not free_now(weights.device).on_gpu:
        from peftkit.quant.copies import keep_copies

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
        device=weights.device,
        image_processor=inputs.image_processor,
        head=loaded.head,
        multimodal=inputs.multimodal,
        stored=checkpoint.description if checkpoint is not None else "",
        trunk=loaded.trunk,
    )


def find_base(model: str, revision: str | None, on_event: Listener) -> Location:
    """Return where a base can be loaded from now.

    Raises:
        BaseError: There is no such model, or it can neither be read nor fetched.
        OutputError: The cache, where a package's GGUF file is converted, cannot be written.
    """
    location = locate(model, revision)
    if location.convert_to is not None:
        from peftkit.base.gguf import convert

        location = convert(location, on_event)
    return reachable(location)


def _parsed_once(location: Location) -> AbstractContextManager[None]:
    """Return a context in which a GGUF file, if the base is one, is parsed only once."""
    if not location.gguf:
        return nullcontext()
    from peftkit.base.gguf_file import parsed_once

    return parsed_once(location)


def _load_processors(location: Location, purpose: Purpose, on_event: Listener) -> Processors:
    """Load the tokenizer, or the processors that a task's inputs need."""
    if purpose.processor == "tokenizer":
        return Processors(load_tokenizer(location, on_event))
    from peftkit.base.processors import load_processors

    return load_processors(location, purpose.processor, on_event)


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """Return the folder with a base's config and safetensors, if it has one on this machine.

    Raises:
        BaseError: There is no such model.
    """
    location = locate(model, revision)
    return None if location.gguf else files_of(location)
