"""The frozen base: found, loaded, quantised if asked, fingerprinted."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import transformers
from torch import nn

from peftkit.audit import Audit, audit
from peftkit.config import Config
from peftkit.errors import BaseError
from peftkit.events import Listener, Notice, Stage, ignore
from peftkit.kernels.packed import keep_copies
from peftkit.quant import adopt_bitsandbytes, quantize_model
from peftkit.sources import Source, locate, not_found, quiet, read_gguf

MODEL_CLASSES: dict[str, Any] = {"causal_lm": transformers.AutoModelForCausalLM}
"""Task to the class that loads its models."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SAMPLES = 64
"""Values of each tensor that the fingerprint reads."""
VOLATILE = {"_name_or_path", "name_or_path", "dtype", "torch_dtype", "transformers_version"} | {
    "use_cache", "quantization_config", "_attn_implementation", "_experts_implementation"
}  # fmt: skip
"""Config entries that say how a model is stored or run, not what it is."""


class BaseConfig(Config):
    """The frozen model."""

    model: str
    """Hub id, folder, .gguf file, or a short name: smollm2-135m."""
    revision: str | None = None
    """Commit, tag or branch of a hub id."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Precision of computing, and of the weights that are not quantised. auto: bf16 on GPUs and CPUs
    that are fast in it, fp16 on older GPUs, else fp32."""
    quantize: Literal["none", "nf4", "fp4", "int8"] = "none"
    """Keep the linear layers' weights in 4 or 8 bits."""
    double_quant: bool = True
    """Quantise the scales of 4-bit weights too: 4.13 bits a value, not 4.5."""


@dataclass(frozen=True, slots=True)
class Base:
    """A frozen model, ready to carry an adapter.

    Attributes:
        model: In eval mode; nothing in it requires a gradient.
        tokenizer: Its own; it has a pad token.
        name: As it was asked for.
        revision: The hub's commit, where it comes from the hub.
        fingerprint: Of config and weights, the same in every dtype and quantisation.
        audit: What its weights really are.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str | None
    fingerprint: str
    audit: Audit
    device: torch.device


def load_base(
    model: str,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    quantize: str = "none",
    double_quant: bool = True,
    task: str = "causal_lm",
    device: torch.device | str | None = None,
    on_event: Listener = ignore,
) -> Base:
    """Load a base model and freeze it; arguments as the fields of `BaseConfig`.

    Args:
        device: By default the GPU if there is one.

    Raises:
        BaseError: It cannot be found, read, or quantised; or its file lacks weights.
    """
    on_event(Stage(f"Loading the base {model}"))
    target = torch.device(device) if device is not None else default_device()
    compute_dtype = DTYPES.get(dtype) or fast_dtype(target)
    source = locate(model, on_event)
    loaded, tokenizer = _load(model, source, revision, compute_dtype, task, on_event)
    _ensure_pad_token(tokenizer, model)
    loaded.requires_grad_(False)
    loaded.eval()
    identity = fingerprint(loaded)
    adopt_bitsandbytes(loaded, compute_dtype)
    if quantize != "none":
        # layer by layer, so that the 16-bit model never lies on the GPU whole
        quantize_model(
            loaded,
            quantize,
            double_quant=double_quant,
            compute_dtype=compute_dtype,
            device=target,
            on_event=on_event,
        )
    loaded.to(target)
    if target.type == "cpu" and quantize != "none":
        keep_copies(loaded)
    commit = getattr(loaded.config, "_commit_hash", None)
    return Base(loaded, tokenizer, model, commit, identity, audit(loaded), target)


def skeleton(model: str, *, revision: str | None = None, task: str = "causal_lm") -> nn.Module:
    """Build a base's modules without its weights, on the meta device.

    Raises:
        BaseError: It cannot be found.
    """
    source = locate(model, ignore)
    if source.gguf is not None:
        return read_gguf(source, torch.float32)[0].to("meta")
    try:
        with quiet(), torch.device("meta"):
            config = transformers.AutoConfig.from_pretrained(source.where, revision=revision)
            return MODEL_CLASSES[task].from_config(config)
    except (OSError, ValueError) as problem:
        raise not_found(model, problem) from problem


def _load(
    name: str,
    source: Source,
    revision: str | None,
    dtype: torch.dtype,
    task: str,
    on_event: Listener,
) -> tuple[Any, Any]:
    if source.gguf is not None:
        return read_gguf(source, dtype)
    try:
        with quiet():
            model, info = MODEL_CLASSES[task].from_pretrained(
                source.where, revision=revision, dtype=dtype, output_loading_info=True
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(source.where, revision=revision)
    except (OSError, ValueError, KeyError, ImportError) as problem:
        raise not_found(name, problem) from problem
    lacking = [*info.get("missing_keys", ()), *map(str, info.get("mismatched_keys", ()))]
    if lacking:
        raise BaseError(
            f"the files of {name} do not hold all weights of {type(model).__name__}",
            found=f"{len(lacking)} missing or misshapen: {', '.join(sorted(lacking)[:5])}",
            fix="They would be random numbers. Get the files again, or another base.",
        )
    if unused := sorted(info.get("unexpected_keys", ())):
        on_event(
            Notice(
                f"{name} holds {len(unused)} tensors that {type(model).__name__} does not use: "
                f"{', '.join(unused[:3])}"
            )
        )
    return model, tokenizer


def _ensure_pad_token(tokenizer: Any, name: str) -> None:
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token_id is None:
        raise BaseError(
            f"the tokenizer of {name} has neither a pad nor an end token",
            fix="Set pad_token or eos_token in its tokenizer_config.json.",
        )
    # padding is masked by position, never by id, so sharing the end token harms nothing
    tokenizer.pad_token = tokenizer.eos_token


def default_device() -> torch.device:
    """Return this process's GPU, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return the narrowest dtype that a device multiplies fast and trains well in."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if has_fast_bf16() else torch.float32


@cache
def has_fast_bf16() -> bool:
    """Whether this CPU has bf16 products of its own; without them bf16 is slower than fp32."""
    cpu = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def fingerprint(model: nn.Module) -> str:
    """Return "sha256:..." over a model's config and a fixed sample of every tensor.

    Values are rounded to bfloat16 first, so that every dtype of loading gives the same. To be taken
    before quantising.
    """
    digest = hashlib.sha256()
    config = getattr(model, "config", None)
    if config is not None:
        entries = {k: v for k, v in config.to_dict().items() if k not in VOLATILE}
        digest.update(json.dumps(entries, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        count = min(SAMPLES, flat.numel())
        at = torch.arange(count, device=flat.device) * (flat.numel() - 1) // max(count - 1, 1)
        sample = flat[at].to(torch.bfloat16)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sample.cpu().view(torch.int16).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"
