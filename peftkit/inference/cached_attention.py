"""Attention over `peftkit.inference.cache`, through transformers' attention interface.

transformers' mask function decides which keys a query sees, from the positions of both. Sliding
windows are therefore respected, and no code depends on an architecture.

Shapes: B rows, H heads of queries, K of keys, G = H / K, T tokens, L keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from peftkit.forward.attention import MaskKind, kind_of, registered, window_of
from peftkit.forward.attention_kernels import PLAIN
from peftkit.forward.compat import cache_name, with_all_methods
from peftkit.inference.cache import Arena, Row, Span, joined, power_of_two
from peftkit.inference.partial_attention import (
    PartialAttention,
    Scores,
    decode_attention,
    full_attention,
    num_parts,
    partial_attention,
)
from peftkit.inference.states import DecodeStates, PassStates, PrefillStates, StateCache


class LayerMask:
    """The mask of one kind of layer in one forward pass, by transformers' mask function.

    Attributes:
        cache: Masks by keys of the forward pass, such as the index of a row.
    """

    def __init__(self, function: Callable[..., Tensor], window: int | None) -> None:
        self._function, self._window = function, window
        self.cache: dict[Any, Tensor] = {}

    @cached_property
    def is_causal(self) -> bool:
        """Whether a query sees all keys up to itself."""
        return kind_of(self._function, self._window) == MaskKind(True, None)

    def __call__(self, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the additive mask for positions of queries and keys, which broadcast."""
        visible = self._function(0, 0, queries, keys) & (keys <= queries)
        return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


class Prefill:
    """A forward pass over the next tokens of some spans.

    Args:
        chunks: The span of each row, and the number of tokens to compute.
        pads_left: Whether shorter rows are padded on the left. Padding on the right would change
            states, and padding on the left only leaves those of an empty span unchanged.

    Attributes:
        spans: The span of each row.
        columns: The columns of each row that are not padding.
        tokens, positions: (B, T); zeros for padding.
        states: The states of the spans.
    """

    def __init__(self, chunks: Sequence[tuple[Span, int]], *, pads_left: bool = False) -> None:
        self._chunks = chunks
        self.spans = [span for span, _ in chunks]
        width = max(size for _, size in chunks)
        starts = [width - size if pads_left else 0 for _, size in chunks]
        self.columns = [
            slice(start, start + size) for start, (_, size) in zip(starts, chunks, strict=True)
        ]
        self.tokens = torch.zeros(len(chunks), width, dtype=torch.long)
        self.positions = torch.zeros_like(self.tokens)
        for row, ((span, size), at) in enumerate(zip(chunks, self.columns, strict=True)):
            new = span.tokens[span.filled : span.filled + size]
            self.tokens[row, at] = torch.tensor(new)
            self.positions[row, at] = torch.arange(span.end, span.end + size)
        self.states: PassStates = PrefillStates([span.states for span in self.spans])

    @property
    def mask(self) -> Tensor | None:
        """The tokens that are not padding, (B, T), if some rows are padded on the left."""
        if not any(columns.start for columns in self.columns):
            return None
        mask = torch.zeros_like(self.tokens)
        for row, columns in enumerate(self.columns):
            mask[row, columns] = 1
        return mask

    def advance(self) -> None:
        """Note that the tokens are in the cache."""
        for span, size in self._chunks:
            span.filled += size

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for row, ((span, _), at) in enumerate(zip(self._chunks, self.columns, strict=True)):
            span.write(layer, keys[row : row + 1, :, at], values[row : row + 1, :, at])

    def attend(self, layer: int, query: Tensor, layer_mask: LayerMask, scores: Scores) -> Tensor:
        out = query.new_zeros((*query.shape[:3], self._chunks[0][0].layers[layer][1].shape[-1]))
        for row, (span, size) in enumerate(self._chunks):
            spans = [span] if span.base is None else [span.base, span]
            lengths = [*(before.filled for before in spans[:-1]), span.filled + size]
            keys, values = joined(spans, layer, lengths)
            q, mask = query[row : row + 1, :, self.columns[row]], None
            if keys.shape[2] > size or not (layer_mask.is_causal and scores.are_plain):
                if row not in layer_mask.cache:
                    positions = torch.arange(keys.shape[2], device=q.device)
                    layer_mask.cache[row] = layer_mask(positions[-size:, None], positions, q.dtype)
                mask = layer_mask.cache[row]
            out[row, :, self.columns[row]] = full_attention(
                q.contiguous(), keys, values, mask, scores
            )[0]
        return out


