"""A model's attention during training, registered with transformers' attention interface.

Document bounds cannot be passed to attention as arguments: some models drop keyword arguments, and
a checkpointed block calls attention again in the backward pass. Therefore the layout of the
documents is a field of an object that belongs to one model while it trains (`TrainingAttention`);
transformers calls its methods by a registered name.

Shapes: B rows, H heads, L queries, S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from peftkit.execution.plan import ExecutionPlan
from peftkit.forward.attention_kernels import Call, attend, takes_varlen
from peftkit.forward.compat import passes_argument, register_attention, unregister_attention
from peftkit.kernels.varlen import Grid, Spans, into_grid, out_of_grid

PREFIX = "peftkit_"
"""Prefix of registered names of attention."""


Layout = Grid | Spans | None
"""Layout of documents in rows; None: each row is one document."""

_used_names: set[str] = set()
_original: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()
"""Attention implementations of models before their training began."""


class MaskKind(NamedTuple):
    """The keys that a query sees: up to its position or all, of these the last `window` or all."""

    is_causal: bool
    window: int | None


class TrainingAttention:
    """The attention of one model, and the layout of its current documents.

    Attributes:
        layout: Layout for the next forward pass and its backward pass.
        is_causal: Whether every layer is causal over all previous tokens; documents in separate
            rows then need no mask.
        takes_spans: Whether all layers support documents as spans of a row.
        can_share: Whether documents may share a sequence, by the longest and the total length.
        num_layers: Number of observed layers.
        mixers: `peftkit.forward.mixers.Mixers` of the model, if it needs them.
    """

    def __init__(self, plan: ExecutionPlan, can_share: Callable[[int, int], bool]) -> None:
        self.plan, self.can_share = plan, can_share
        self.layout: Layout = None
        self.is_causal = self.takes_spans = False
        self.num_layers = 0
        self.mixers: Any = None
        self._kinds: dict[int, MaskKind | None] | None = None
        self._calls: list[tuple[MaskKind | None, bool]] = []  # kind, takes spans
        self._masks: list[Tensor] = []

    @property
    def needs_mask(self) -> bool:
        """Whether documents of this layout need a mask.

        Causal documents in separate rows do not: they do not see the padding after them.
        """
        return not (self.is_causal or isinstance(self.layout, Spans))

    @property
    def kernel(self) -> str:
        """The main kernel's name, for the header of a run."""
        return "varlen" if self.takes_spans else self.plan.attention

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Record the masks of the layers in a forward pass on one row, without a layout."""
        self._kinds, self._calls, self._masks = {}, [], []
        try:
            yield
            kinds = [kind for kind, _ in self._calls]
            self.num_layers = len(kinds)
            self.is_causal = bool(kinds) and all(kind == MaskKind(True, None) for kind in kinds)
            self.takes_spans = bool(kinds) and all(takes for _, takes in self._calls)
        finally:
            self._kinds, self._calls, self._masks = None, [], []

    def mask(self, *, mask_function: Callable[..., Tensor], **options: Any) -> Tensor | None:
        """Return the attention mask like transformers' function, or the mask of a grid."""
        from transformers.masking_utils import sdpa_mask  # slow to import

        options["mask_function"] = mask_function
        if self._kinds is not None:
            no_skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            mask = sdpa_mask(**{**options, **no_skip})
            assert mask is not None
            self._masks.append(mask)  # keeps its address unique
            self._kinds[mask.data_ptr()] = kind_of(mask_function, window_of(options.get("config")))
            return mask
        layout = self.layout
        if layout is not None and not self.needs_mask:
            return None
        return _grid_mask(layout, **options) if isinstance(layout, Grid) else sdpa_mask(**options)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """Return (B, L, H, D) like transformers' attention functions, without probabilities."""
        layout = self.layout
        if layout is not None and self.mixers is not None and not self.needs_mask:
            attention_mask = None  # of ones
        if isinstance(layout, Grid):
            query, key, value = (into_grid(tensor, layout) for tensor in (query, key, value))
            fits = attention_mask is not None and attention_mask.shape[0] == len(query)
            if not fits and (attention_mask is not None or self.needs_mask):
                raise RuntimeError("a padding-free batch needs the mask of its grid")
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        call = Call(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout,
            query.shape[-1] ** -0.5 if scaling is None else scaling,
            causal and attention_mask is None,
            is_causal,
            position_bias,
            softcap,
            None if isinstance(layout, Grid) else layout,
            more,
            self.plan.attention == "grouped",
        )
        if self._kinds is not None:
            self._observe(call, causal)
        out = attend(call)
        if isinstance(layout, Grid):
            return out_of_grid(out.transpose(1, 2), layout), None
        return out.contiguous(), None

    def _observe(self, call: Call, causal: bool) -> None:
        """Record a layer's kind of mask, and whether its arguments agree with it."""
        assert self._kinds is not None
        mask = call.mask
        kind = None if mask is None else self._kinds.get(mask.data_ptr())
        stated = MaskKind(causal, call.more.get("sliding_window"))
        self._calls.append((kind, kind == stated and takes_varlen(call)))


