"""The fingerprint of a model identifies the weights that an adapter was trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 64
"""Sampled values per tensor."""
VOLATILE = {
    *("transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"),
    *("quantization_config", "pad_token_id", "bos_token_id", "eos_token_id"),
    *("id2label", "label2id", "num_labels", "problem_type"),
}
"""Config fields that do not affect the computation; names that start with _ do not either."""


def fingerprint(
    model: nn.Module,
    *,
    without: Collection[str] = (),
    samples: Mapping[int, bytes] | None = None,
) -> str:
    """Return "sha256:..." of a model's config and of a fixed sample of each of its tensors.

    It does not depend on the precision or the device of the model (values are rounded to 8 bits of
    mantissa), but on the weights. Compute it before quantising.

    Args:
        without: Names of tensors to leave out, such as a new head's.
        samples: id(tensor) to its `sample` before it was packed or rounded.
    """
    config = getattr(model, "config", None)
    settings = _settings(config.to_diff_dict() if config is not None else {})
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if name not in without:
            digest.update(f"{name} ".encode())
            before = (samples or {}).get(id(tensor))
            digest.update(sample(tensor) if before is None else before)
    return f"sha256:{digest.hexdigest()}"


def sample(tensor: Tensor) -> bytes:
    """Return the fingerprint's sample of a tensor: its shape and some of its values."""
    positions = sample_positions(tensor.shape, tensor.device)
    return shown(tensor.shape, tensor.detach().reshape(-1)[positions])


def sample_positions(shape: torch.Size, device: torch.device) -> Tensor:
    """Return the positions of the sampled values in the flattened tensor."""
    number = min(SAMPLES, shape.numel())
    return torch.arange(number, device=device) * shape.numel() // max(number, 1)


def shown(shape: torch.Size, values: Tensor) -> bytes:
    """Return the fingerprint's sample of a tensor from the values at its positions."""
    rounded = values.to(torch.bfloat16).cpu().view(torch.int16)
    return f"{tuple(shape)}".encode() + rounded.numpy().tobytes()


def _settings(value: object) -> Any:
    """Return the JSON-serialisable fields of a config that affect the computation."""
    if isinstance(value, Mapping):
        return {
            str(key): _settings(item)
            for key, item in value.items()
            if key not in VOLATILE and not str(key).startswith("_")
        }
    if isinstance(value, list | tuple):
        return [_settings(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
