"""The frozen base: found, loaded, fingerprinted, quantised if asked, and audited."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from peftkit.base import pretrained
from peftkit.base.build import build, convert, pad_with
from peftkit.base.gguf import parsed_once
from peftkit.base.load_shared import Sharing, load_shared
from peftkit.base.locate import Location, locate
from peftkit.base.multimodal import load_multimodal
from peftkit.base.placement import BlockStream, place_of_weights
from peftkit.base.published import described, kept_notice
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.base.quantized import published
from peftkit.base.spill import Spill
from peftkit.base.storage_format import LoadedModel, StorageFormat
from peftkit.base.store import StoreKey, opened_or_kept, storable
from peftkit.config.schema import Config, from_dict
from peftkit.events import Listener, Notice, Stage, ignore
from peftkit.execution.environment import as_current, default_device
from peftkit.kernels.device import gpu_of
from peftkit.kernels.packing import keep_copies
from peftkit.quant.audit import Audit, audit

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class BaseConfig(Config):
    """Which base model, and how it is held in memory."""

    model: str
    """Folder, GGUF file, hub id, or a short name (smollm2-135m, all-minilm-l6-v2)."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """dtype of the computation and of weights that are not quantised; auto: the fastest here."""
    quantize: Literal["none", "nf4", "fp4", "int8"] = "none"
    """Keep the weights of linear layers in 4 or 8 bits. none: as the files have them, which may be
    quantised already (AWQ, GPTQ, compressed-tensors, FP8 and others keep their bits)."""
    double_quant: bool = True
    """Quantise the scales of nf4 and fp4 as well: 4.1 bits for a weight instead of 4.5."""
    quantize_towers: bool = False
    """Quantise the towers for images and sound and their projectors too; by default only the
    language side of such a model is, and these stay in 16 bits."""
    placement: Literal["auto", "device", "stream"] = "auto"
    """Where the quantised weights of blocks stay: on the device, or in main memory, from where two
    blocks at a time are streamed to it. auto: streamed if a quantised base does not fit a GPU."""
    store: Literal["auto", "off"] = "auto"
    """auto: a large base that was quantised once is kept in the cache (PEFTKIT_CACHE) and opened in
    seconds; see peftkit base ls. off: it is quantised at each start."""
    new_tokens: tuple[str, ...] = ()
    """Tokens to add; their rows in the embedding and the head are trained too."""


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
    asked |= {"placement": placement, "store": store}
    from_dict(BaseConfig, asked, "load_base(...)")
    place = default_device() if device is None else as_current(torch.device(device))
    computes = place if sharing is None else default_device()
    computed = DTYPES.get(dtype) or fast_dtype(computes)
    form = StorageFormat(quantize, double_quant, computed, place, quantize_towers)
    location = convert(locate(model, revision), on_event)
    location, revision = pretrained.reachable(location, revision)
    on_event(Stage(f"Loading the base {location.name}"))
    with parsed_once(location), pretrained.oom_as_error(location.name):
        config = pretrained.check_config(location, revision, purpose)
        tokenizer, images, both = _processors(location, revision, purpose, on_event)
        padding = None if tokenizer is None else tokenizer.pad_token_id
        if purpose.head is not None:
            pad_with(config, padding)
            purpose = replace(purpose, head=purpose.head.with_tokens(tokenizer))
        may_leave = device is None and sharing is None
        weights = place_of_weights(placement, config, purpose, form, may_leave=may_leave)
        place = weights.device
        if weights.notice:
            on_event(Notice(weights.notice))
        if weights.streamed:
            form = replace(form, device=torch.device("cpu"))
        elif place != form.device:
            form = replace(form, device=place, dtype=DTYPES.get(dtype) or fast_dtype(place))

        built = _opened_or_built(
            StoreKey(location.name, Path(), purpose, config, form),
            location,
            revision,
            padding,
            store=store,
            sharing=sharing,
            on_event=on_event,
        )
        if (settings := published(config)) is not None and quantize == "none":
            on_event(Notice(kept_notice(settings)))
    if weights.streamed:
        BlockStream(built.model, place)
    elif place.type == "cpu" and sharing is None:
        keep_copies(built.model)
    return Base(
        model=built.model,
        tokenizer=tokenizer,
        name=location.name,
        hub_id=location.hub_id,
        revision=getattr(built.model.config, "_commit_hash", None) or revision,
        fingerprint=built.fingerprint,
        audit=audit(built.model),
        device=place,
        image_processor=images,
        head=built.head,
        multimodal=both,
        stored=described(settings) if settings is not None and quantize == "none" else "",
    )


def _opened_or_built(
    wanted: StoreKey,
    location: Location,
    revision: str | None,
    pad_token_id: int | None,
    *,
    store: str,
    sharing: Sharing | None,
    on_event: Listener,
) -> LoadedModel:
    """Open the packed base that the cache keeps, or build it out of its files.

    Args:
        wanted: Its source is found here.
    """

    def rebuild(spill: Spill | None = None) -> LoadedModel:
        return build(
            location,
            revision,
            wanted.purpose,
            wanted.config,
            wanted.form,
            pad_token_id=pad_token_id,
            spill=spill,
            on_event=on_event,
        )

    source, shared = None, sharing is not None
    if store == "auto":
        source = storable(
            location, revision, wanted.purpose, wanted.config, wanted.form, shared=shared
        )
    if source is None:
        return rebuild()
    wanted = replace(wanted, source=source)
    if sharing is not None:
        return load_shared(wanted, rebuild, sharing, on_event)
    return opened_or_kept(wanted, rebuild, on_event)


def skeleton(model: str, *, revision: str | None = None, purpose: Purpose = CAUSAL_LM) -> nn.Module:
    """Build a model without its weights, on the meta device, out of its config alone.

    Raises:
        BaseError: There is no such model, or its config is of no use.
    """
    location, revision = pretrained.reachable(locate(model, revision), revision)
    return pretrained.build_skeleton(location, revision, purpose)


def local_folder(model: str, revision: str | None = None) -> Path | None:
    """Return the folder with a base's config and safetensors, if it has one on this machine.

    Raises:
        BaseError: There is no such model.
    """
    location = locate(model, revision)
    if not location.is_local:
        return pretrained.snapshot(location, revision)
    return None if location.gguf else Path(location.source)


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return the precision that a device multiplies fastest at: bf16, or what is next to it."""
    if (gpu := gpu_of(device)) is not None:
        return gpu.fast_dtype()
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    has_bf16 = flags & {"avx512_bf16", "amx_bf16", "bf16"}  # without them it is slower than fp32
    return torch.bfloat16 if has_bf16 and device.type == "cpu" else torch.float32


def _processors(
    location: Location, revision: str | None, purpose: Purpose, on_event: Listener
) -> tuple[Any, Any, Any]:
    """Return the tokenizer, the image processor and that of both; None for what is not needed."""
    if purpose.processor == "tokenizer":
        return pretrained.load_tokenizer(location, revision, on_event), None, None
    if purpose.processor == "image_processor":
        return None, pretrained.load_image_processor(location, revision), None
    both = load_multimodal(location, revision)
    return pretrained.with_padding(both.tokenizer, location, on_event), None, both
