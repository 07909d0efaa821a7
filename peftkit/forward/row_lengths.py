"""Models whose numbers depend on the length of a batch, and how a row keeps its own.

transformers chooses the frequencies of RoPE for the longest row of a forward pass, if their type is
`longrope` (Phi-3, LongRoPE, arXiv 2402.13753) or `dynamic` (NTK). Here each document of a batch has
the frequencies that it has alone: the rotary module runs once for each kind of length, and each
token takes the result for its document. The state that earlier, longer rows left in a module with
dynamic frequencies is reset.

Llama 4 scales queries by the logarithm of their place in a row, in steps of `floor_scale` tokens.
In a sequence of several documents a place is not a position, so such a sequence must be shorter.

Shapes: B rows, T tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LIMIT = "_peftkit_limit"
"""Attribute of a rotary module: see `Limits.document`."""
LENGTHS = "_peftkit_lengths"
"""Attribute of a rotary module: the length of the document of each token (B, 1 or T), or None."""


def context_length(config: Any) -> int | None:
    """Return a model's maximum context length in tokens; None: its config has no limit."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")  # the latter is MPT's
    limit = next((getattr(text, name) for name in names if hasattr(text, name)), None)
    return None if limit is None or limit < 1 else int(limit)  # XLNet's is -1


class Limits(NamedTuple):
    """Lengths in tokens up to which rows of any length may share a sequence; None: no limit.

    Attributes:
        document: Of a document; longer ones have other frequencies.
        sequence: Of a sequence with several documents.
        packed: Of a packed row, whose documents transformers isolates: it counts chunks of
            attention from the row's first token.
    """

    document: int | None = None
    sequence: int | None = None
    packed: int | None = None

    def allow(self, longest: int, sequence: int) -> bool:
        """Return whether documents up to a length may share a sequence of a length."""
        pairs = ((longest, self.document), (sequence, self.sequence))
        return all(limit is None or length <= limit for length, limit in pairs)

    @property
    def batch(self) -> int | None:
        """The length of a padded batch up to which its rows generate what they generate alone."""
        return _lowest(self.document, self.sequence)


def limits_of(model: nn.Module) -> Limits:
    """Return the limits of a model's documents and sequences."""
    ropes = [limit for module in model.modules() for limit in _rope_limits(module).values()]
    modules: list[Any] = list(model.modules())
    scales = [
        int(module.floor_scale) - 1  # the first place with another scale
        for module in modules
        if getattr(module, "attn_temperature_tuning", None) and hasattr(module, "floor_scale")
    ]
    config: Any = getattr(model, "config", None)
    text = None if config is None else config.get_text_config()
    is_chunked = "chunked_attention" in (getattr(text, "layer_types", None) or ())
    chunk = getattr(text, "attention_chunk_size", None) if is_chunked else None
    return Limits(_lowest(*ropes), _lowest(*scales), _lowest(*scales, chunk))


def _lowest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def keep_lengths_apart(model: nn.Module) -> None:
    """Have each document of later forward passes use the RoPE frequencies of its own length.

    Lengths are read from position_ids, which restart at each document, and from attention_mask. A
    model whose frequencies are constant is not changed.
    """
    for owner in model.modules():
        ropes = [child for child in owner.children() if _rope_limits(child)]
        for rope in ropes:
            if LENGTHS not in vars(rope):
                setattr(rope, LENGTHS, None)
                owner.register_forward_pre_hook(_note_lengths, with_kwargs=True)
                rope.register_forward_hook(_by_length, with_kwargs=True)


def _rope_limits(module: Any) -> dict[str | None, int]:
    """Return up to which length a rotary module's frequencies are constant, by layer type."""
    rope: Any = getattr(getattr(module, "config", None), "rope_parameters", None)
    is_rope = any(name.endswith("inv_freq") for name in module._buffers)
    if not isinstance(rope, Mapping) or not is_rope:
        return {}
    kinds = {name: one for name, one in rope.items() if isinstance(one, Mapping)} or {None: rope}
    found: dict[str | None, int] = {}
    for name, one in kinds.items():
        if one.get("rope_type") in ("longrope", "dynamic"):
            longest = module.config.max_position_embeddings
            is_long = one["rope_type"] == "longrope"
            own = one.get("original_max_position_embeddings") if is_long else None
            found[name] = int(own or getattr(module, "original_max_seq_len", longest))
    return found


def _note_lengths(owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Store the length of each document of a forward pass in the owner's rotary modules."""
    lengths = _lengths(kwargs.get("position_ids"), kwargs.get("attention_mask"))
    for rope in owner.children():
        if LENGTHS in vars(rope):
            setattr(rope, LENGTHS, lengths)


def _lengths(positions: Tensor | None, mask: Any) -> Tensor | None:
    """Return the length of the document of each token, (B, T) or (B, 1); None: unknown."""
    mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    is_by_row = positions is not None and positions.dim() == 2
    if positions is None or not is_by_row or (mask is not None and len(positions) != len(mask)):
        return None if mask is None else mask.sum(1, keepdim=True)
    document = (positions == 0).cumsum(1)  # from 0 if a cache holds the beginning
    if mask is not None and mask.shape == positions.shape:  # padding has no length
        positions = positions.where(mask != 0, 0)
    longest = positions.new_zeros(positions.shape[0], positions.shape[1] + 1)
    return longest.scatter_reduce(1, document, positions, "amax").gather(1, document) + 1


def _by_length(rope: Any, args: tuple[Any, ...], kwargs: dict[str, object], output: Any) -> Any:
    """Return the cosines and sines (B, T, D) of a batch, each token's for its document's length."""
    named = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
    lengths, kind = getattr(rope, LENGTHS), named.get("layer_type")
    limit, positions = _rope_limits(rope).get(kind), named["position_ids"]
    if lengths is None or limit is None or positions.dim() != 2:
        return output
    rest = {} if kind is None else {"layer_type": kind}

    def computed(length: int, most: int | None) -> Sequence[Tensor]:
        """Return the module's result for positions up to `most`, as in a row of some length."""
        last = positions.new_full((len(positions), 1), length - 1)
        forward = type(rope).forward
        forward(rope, named["x"], torch.zeros_like(last), **rest)  # resets dynamic frequencies
        own = positions if most is None else positions.clamp(max=most)
        row = torch.cat([own, last], 1)
        return [t[:, :-1] for t in forward(rope, named["x"], row, **rest)]

    result = computed(limit, limit - 1)
    parameters = rope.config.rope_parameters
    if (parameters if kind is None else parameters[kind])["rope_type"] == "longrope":
        longer = [(lengths > limit, computed(limit + 1, None))]  # no wait for the device
    else:
        several = lengths[lengths > limit].unique().tolist()
        longer = [(lengths == length, computed(length, length - 1)) for length in several]
    for chosen, other in longer:
        result = [torch.where(chosen[..., None], b, a) for a, b in zip(result, other, strict=True)]
    return tuple(result)