class Pass(Protocol):
    """A forward pass, of which `CachedAttention` computes the attention.

    Attributes:
        tokens, positions: (B, T).
        mask: The tokens that are not padding (B, T); None: all.
    """

    states: PassStates
    tokens: Tensor

    @property
    def positions(self) -> Tensor: ...

    @property
    def mask(self) -> Tensor | None: ...

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store a layer's new keys and values (B, K, T, D)."""

    def attend(self, layer: int, query: Tensor, layer_mask: LayerMask, scores: Scores) -> Tensor:
        """Return the attention (B, H, T, D) of queries over a layer's stored keys."""


class Block(NamedTuple):
    """The slots of an arena in a decoding step: see `Decode`."""

    arena: Arena
    num_slots: int
    length: int | None = None


def readers_of(rows: Sequence[Row | None], *, is_padded: bool = False) -> dict[Span, list[int]]:
    """Return the prefixes that rows read in place, with the indices of these rows.

    Args:
        is_padded: Whether to repeat an index up to a power of two. Repetitions compute the same,
            and fewer numbers of readers need fewer CUDA graphs.
    """
    readers: dict[Span, list[int]] = {}
    for index, row in enumerate(rows):
        if row is not None and row.base is not None:
            readers.setdefault(row.base, []).append(index)
    if is_padded:
        for at in readers.values():
            at += at[:1] * (power_of_two(len(at)) - len(at))
    return readers


