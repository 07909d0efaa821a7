"""A linear layer with the updates of several adapters, and the choice of one for each row.

Some models flatten a batch (B, T) to (B * T) tokens before their feed-forward layers (OPT, shared
experts), some put positions before rows (XLNet), some route tokens to experts. Only the first keep
the order of the rows. There is no table of models: `rows_in_order` compares the inputs of each
layer.

Shapes: M rows of the batch, B rows of the probe, T tokens, r rank; in, out features of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftkit.errors import AdapterError
from peftkit.execution.out_of_memory import is_out_of_memory
from peftkit.forward.loss import accepted
from peftkit.forward.noise import is_noise, noise_of, rounded, sizes_of
from peftkit.kernels.by_row import RowRanks, add_lora_by_row
from peftkit.kernels.device import forked_generators
from peftkit.kernels.lora import adapted_row_norms
from peftkit.model.modes import evaluating
from peftkit.model.places import FrozenWrapper, is_linear, linear_shape
from peftkit.quant.layers import QuantizedLinear
from peftkit.quant.weights import weight_of


@dataclass(frozen=True, slots=True)
class Update:
    """One adapter's update of one layer, y = W x + b^T a x, in the layer's compute dtype.

    Attributes:
        a: (r, in).
        b: (r, out), B transposed and scaled.
        gain: (out,) of DoRA: m / ||W + s B A|| - 1, which scales W x too; float32, or None.
    """

    a: Tensor
    b: Tensor
    gain: Tensor | None

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.a, self.b, self.gain) if t is not None)


def make_update(
    base: nn.Module,
    a: Tensor,
    b: Tensor,
    scaling: float,
    magnitude: Tensor | None,
    scales_in: torch.dtype,
) -> Update:
    """Return the update of a layer, copied to the layer's device.

    Args:
        base: The frozen layer.
        a: (r, in).
        b: (out, r).
        magnitude: (out,) of DoRA.
        scales_in: dtype in which the adapter alone scales its B; DoRA uses float32.
    """
    device, dtype = _storage(base)
    a, b = a.to(device), b.to(device)
    gain: Tensor | None = None
    factor: Tensor | float = scaling
    if magnitude is not None:
        weight = weight_of(base)
        squared = weight.float().square().sum(1)
        norms = adapted_row_norms(weight, a, b, scaling, squared)
        gain = magnitude.to(device).float() / norms - 1
        factor, scales_in = scaling * (1 + gain), torch.float32
    scaled = (b.t().to(scales_in) * factor).to(dtype)
    contiguous = scaled.clone(memory_format=torch.contiguous_format)
    return Update(a.to(dtype, copy=True), contiguous, gain)


def _storage(base: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Return a linear layer's device and compute dtype, without unpacking a packed weight."""
    if isinstance(base, QuantizedLinear):
        return base.packed.device, base.packing.dtype
    weight = cast(Tensor, base.weight)
    return weight.device, weight.dtype


class Routing:
    """A reusable context with the adapter of each row of a batch; all layers of a bank read it.

    Args:
        active: Stack of the bank's entered routings; the last one applies.
        rows: One adapter for all rows, or one for each. None: the bare base.
        in_order: See `rows_in_order`.

    Attributes:
        name: The adapter of all rows; None: no adapter, or rows differ.
        rows: The adapter of each row; None: `name` applies to all.
        stacks: Each layer's stacked updates.
    """

    def __init__(
        self,
        active: list[Routing],
        rows: str | Sequence[str | None] | None,
        in_order: Mapping[str, bool] | None = None,
    ) -> None:
        self._active, self.in_order = active, in_order or {}
        self.name: str | None = None
        self.rows: tuple[str | None, ...] | None = None
        if rows is None or isinstance(rows, str):
            self.name = rows
        else:
            self.rows = tuple(rows)
            self.name = self.rows[0] if len(set(self.rows)) == 1 else None
        self.stacks: dict[nn.Module, _Stack | None] = {}
        self._ranks: dict[Any, RowRanks] = {}

    def __enter__(self) -> None:
        self._active.append(self)

    def __exit__(self, *raised: object) -> None:
        self._active.pop()

    @property
    def names(self) -> set[str]:
        return {name for name in (self.rows or (self.name,)) if name is not None}

    @property
    def is_mixed(self) -> bool:
        return self.name is None and self.rows is not None and any(self.rows)

    def rank_rows(
        self, slots: Sequence[int | None], ranks: Sequence[int], like: Tensor
    ) -> RowRanks:
        """Return `RowRanks.of`, cached for all layers with the same adapters and ranks."""
        key = (tuple(slots), tuple(ranks), like.device)
        if key not in self._ranks:
            self._ranks[key] = RowRanks.of(slots, ranks, like.device)
        return self._ranks[key]


