"""KERNELS, the table of attention implementations; the first that takes a call computes it.

`varlen` computes packed sequences on a GPU, `grouped` short rows and capped scores by plain
products, `sinks` attention sinks (gpt-oss), also by plain products, and `sdpa` all other calls.

Shapes: B rows, H heads, L queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from peftkit.forward.attention_trials import TRIALS
from peftkit.kernels import varlen
from peftkit.kernels.attention import grouped_attention, is_short
from peftkit.kernels.device import is_before_ampere
from peftkit.kernels.varlen import Spans, spans_attention

PLAIN = {
    *("position_ids", "use_cache", "output_router_logits", "output_attentions"),
    "sliding_window",  # the mask includes it, as for SDPA
}
"""Arguments that do not change attention's result; transformers handles calls with others."""


class Call(NamedTuple):
    """A layer's call of attention.

    Attributes:
        query: (B, H, L, D). key, value: (B, K, S, D). mask: Mask of transformers, or None.
        is_causal: Without a mask: whether query i sees keys up to i only.
        stated_causal: The model's argument `is_causal`, for SDPA.
        layout: Layout of documents without a mask.
        more: The model's other arguments.
        grouped: Whether the plan uses plain products for short rows.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    scale: float
    is_causal: bool
    stated_causal: bool | None
    position_bias: Tensor | None
    softcap: float | None
    layout: Spans | None
    more: dict[str, Any]
    grouped: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it has no arguments that only transformers or `sinks` supports."""
        return not ({name for name, value in self.more.items() if value is not None} - PLAIN)


class Kernel(NamedTuple):
    """An entry of the table: `takes` selects calls, `run` returns (B, L, H, D)."""

    name: str
    takes: Callable[[Call], bool]
    run: Callable[[Call], Tensor]


def attend(call: Call) -> Tensor:
    """Return (B, L, H, D) from the first kernel that takes the call."""
    for kernel in KERNELS:
        if kernel.takes(call):
            return kernel.run(call)
    raise AssertionError("the last kernel takes all")


def takes_varlen(call: Call) -> bool:
    """Return whether the call would support documents as spans of a row."""
    has_more = call.dropout or call.position_bias is not None or call.softcap is not None
    is_bare = call.is_plain and not has_more
    return is_bare and varlen.serves(call.query, call.key, call.value)


def _takes_repeated(call: Call) -> bool:
    """Return whether SDPA's only kernel for grouped heads computes the full score matrix.

    GPUs before Ampere have no flash attention, and the memory-efficient kernel requires equal
    numbers of query and key heads.
    """
    grouped = call.query.shape[1] != call.key.shape[1] and call.layout is None
    bare = call.is_plain and call.softcap is None and call.position_bias is None
    return grouped and bare and call.mask is None and is_before_ampere(call.query.device)


def _repeated(call: Call) -> Tensor:
    times = call.query.shape[1] // call.key.shape[1]
    key, value = (t.repeat_interleave(times, 1) for t in (call.key, call.value))
    causal = call.is_causal and call.query.shape[2] > 1
    out = functional.scaled_dot_product_attention(
        call.query, key, value, dropout_p=call.dropout, is_causal=causal, scale=call.scale
    )
    return out.transpose(1, 2)


def _varlen(call: Call) -> Tensor:
    assert isinstance(call.layout, Spans)
    spans = call.layout
    window = call.more.get("sliding_window") if call.is_causal else None
    arrays = call.query, call.key, call.value

    def attend(arrays: Sequence[Tensor], by_cudnn: bool) -> Tensor:
        query, key, value = arrays
        return spans_attention(
            query,
            key,
            value,
            spans,
            is_causal=call.is_causal,
            scale=call.scale,
            window=window,
            by_cudnn=by_cudnn,
        )

    shapes = call.is_causal, tuple(spans.longest.shape), len(spans.queries)
    by_cudnn = varlen.has_cudnn(spans, window)
    return attend(arrays, by_cudnn and TRIALS.prefers_cudnn(call.module, arrays, shapes, attend))


def _takes_grouped(call: Call) -> bool:
    if not call.is_plain or call.softcap is not None:
        return call.is_plain  # SDPA caps no scores
    trains = torch.is_grad_enabled() and call.query.requires_grad
    return call.grouped and trains and not call.dropout and is_short(call.query, call.key)


def _grouped(call: Call) -> Tensor:
    return grouped_attention(
        call.query,
        call.key,
        call.value,
        call.mask,
        call.is_causal and call.query.shape[2] > 1,
        call.scale,
        call.position_bias,
        call.softcap,
        call.more.get("s_aux"),
    ).transpose(1, 2)


def _sinks(call: Call) -> Tensor:
    others = call._replace(more={**call.more, "s_aux": None})
    if call.dropout or call.layout is not None or not others.is_plain:
        raise NotImplementedError(f"sinks with other arguments: {sorted(call.more)}")
    return _grouped(call)


def _sdpa(call: Call) -> Tensor:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    more = dict(call.more, position_bias=call.position_bias, softcap=call.softcap)
    if call.layout is not None:
        raise RuntimeError("only the varlen kernel takes the layout of documents")
    out: Tensor
    out, _ = sdpa_attention_forward(
        call.module,
        call.query,
        call.key,
        call.value,
        call.mask,
        call.dropout,
        call.scale,
        call.stated_causal,
        **more,
    )
    return out


KERNELS = (
    Kernel("sinks", lambda call: call.more.get("s_aux") is not None, _sinks),
    Kernel("varlen", lambda call: isinstance(call.layout, Spans) and takes_varlen(call), _varlen),
    Kernel("grouped", _takes_grouped, _grouped),
    Kernel("sdpa, heads repeated", _takes_repeated, _repeated),
    Kernel("sdpa", lambda call: True, _sdpa),
)
