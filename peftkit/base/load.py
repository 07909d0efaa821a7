"""The frozen base: found, loaded, fingerprinted, quantised if asked, and audited."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peftkit.base.build import convert
from peftkit.base.config import BaseConfig
from peftkit.base.gguf import parsed_once
from peftkit.base.locate import locate
from peftkit.base.packed_bases import Sharing, open_or_build
from peftkit.base.placement import BlockStream, place_of_weights
from peftkit.base.pretrained import files_of, oom_as_error, reachable
from peftkit.base.processors import Processors, load_processors
from peftkit.base.published import described, kept_notice, published
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.base.request import (
    DTYPES,
    BaseRequest,
    LoadedModel,
    StorageFormat,
    fast_dtype,
    request_of,
)
from peftkit.config.schema import from_dict
from peftkit.events import Listener, Notice, Stage, ignore
from peftkit.execution.environment import as_current, default_device, free_now
from peftkit.kernels.packing import keep_copies
from peftkit.quant.audit import Audit, audit


@dataclass(frozen=True, slots=True)
class Base:
    """A frozen model in eval mode, and what is known of it.

    Attributes:
        model: A transformers model; no parameter requires a gradient.
        tokenizer: Its tokenizer, which has a pad token; None for a model of images.
        name: What loads it again: short name or hub id as asked, or an absolute path.
        hub_id: What other tools find it by: of a short name its hub id; of a folder None.
        revision: Commit on the hub, or None.
        fingerprint: Of config and weights as they were before quantising.
        audit: How every parameter is stored.
        device: Where the model is.
        image_processor: What makes its inputs, if these are images.
        multimodal: What makes its inputs, if these are images and text.
        stored: The format of its files ("awq, 4 bits, groups of 128") where their bits are kept.
        head: Paths of the modules of its head, if it was loaded for one: they are trained whole.
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
    sharing: Sharing | None = None,
    on_event: Listener = ignore,
) -> Base:
    """Load a base model to put an adapter on.

    Args:
        model: Folder, GGUF file, hub id or short name.
        revision: Branch, tag or commit on the hub.
        dtype: "bf16", "fp16", "fp32", or "auto": bf16 where this machine is fast at it.
        quantize: "none", "nf4", "fp4" or "int8"; weight by weight as they are loaded, so that
            no more than one is held in 16 bits. On a CPU with memory to spare the dequantised
            weights are kept beside, for speed. "none" keeps what the files hold: 16 or 32 bits, or
            the codes of a quantised checkpoint.
        double_quant: Quantise the scales of nf4 and fp4 as well.
        quantize_towers: Quantise towers for images and sound too, and what joins them to a
            language model.
        quantize_embeddings: As `quantize`, of the embedding of tokens and the output layer.
        purpose: What the model is for, as a task says it: its class, and its head of classes.
        device: By default a GPU where there is one, and the CPU for a base that it does not hold
            and that cannot be streamed.
        placement: "device"; "stream": packed weights wait in main memory, and two blocks at a time
            are on the device; "auto": streamed where a packed base does not fit a GPU.
        store: "auto": open the packed base that the cache keeps, and keep a large one there;
            "off": neither.
        sharing: Processes that load it together, on the CPU, each to keep a part: weights are then
            pages of files, which take memory only where they are read.

    Raises:
        BaseError: There is no such model, its files are damaged or incomplete, it could not be
            quantised as asked, or does not fit into memory.
        ConfigError: dtype, quantize, placement or store is none of these.
    """
    asked = {"model": model, "dtype": dtype, "quantize": quantize, "double_quant": double_quant}
    asked |= {"placement": placement, "store": store, "quantize_embeddings": quantize_embeddings}
    from_dict(BaseConfig, asked, "load_base(...)")
    place = default_device() if device is None else as_current(torch.device(device))
    fast = fast_dtype(place if sharing is None else default_device())
    dense = DTYPES.get(dtype, fast)
    form = StorageFormat(quantize, double_quant, dense, place, quantize_towers, quantize_embeddings)
    location = reachable(convert(locate(model, revision), on_event))
    on_event(Stage(f"Loading the base {location.name}"))
    with parsed_once(location), oom_as_error(location.name):
        inputs = load_processors(location, purpose.processor, on_event)
        wanted = request_of(location, purpose, form).with_tokens_of(inputs.tokenizer)
        may_leave = device is None and sharing is None
        weights = place_of_weights(placement, wanted, may_leave=may_leave)
        if weights.notice:
            on_event(Notice(weights.notice))
        if weights.streamed:
            form = replace(form, device=torch.device("cpu"))
        elif weights.device != place:
            own = DTYPES.get(dtype) or fast_dtype(weights.device)
            form = replace(form, device=weights.device, dtype=own)
        wanted = replace(wanted, form=form)
        built = open_or_build(wanted, store=store, sharing=sharing, on_event=on_event)
    if weights.streamed:
        BlockStream(built.model, weights.device)
    elif sharing is None and not free_now(weights.device).on_gpu:
        keep_copies(built.model)
    return _base(wanted, built, inputs, weights.device, on_event)


def _base(
    wanted: BaseRequest,
    built: LoadedModel,
    inputs: Processors,
    device: torch.device,
    on_event: Listener,
) -> Base:
    """Return a base that is where it stays, with all that is known of it."""
    settings = published(wanted.config) if wanted.form.quantize == "none" else None
    if settings is not None:
        on_event(Notice(kept_notice(settings)))
    location = wanted.location
    return Base(
        model=built.model,
        tokenizer=inputs.tokenizer,
        name=location.name,
        hub_id=location.hub_id,
        revision=getattr(built.model.config, "_commit_hash", None) or location.revision,
        fingerprint=built.fingerprint,
        audit=audit(built.model),
        device=device,
        image_processor=inputs.image_processor,
        head=built.head,
        multimodal=inputs.multimodal,
        stored=described(settings) if settings is not None else "",
    )


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """Return the folder with a base's config and safetensors, if it has one on this machine.

    Raises:
        BaseError: There is no such model.
    """
    location = locate(model, revision)
    return None if location.gguf else files_of(location)