class Decode:
    """Forward passes over one token per row, for a fixed set of rows.

    Args:
        blocks: Arenas, the number of their first slots to compute, and the tokens of each slot to
            read; None: the length of the longest row. A given length makes shapes independent of
            the rows, and other rows can use the same CUDA graph. It fits rows whose `readers_of`
            are the same prefixes, with the same padded numbers.

    Attributes:
        rows: The rows of the batch: arena by arena, slot by slot; None: an empty slot.
        states: The states of the slots.
        tokens: The next input tokens, (B, 1).
        prefixes: The prefixes that rows read in place, with the indices of these rows.
    """

    mask = None

    def __init__(self, blocks: Sequence[Block], device: torch.device) -> None:
        self.device = device
        ends = [0, *accumulate(block.num_slots for block in blocks)]
        self._blocks = [
            (block, slice(begin, end))
            for block, begin, end in zip(blocks, ends, ends[1:], strict=False)
        ]
        slots = [slot for block in blocks for slot in range(block.num_slots)]
        self._slots = torch.tensor(slots, device=device)
        self._numbers = torch.zeros(3, len(slots), dtype=torch.long, device=device)
        self._lengths, self._starts = self._numbers[0], self._numbers[1]
        self.tokens = self._numbers[2, :, None]
        self._is_static = all(block.length is not None for block in blocks)
        self.prefixes: dict[Span, Tensor] = {}
        self.states: PassStates = DecodeStates(
            [(block.arena.states, block.num_slots) for block in blocks]
        )
        self.fill()

    def fill(self) -> None:
        """Read the current rows of the slots."""
        self.rows: list[Row | None] = []
        for block, _ in self._blocks:
            rows = block.arena.rows
            self.rows += [*rows, *[None] * (block.num_slots - len(rows))]
        numbers = [(0, 0, 0) if row is None else row.numbers for row in self.rows]
        self._numbers.copy_(torch.tensor(numbers).t())
        for span, readers in readers_of(self.rows, is_padded=self._is_static).items():
            if span not in self.prefixes:
                self.prefixes[span] = self._slots.new_empty(len(readers))
            self.prefixes[span].copy_(torch.tensor(readers))

    @property
    def arenas(self) -> list[Arena]:
        return [block.arena for block, _ in self._blocks]

    @property
    def positions(self) -> Tensor:
        """Positions (B, 1) of `tokens`."""
        return (self._starts + self._lengths)[:, None]

    @property
    def has_room(self) -> bool:
        """Whether each row's slot has room for the next token."""
        return all(
            row.length < (block.arena.capacity if block.length is None else block.length)
            for block, _ in self._blocks
            for row in block.arena.rows
        )

    def advance(self, tokens: Tensor) -> None:
        """Continue with the next tokens, (B, 1)."""
        self.tokens.copy_(tokens)
        self._lengths += 1
        for row in self.rows:
            if row is not None:
                row.length += 1

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        for block, at in self._blocks:
            block.arena.write(layer, (self._slots[at], self._lengths[at]), keys[at], values[at])

    def attend(self, layer: int, query: Tensor, layer_mask: LayerMask, scores: Scores) -> Tensor:
        blocks = [self._block(layer, query, layer_mask, scores, *block) for block in self._blocks]
        if not self.prefixes and (scores.are_plain or blocks[0][-1]):
            out = [decode_attention(*block) for block in blocks]
            return (out[0] if len(out) == 1 else torch.cat(out)).reshape(*query.shape[:3], -1)
        parts = [partial_attention(*block) for block in blocks]
        partial = PartialAttention(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
        grouped = query.view(len(query), partial.top.shape[1], -1, query.shape[-1])
        for span, rows in self.prefixes.items():
            over_prefix = self._over_prefix(layer, grouped[rows], rows, span, layer_mask, scores)
            partial.add(rows, over_prefix)
        return partial.normalised(scores.sinks).to(query.dtype).reshape(*query.shape[:3], -1)

    def _block(
        self,
        layer: int,
        query: Tensor,
        layer_mask: LayerMask,
        scores: Scores,
        block: Block,
        at: slice,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Scores, int]:
        """Return an arena's arguments of `decode_attention`.

        These are queries (b, K, G, D), keys and values (b, K, L, D), mask, scores, and the number
        of parts.
        """
        longest = block.length or 1 + max(row.length for row in block.arena.rows)
        keys, values = (t[: block.num_slots, :, :longest] for t in block.arena.layers[layer])
        q = query[at].view(len(keys), keys.shape[1], -1, query.shape[-1])
        if at.start not in layer_mask.cache:
            first = self._starts[at, None]
            positions = first + torch.arange(longest, device=query.device)
            mask = layer_mask(first + self._lengths[at, None], positions, query.dtype)
            layer_mask.cache[at.start] = mask[:, None, None]
        parts = num_parts(query.device, len(keys) * keys.shape[1], longest)
        return q, keys, values, layer_mask.cache[at.start], scores, parts

    def _over_prefix(
        self,
        layer: int,
        query: Tensor,
        rows: Tensor,
        span: Span,
        layer_mask: LayerMask,
        scores: Scores,
    ) -> PartialAttention:
        """Return the attention of some rows over their common prefix."""
        keys, values = joined([span], layer, [span.filled])
        count, heads, group, size = query.shape
        q = query.transpose(0, 1).reshape(1, heads, count * group, size)
        mask = None
        if not layer_mask.is_causal:
            if span not in layer_mask.cache:
                positions = torch.arange(span.filled, device=query.device)
                mask = layer_mask(self.positions[rows], positions, query.dtype)
                layer_mask.cache[span] = mask.repeat_interleave(group, 0)
            mask = layer_mask.cache[span]
        parts = num_parts(query.device, heads, span.filled)
        part = partial_attention(q, keys, values, mask, scores, parts)
        return PartialAttention(
            *(t.reshape(heads, count, group, t.shape[-1]).transpose(0, 1) for t in part)
        )


class CachedAttention(StateCache):
    """The cache and the attention of one model while an engine runs it.

    Args:
        window: See `window_of`.

    Attributes:
        now: The current forward pass.
        positions: Its positions (B, T).
        scaled: Layers whose queries are scaled by position; see `_scale_by_position`.
    """

    def __init__(self, num_layers: int, window: int | None) -> None:
        layer: Any = _Layer  # which methods are abstract depends on transformers' version
        super().__init__(layers=[layer() for _ in range(num_layers)])
        self.now: Pass | None = None
        self._window = window
        self._layer: int | None = None
        self._positions: Tensor | None = None
        self.scaled: set[Any] = set()

    @classmethod
    def of(cls, model: Any) -> CachedAttention:
        config = model.config.get_text_config()
        return cls(config.num_hidden_layers, window_of(config))

    def run(self, model: Any, now: Pass) -> Tensor:
        """Run a model in which this is the `cached_attention`.

        Returns:
            The logits (B, V) of the last column.
        """
        device, mask = model.device, now.mask
        self._positions = now.positions.to(device)
        padding = {} if mask is None else {"attention_mask": mask.to(device)}
        self.now = now
        try:
            with now.states:
                out = model(
                    input_ids=now.tokens.to(device),
                    position_ids=self._positions,
                    use_cache=True,
                    logits_to_keep=1,
                    **{str(cache_name(model)): self},
                    **padding,
                )
        finally:
            self.now = self._positions = None
        logits: Tensor = out.logits[:, -1]
        return logits

    @property
    def states(self) -> PassStates:
        assert self.now is not None
        return self.now.states

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Note the layer; `attend` writes the keys and values that it receives.

        Models with latent attention give the cache a latent, from which they compute both.
        """
        self._layer = layer_idx
        return key_states, value_states

    def mask(self, *, mask_function: Callable[..., Tensor], **_: Any) -> LayerMask:
        """Return the mask of a kind of layer."""
        return LayerMask(mask_function, self._window)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention, with the signature of transformers; return no probabilities."""
        assert self.now is not None
        unknown = {name for name, value in more.items() if value is not None} - PLAIN
        if unknown or not isinstance(attention_mask, LayerMask):
            raise RuntimeError(f"attention has unsupported arguments: {sorted(unknown)}")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = Scores(scale, softcap, s_aux)
        if module in self.scaled:
            assert self._positions is not None
            query = _scale_by_position(module, query, self._positions)
        layer, self._layer = self._layer, None
        if layer is None:
            raise RuntimeError("attention reads keys that its layer has not given to the cache")
        self.now.write(layer, key, value)
        out = self.now.attend(layer, query.contiguous(), attention_mask, scores)
        return out.transpose(1, 2).contiguous(), None


def _scale_by_position(layer: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Return queries (B, H, T, D) scaled by their positions (B, T), as Llama 4's layers do.

    The layers themselves would take the place in the forward pass for the position.
    """
    steps = torch.floor((positions.float() + 1.0) / layer.floor_scale)
    scales = torch.log1p(steps) * layer.attn_scale + 1.0
    return (query * scales[:, None, :, None]).to(query.dtype)


@with_all_methods
class _Layer(CacheLayerMixin):
    """The interface of a cache layer; the rows have the lengths."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        raise AssertionError("the cache writes")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0


@contextmanager
def cached_attention(model: nn.Module, attention: CachedAttention) -> Iterator[None]:
    """Use this attention in a model within the context."""
    scaled = [m for m in model.modules() if getattr(m, "attn_temperature_tuning", None)]
    attention.scaled = {layer for layer in scaled if not getattr(layer, "use_rope", True)}
    values = [(layer, layer.attn_temperature_tuning) for layer in attention.scaled]
    try:
        for layer, _ in values:
            layer.attn_temperature_tuning = False
        with registered(model, attention.attend, attention.mask, in_all=True):
            yield
    finally:
        for layer, value in values:
            layer.attn_temperature_tuning = value
