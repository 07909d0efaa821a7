"""Group norms over the time of an audio clip, without the padding after it.

wav2vec2-base, HuBERT and WavLM normalise each channel over all frames of a batch's longest clip
(`feat_extract_norm: group`), and read padding as audio. Here the statistics of a clip are those of
its own frames, as if it were alone.

Shapes: B clips, C channels, T frames, G groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LENGTHS = "_peftkit_samples"
"""Attribute of a norm: the samples of each clip (B,) of the current forward pass, or None."""


def keep_padding_out(model: nn.Module) -> bool:
    """Have norms of later forward passes read each clip without its padding.

    The model must read samples, and their attention_mask must be passed.

    Returns:
        Whether the model has such norms.
    """
    norms: list[tuple[nn.Module, Any]] = [
        (owner, norm)
        for owner in model.modules()
        for norm in owner.children()
        if isinstance(norm, nn.GroupNorm) and _conv_of(owner) is not None
    ]
    if not norms or getattr(model, "main_input_name", "") != "input_values":
        return False

    if not any(LENGTHS in vars(norm) for _, norm in norms):
        model.register_forward_pre_hook(_note_samples, with_kwargs=True)
        for owner, norm in norms:
            setattr(norm, LENGTHS, None)
            conv = _conv_of(owner)
            assert conv is not None
            norm._peftkit_conv = conv.kernel_size[0], conv.stride[0]
            norm.register_forward_hook(_normalised)
    return True


def _note_samples(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask")
    for module in model.modules():
        if LENGTHS in vars(module):
            setattr(module, LENGTHS, None if mask is None else mask.sum(-1))


def _conv_of(owner: nn.Module) -> nn.Conv1d | None:
    return next((child for child in owner.children() if isinstance(child, nn.Conv1d)), None)


def _normalised(norm: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Return the normalised frames (B, C, T); those of padding have no meaning."""
    samples, (x,) = getattr(norm, LENGTHS), args
    if samples is None or len(x) == 1 or len(x) != len(samples):
        return output
    kernel, stride = norm._peftkit_conv
    frames = (samples - kernel).div(stride, rounding_mode="floor") + 1
    is_clip = torch.arange(x.shape[-1], device=x.device) < frames[:, None]  # (B, T)
    grouped = x.float().view(len(x), norm.num_groups, -1, x.shape[-1])  # (B, G, C / G, T)
    mask = is_clip[:, None, None]
    count = (frames * grouped.shape[2]).clamp(min=1)[:, None, None, None]
    mean = (grouped * mask).sum((2, 3), keepdim=True) / count
    centred = grouped - mean
    variance = (centred.square() * mask).sum((2, 3), keepdim=True) / count
    result = (centred * (variance + norm.eps).rsqrt()).reshape(x.shape)
    if norm.affine:
        result = result * norm.weight.float()[:, None] + norm.bias.float()[:, None]
    return result.to(output.dtype)