@dataclass(frozen=True, slots=True)
class _Stack:
    """The updates of one layer for a mixed batch; R ranks of all its adapters.

    Attributes:
        a: (R, in).
        b: (R, out).
        ranks: The ranks of each row.
        gain: (M, 1, out) of DoRA, zero for other rows; None: no row has it.
    """

    a: Tensor
    b: Tensor
    ranks: RowRanks
    gain: Tensor | None


class BankLinear(FrozenWrapper):
    """A frozen linear layer with the updates of several adapters.

    Args:
        active: See `Routing`.

    Attributes:
        updates: By adapter name. They are neither parameters nor in the state dict, but follow the
            model when it is moved or cast.
    """

    def __init__(self, base: nn.Module, path: str, active: Sequence[Routing]) -> None:
        super().__init__(base)
        self.path, self._active = path, active
        self.in_features, self.out_features = linear_shape(base)
        self.updates: dict[str, Update] = {}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.base(x, *args, **kwargs)
        if not (self.enabled and self._active):
            return out
        routing = self._active[-1]
        if routing.rows is not None:
            self._check_rows(x, routing.rows, routing)
        if routing.is_mixed:
            return self._by_row(out, x, routing)
        update = self.updates.get(routing.name) if routing.name is not None else None
        return out if update is None else self._for_all(out, x, update)

    def _check_rows(self, x: Tensor, rows: Sequence[str | None], routing: Routing) -> None:
        is_flat = x.dim() < 3
        if not is_flat and x.shape[0] != len(rows):
            raise AdapterError(
                f"the batch has {x.shape[0]} rows, and adapters were given for {len(rows)}",
                fix="Give one entry for each row; with beams, or several answers to a prompt, "
                "repeat each prompt's entry as many times.",
            )
        in_order = routing.in_order.get(self.path, not is_flat)
        if routing.is_mixed and (not in_order or (is_flat and len(x) % len(rows))):
            raise AdapterError(
                f"{self.path} cannot separate the rows of a mixed batch",
                found=f"its input has the shape {tuple(x.shape)}: the model mixes the rows",
                fix="Use one adapter for the whole batch.",
            )

    def _for_all(self, out: Tensor, x: Tensor, update: Update) -> Tensor:
        a, b = update.a.to(out.dtype), update.b.to(out.dtype)
        hidden = nn.functional.linear(x.to(out.dtype), a)
        grown = None if update.gain is None else self._grown(out, update.gain)
        changed = out.flatten(0, -2).addmm_(hidden.flatten(0, -2), b).view(out.shape)
        return changed if grown is None else changed.add_(grown)

    def _by_row(self, out: Tensor, x: Tensor, routing: Routing) -> Tensor:
        if self not in routing.stacks:
            routing.stacks[self] = self._stack(routing, out)
        stack = routing.stacks[self]
        if stack is None:
            return out
        if stack.a.dtype != out.dtype or stack.a.device != out.device:  # moved or cast since
            routing.stacks[self] = stack = self._stack(routing, out)
            assert stack is not None
        assert routing.rows is not None
        # (M, T, ...), from (M, ..., in) or (M * T, in)
        flat_x, flat_out = (t.reshape(len(routing.rows), -1, t.shape[-1]) for t in (x, out))
        grown = None if stack.gain is None else self._grown(flat_out, stack.gain)
        changed = add_lora_by_row(flat_out, flat_x, stack.a, stack.b, stack.ranks)
        return (changed if grown is None else changed.add_(grown)).reshape(out.shape)

    def _grown(self, out: Tensor, gain: Tensor) -> Tensor:
        """Return gain * W x, without the bias."""
        plain = out if self.bias is None else out - self.bias
        return gain.to(out.dtype) * plain

    def _stack(self, routing: Routing, like: Tensor) -> _Stack | None:
        """Stack the updates of the routing's adapters; None: none adapts this layer."""
        assert routing.rows is not None
        names = [n for n in dict.fromkeys(routing.rows) if n is not None and n in self.updates]
        if not names:
            return None
        updates = [self.updates[name] for name in names]
        slots = [names.index(n) if n in self.updates else None for n in routing.rows]
        ranks = routing.rank_rows(slots, [len(update.a) for update in updates], like)
        gain = None
        if any(update.gain is not None for update in updates):
            none = torch.zeros(self.out_features, device=like.device)
            gains = [none if u.gain is None else u.gain for u in updates]
            gain = torch.stack([none if s is None else gains[s] for s in slots])[:, None]
        a = ranks.stack([update.a.to(like.dtype) for update in updates])
        b = ranks.stack([update.b.to(like.dtype) for update in updates])
        return _Stack(a, b, ranks, gain)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BankLinear:
        super()._apply(fn, recurse)
        for name, update in self.updates.items():
            gain = update.gain
            if gain is not None:  # stays float32
                gain = gain.to(fn(gain).device)
            self.updates[name] = replace(update, a=fn(update.a), b=fn(update.b), gain=gain)
        return self

    def extra_repr(self) -> str:
        return f"updates={list(self.updates)}"