def _grid_mask(
    grid: Grid,
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None,
    **more: Any,
) -> Tensor:
    """Return the mask (R, 1, T, T) of R documents.

    The model's mask function is evaluated on the longest document. Its tokens are the first tokens
    of the row, so they have the positions that they have alone.
    """
    if attention_mask is not None or more.get("use_vmap"):
        raise RuntimeError("a padding-free batch has no mask except its grid's")
    if (more["batch_size"], more["q_length"]) != grid.places.shape:
        raise RuntimeError("the layout of the documents does not match these rows")
    place = grid.tokens.amin(0)
    real = (grid.tokens < grid.places.numel() - 1)[:, None, None]
    visible = (mask_function(0, 0, place[:, None], place) & real).expand(-1, -1, len(place), -1)
    # padding must see at least one key
    return visible | torch.eye(len(place), dtype=torch.bool, device=visible.device)


def window_of(config: Any) -> int | None:
    """Return the size of a model's windows or chunks of attention, the larger one; None: none."""
    sizes = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    return max((size for size in sizes if size), default=None)


def kind_of(mask_function: Callable[..., Tensor], window: int | None) -> MaskKind | None:
    """Return the kind of a mask function of transformers, or None for another kind.

    The function is evaluated for near and far queries; it must not depend on the batch.

    Args:
        window: See `window_of`; keys far beyond it are evaluated.
    """
    reach = 2 * (window or 0) + 1024
    queries = torch.tensor([0, 1, 7, reach // 2, reach - 9, reach - 1])[:, None]
    keys = torch.arange(reach)[None]
    try:
        seen = mask_function(0, 0, queries, keys).expand(len(queries), reach)
    except Exception:  # it depends on the batch
        return None
    distance = queries - keys
    count = int(seen[-1].sum())
    for kind in (MaskKind(False, None), MaskKind(True, None), MaskKind(True, count)):
        within = distance < (reach if kind.window is None else kind.window)
        if torch.equal(seen, (distance >= 0) & within if kind.is_causal else within | True):
            return kind
    return None


@contextmanager
def training_attention(
    model: nn.Module,
    plan: ExecutionPlan | None = None,
    *,
    documents: bool = True,
    previous: TrainingAttention | None = None,
) -> Iterator[TrainingAttention | None]:
    """Train with the plan's attention, which isolates documents of a row.

    The model's attention is replaced if the model uses torch's SDPA, or eager attention with capped
    scores or sinks, which SDPA does not support. For other models the layout concerns only mixers
    (mixers.py), and without `documents` None is yielded.

    Args:
        plan: By default the plan for the model's device.
        documents: Whether rows may hold several documents.
        previous: An earlier `TrainingAttention` of the model, with the recorded masks.
    """
    plan = plan or ExecutionPlan.for_model(model)
    from peftkit.forward.row_lengths import limits_of

    is_replaced = _applies(model, documents) and (documents or plan.attention == "grouped")
    attention = previous or TrainingAttention(plan, limits_of(model).allow)
    try:
        with _trained_with(model, attention) if is_replaced else nullcontext():
            yield attention if documents or is_replaced else None
    finally:
        attention.layout = None
        if attention.mixers is not None:
            attention.mixers.restore()


@contextmanager
def registered(
    model: Any, attend: Callable[..., Any], mask: Callable[..., Any], *, in_all: bool
) -> Iterator[None]:
    """Use an attention function and its mask in a model within the context.

    Args:
        in_all: Whether submodels with another implementation use it too.
    """
    before = _implementations(model.config)
    names = (f"{PREFIX}attention" + (f"_{n}" if n else "") for n in range(len(_used_names) + 1))
    name = next(name for name in names if name not in _used_names)
    _used_names.add(name)
    register_attention(name, attend, mask)
    model.set_attn_implementation(
        {key: name if in_all or old == before[""] else old for key, old in before.items()}
    )
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        unregister_attention(name)
        _used_names.discard(name)


@contextmanager
def _trained_with(model: nn.Module, attention: TrainingAttention) -> Iterator[None]:
    outer = _original.get(model)
    _original[model] = _implementations(model.config)
    try:
        with registered(model, attention.attend, attention.mask, in_all=False):
            yield
    finally:
        _original[model] = outer or {}


@contextmanager
def original_attention(model: Any) -> Iterator[None]:
    """Restore a model's original attention within the context, during its training."""
    before = _original.get(model)
    if not before:
        yield
        return
    training = _implementations(model.config)
    model.set_attn_implementation(before)
    try:
        yield
    finally:
        model.set_attn_implementation(training)


def _implementations(config: Any) -> dict[str, str]:
    """Return the attention implementations of a model ("") and of its submodels, by name."""
    configs = {key: getattr(config, key, None) for key in config.sub_configs}
    names = {key: sub._attn_implementation for key, sub in configs.items() if sub is not None}
    return {"": config._attn_implementation, **names}


def _applies(model: nn.Module, documents: bool) -> bool:
    config: Any = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    is_eager = implementation == "eager" and not getattr(config, "attention_dropout", 0.0)
    capped = getattr(config, "attn_logit_softcapping", None)
    is_special = capped or (documents and passes_argument(model, "s_aux"))
    if implementation != "sdpa" and not (is_eager and is_special):
        return False
    can = getattr(type(model), "_can_set_attn_implementation", None)
    return bool(can and can())
