"""The frozen base: found, loaded, fingerprinted, quantised if asked, and audited."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from peftkit.base import pretrained
from peftkit.base.class_head import head_of_classes, owners
from peftkit.base.fingerprint import fingerprint
from peftkit.base.locate import Location, locate
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.config.schema import Config, from_dict
from peftkit.events import Listener, Stage, ignore
from peftkit.kernels.packed import keep_copies
from peftkit.quant.audit import Audit, audit
from peftkit.quant.quantize import adopt_bitsandbytes, quantize_model

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class BaseConfig(Config):
    """Which base model, and how it is held in memory."""

    model: str
    """Folder, GGUF file, hub id, or a short name (smollm2-135m, all-minilm-l6-v2)."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of all computing and of what is not quantised; auto: the machine's fastest."""
    quantize: Literal["none", "nf4", "fp4", "int8"] = "none"
    """Keep the weights of linear layers in 4 or 8 bits."""
    double_quant: bool = True
    """Quantise the scales of nf4 and fp4 as well: 4.1 bits for a weight instead of 4.5."""
    new_tokens: tuple[str, ...] = ()
    """Tokens to add; their rows in the embedding and the head are trained beside the method."""


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

    @property
    def processor(self) -> Any:
        """What makes its inputs."""
        return self.image_processor or self.tokenizer


def load_base(
    model: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    quantize: str = "none",
    double_quant: bool = True,
    purpose: Purpose = CAUSAL_LM,
    device: torch.device | str | None = None,
    on_event: Listener = ignore,
) -> Base:
    """Load a base model to put an adapter on.

    Args:
        model: Folder, GGUF file, hub id or short name.
        revision: Branch, tag or commit on the hub.
        dtype: "bf16", "fp16", "fp32", or "auto": bf16 where this machine is fast at it.
        quantize: "none", "nf4", "fp4" or "int8"; layer by layer, so that the device never holds
            more than one in 16 bits. On a CPU with memory to spare the dequantised weights are
            kept beside, for speed. A checkpoint that is quantised already stays as it is.
        double_quant: Quantise the scales of nf4 and fp4 as well.
        purpose: What the model is for, as a task says it: its class, and its head of classes.
        device: By default a GPU where there is one.

    Raises:
        BaseError: There is no such model, its files are damaged or incomplete, or it could not be
            quantised as asked.
        ConfigError: dtype or quantize is none of these.
    """
    asked = {"model": model, "dtype": dtype, "quantize": quantize, "double_quant": double_quant}
    from_dict(BaseConfig, asked, "load_base(...)")
    place = _default_device() if device is None else torch.device(device)
    wanted = DTYPES.get(dtype) or fast_dtype(place)
    location = pretrained.convert(locate(model, revision), on_event)
    location, revision = pretrained.reachable(location, revision)
    on_event(Stage(f"Loading the base {location.name}"))
    pretrained.check_config(location, revision, purpose)
    tokenizer, images = _processors(location, revision, purpose, on_event)
    loaded, fresh = pretrained.load_model(location, revision, purpose, wanted, on_event)
    loaded.requires_grad_(False).eval()
    if purpose.head is not None and tokenizer is not None:
        _say_padding(loaded.config.get_text_config(), tokenizer)
    adopt_bitsandbytes(loaded, wanted)
    pretrained.forget_quantization(loaded)
    identity = fingerprint(loaded, without=fresh)
    pretrained.cast(loaded, wanted)
    head = _trained_head(loaded, fresh) if purpose.head else ()
    if quantize != "none":
        quantize_model(
            loaded,
            quantize,
            double_quant=double_quant,
            device=place,
            keep=head,
            on_event=on_event,
        )
    loaded.to(place)
    if place.type == "cpu":
        keep_copies(loaded)
    return Base(
        model=loaded,
        tokenizer=tokenizer,
        name=location.name,
        hub_id=location.hub_id,
        revision=getattr(loaded.config, "_commit_hash", None) or revision,
        fingerprint=identity,
        audit=audit(loaded),
        device=place,
        image_processor=images,
        head=head,
    )


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
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(False) else torch.float16
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    has_bf16 = flags & {"avx512_bf16", "amx_bf16", "bf16"}  # without them it is slower than fp32
    return torch.bfloat16 if has_bf16 and device.type == "cpu" else torch.float32


def _processors(
    location: Location, revision: str | None, purpose: Purpose, on_event: Listener
) -> tuple[Any, Any]:
    """Return the tokenizer and the image processor; None for the one that is not needed."""
    if purpose.processor == "tokenizer":
        return pretrained.load_tokenizer(location, revision, on_event), None
    return None, pretrained.load_image_processor(location, revision)


def _say_padding(config: Any, tokenizer: Any) -> None:
    """Let a decoder know where a text ends: its head of classes reads the last token."""
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id


def _trained_head(model: Any, fresh: tuple[str, ...]) -> tuple[str, ...]:
    head = head_of_classes(model)
    return tuple(dict.fromkeys((*owners(fresh, head).values(), *head)))


def _default_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))  # one GPU for each process