NUM_ROWS, NUM_TOKENS = 3, 5
"""B and T of the probe."""


@torch.no_grad()
def rows_in_order(model: Any) -> dict[str, bool]:
    """Return whether the rows of a layer's input are in the batch's order, by path.

    True: the flattened input is that of the first row, then that of the second, and so on, with the
    same number of vectors for each row. Layers that do not run on tokens alone are missing. Runs
    the model seven times on a few tokens.
    """
    vocab = model.config.get_text_config().vocab_size
    count = torch.arange(NUM_ROWS * NUM_TOKENS, device=model.device)
    ids = count.mul(7).add(3).remainder(vocab).view(NUM_ROWS, NUM_TOKENS)
    try:
        with evaluating(model), forked_generators(model.device):
            together = _inputs(model, ids)
            alone = [_inputs(model, row[None]) for row in ids]
            moved = list(rounded(model, lambda: _inputs(model, ids)))
    except Exception as error:  # whatever a model raises that needs more than tokens
        if is_out_of_memory(error):
            raise
        return {}
    return {
        path: _are_joined(
            found,
            [row[path] for row in alone if path in row],
            [[draw[path]] for draw in moved if path in draw],
        )
        for path, found in together.items()
    }


def _are_joined(
    together: Tensor, parts: Sequence[Tensor], moved: Sequence[Sequence[Tensor]]
) -> bool:
    per_row, rest = divmod(len(together), NUM_ROWS)
    if rest or per_row % NUM_TOKENS or [len(part) for part in parts] != [per_row] * NUM_ROWS:
        return False
    sizes = sizes_of([torch.cat(list(parts))], [together])
    return is_noise(sizes, noise_of(moved, [together]))


def _inputs(model: nn.Module, ids: Tensor) -> Mapping[str, Tensor]:
    """Return each linear layer's input in one forward pass, flattened to vectors, on the CPU."""
    inputs: dict[str, Tensor] = {}

    def watch(path: str, layer: nn.Module) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                inputs[path] = args[0].float().flatten(0, -2)

        return layer.register_forward_pre_hook(note)

    handles = [watch(path, m) for path, m in model.named_modules() if is_linear(m)]
    try:
        model(**accepted(model, {"input_ids": ids, "use_cache": False}))
    finally:
        for handle in handles:
            handle.remove()
    return {path: tensor.cpu() for path, tensor in inputs.items()}
