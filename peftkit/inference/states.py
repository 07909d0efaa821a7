"""States of convolutions and recurrences, which hybrids of attention have in addition to keys.

Short convolutions, state spaces and linear attention keep tensors of a fixed size for each row.
transformers' models read and write them through their cache, by layer and index; functions for a
single token change them in place. A row without a token has zeros, or none if no row has any.

Shapes: B rows, S slots, C channels, T tokens, W tokens of a convolution.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache
from transformers.cache_utils import Cache, LinearAttentionLayer


class StateKey(NamedTuple):
    """The kind of a state, its layer, and its number among those of its kind in the layer."""

    kind: Literal["conv", "recurrent"]
    layer: int
    number: int


States = dict[StateKey, Tensor]
"""The states of one row, each (1, ...)."""


def has_states(config: Any) -> bool:
    """Return whether a model has states, by its text config."""
    return any(
        isinstance(layer, LinearAttentionLayer) for layer in DynamicCache(config=config).layers
    )


def copied(states: States) -> States:
    return {key: state.clone() for key, state in states.items()}


class SlotStates:
    """The states of the rows in an arena's slots, each (S, ...)."""

    def __init__(self) -> None:
        self.num_slots = 0
        self._tensors: States = {}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def resize(self, num_slots: int, num_used: int) -> None:
        """Change the number of slots; the first `num_used` keep their states."""
        self.num_slots = num_slots
        for key, old in self._tensors.items():
            self._tensors[key] = old.new_zeros(num_slots, *old.shape[1:])
            self._tensors[key][:num_used] = old[:num_used]

    def of(self, slot: int) -> States:
        """Return a copy of a slot's states."""
        return {key: tensor[slot : slot + 1].clone() for key, tensor in self._tensors.items()}

    def put(self, slot: int, states: States) -> None:
        """Write a row's states into a slot, or zeros if it has none yet."""
        for key, state in states.items():
            self.first(key, 0, state)
        for key, tensor in self._tensors.items():
            tensor[slot] = states[key][0] if key in states else 0

    def move(self, source: int, target: int) -> None:
        for tensor in self._tensors.values():
            tensor[target] = tensor[source]

    def first(self, key: StateKey, num_slots: int, like: Tensor) -> Tensor:
        """Return a state of the first slots, not copied; allocate it if necessary."""
        if key not in self._tensors:
            self._tensors[key] = like.new_zeros(self.num_slots, *like.shape[1:])
        return self._tensors[key][:num_slots]

    def get(self, key: StateKey) -> Tensor | None:
        return self._tensors.get(key)


class PassStates(ABC):
    """The states of all rows of a forward pass, which is run within this context.

    Attributes:
        joined: States (B, ...) that the pass has read or written.
    """

    def __init__(self) -> None:
        self.joined: States = {}

    def __enter__(self) -> None:
        self.joined = {}

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._keep()
        self.joined = {}

    def read(self, key: StateKey) -> Tensor | None:
        """Return a state (B, ...), which may be changed in place; None: no row has it."""
        if key not in self.joined and (state := self._join(key)) is not None:
            self.joined[key] = state
        return self.joined.get(key)

    @abstractmethod
    def write(self, key: StateKey, state: Tensor) -> None:
        """Replace a state (B, ...)."""

    @abstractmethod
    def _join(self, key: StateKey) -> Tensor | None:
        """Return a state of all rows."""

    @abstractmethod
    def _keep(self) -> None:
        """Return the joined states to the rows, after the pass."""


class PrefillStates(PassStates):
    """The states of rows that compute their prompts.

    Args:
        rows: The states of each row, which the pass replaces.
    """

    def __init__(self, rows: Sequence[States]) -> None:
        super().__init__()
        self._rows = rows

    def write(self, key: StateKey, state: Tensor) -> None:
        self.joined[key] = state

    def _join(self, key: StateKey) -> Tensor | None:
        like = _any(row.get(key) for row in self._rows)
        if like is None:
            return None
        return torch.cat([row.get(key, torch.zeros_like(like)) for row in self._rows])

    def _keep(self) -> None:
        for key, state in self.joined.items():
            for index, row in enumerate(self._rows):
                row[key] = state[index : index + 1].clone()


class DecodeStates(PassStates):
    """The states of the first slots of some arenas.

    A pass over one arena works on its tensors, at fixed addresses: a CUDA graph may contain it.
    Those of several arenas are joined for the pass, and then copied back.

    Args:
        blocks: The states of each arena, and the number of its slots.
    """

    def __init__(self, blocks: Sequence[tuple[SlotStates, int]]) -> None:
        super().__init__()
        self._blocks = blocks

    def write(self, key: StateKey, state: Tensor) -> None:
        if self.read(key) is None:  # the first token of all rows
            self.joined[key] = self._parts_of(key, state)
        if state is not self.joined[key]:
            self.joined[key].copy_(state)

    def _join(self, key: StateKey) -> Tensor | None:
        like = _any(states.get(key) for states, _ in self._blocks)
        return None if like is None else self._parts_of(key, like)

    def _parts_of(self, key: StateKey, like: Tensor) -> Tensor:
        parts = [states.first(key, num_slots, like) for states, num_slots in self._blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _keep(self) -> None:
        if len(self._blocks) == 1:
            return
        for key, joined in self.joined.items():
            parts = joined.split([num_slots for _, num_slots in self._blocks])
            for (states, num_slots), part in zip(self._blocks, parts, strict=True):
                states.first(key, num_slots, part).copy_(part)


def _any(states: Iterable[Tensor | None]) -> Tensor | None:
    return next((state for state in states if state is not None), None)


class StateCache(Cache):
    """The methods of transformers' caches for states, over those of the current pass."""

    @property
    def states(self) -> PassStates:
        """The states of the current forward pass."""
        raise NotImplementedError

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.read(StateKey("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.read(StateKey("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> Tensor:
        """Keep the last W inputs (B, C, W); return the new inputs (B, C, T) after the kept ones."""
        key = StateKey("conv", layer_idx, state_idx)
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        before = self.states.read(key)
        if before is None:
            inputs = functional.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        else:
            inputs = torch.cat([before, conv_states], -1)
        self.states.write(key, inputs[..., -size:].contiguous())
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        self.states.write(StateKey("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states
