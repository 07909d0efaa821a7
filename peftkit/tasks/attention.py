"""A model's attention while it trains, through transformers' own extension point.

transformers hands documents' bounds to attention in no way that all models pass on: their keyword
arguments are dropped by some, and a recomputed block asks again in the backward pass. So the layout
of the documents is a field of an object that belongs to one model for as long as it trains
(`TrainingAttention`), whose methods transformers calls by a name of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from peftkit.execution.plan import ExecutionPlan, plan_of
from peftkit.kernels.context import Context
from peftkit.kernels.grid import Grid, into_grid, out_of_grid
from peftkit.kernels.varlen import Spans
from peftkit.tasks.attention_kernels import Call, attend, is_bare, takes_varlen

PREFIX = "peftkit_"
"""Of the names that attention is registered under."""

Layout = Grid | Spans | Context | None
"""How documents lie in rows. None: each row is one. A context: each row is one, and the tokens of
it that are here are those of its process."""

_taken: set[str] = set()


class MaskKind(NamedTuple):
    """What a query sees: keys up to itself, or all; of these the last `window`, or all."""

    is_causal: bool
    window: int | None


class TrainingAttention:
    """The attention of one model, and the layout of the documents that it is given.

    Attributes:
        layout: Of the next forward pass and its backward pass.
        is_causal: Whether all layers are known to see what was before and nothing else, so that
            documents in rows of their own need no mask.
        takes_spans: Whether all layers can be given documents of a row as they stand.
        takes_context: Whether all layers can be given a part of a row's tokens.
    """

    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        self.layout: Layout = None
        self.is_causal = self.takes_spans = self.takes_context = False
        self._kinds: dict[int, MaskKind | None] | None = None
        self._heard: list[tuple[MaskKind | None, bool, bool]] = []
        self._masks: list[Tensor] = []

    @property
    def needs_mask(self) -> bool:
        """Whether documents, as they are laid out, are kept apart by a mask.

        Causal ones in rows of their own are not: what stands after them they do not see.
        """
        return not (self.is_causal or isinstance(self.layout, Spans | Context))

    @property
    def kernel(self) -> str:
        """The name of what computes most of it, for the header of a run."""
        return "varlen" if self.takes_spans else self.plan.attention

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Find out what the layers see in a forward pass on one row, without a layout."""
        self._kinds, self._heard, self._masks = {}, [], []
        try:
            yield
            kinds = [kind for kind, _, _ in self._heard]
            self.is_causal = bool(kinds) and all(kind == MaskKind(True, None) for kind in kinds)
            self.takes_spans = bool(kinds) and all(takes for _, takes, _ in self._heard)
            self.takes_context = self.is_causal and all(bare for _, _, bare in self._heard)
        finally:
            self._kinds, self._heard, self._masks = None, [], []

    def mask(self, *, mask_function: Callable[..., Tensor], **asked: Any) -> Tensor | None:
        """Return what attention may see, as transformers' own function does; of a grid, if any."""
        from transformers.masking_utils import sdpa_mask  # slow to import

        asked["mask_function"] = mask_function
        if self._kinds is not None:
            whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            heard = sdpa_mask(**{**asked, **whole})
            assert heard is not None
            self._masks.append(heard)  # so that no other is in its place
            window = getattr(asked.get("config"), "sliding_window", None)
            self._kinds[heard.data_ptr()] = kind_of(mask_function, window)
            return heard
        if self.layout is not None and not self.needs_mask:
            return None
        layout = self.layout
        return _seen_in_grid(layout, **asked) if isinstance(layout, Grid) else sdpa_mask(**asked)

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
        """Return what transformers' attention functions do, and no probabilities."""
        layout = self.layout
        if isinstance(layout, Grid):
            query, key, value = (into_grid(each, layout) for each in (query, key, value))
            fits = attention_mask is not None and attention_mask.shape[0] == len(query)
            if not fits and (attention_mask is not None or self.needs_mask):
                raise RuntimeError("documents in one row have a mask of their grid")
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
            self._hear(call, causal)
        out = attend(call)
        if isinstance(layout, Grid):
            return out_of_grid(out.transpose(1, 2), layout), None
        return out.contiguous(), None

    def _hear(self, call: Call, causal: bool) -> None:
        """Note what a layer sees, and whether the model's words for it are the same."""
        assert self._kinds is not None
        mask = call.mask
        kind = None if mask is None else self._kinds.get(mask.data_ptr())
        told = MaskKind(causal, call.more.get("sliding_window"))
        self._heard.append((kind, kind == told and takes_varlen(call), is_bare(call)))


def _seen_in_grid(
    grid: Grid,
    *,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None,
    **more: Any,
) -> Tensor:
    """Return what attention may see (R, 1, T, T), of R documents.

    The model's function of any two tokens is asked for those of the longest document, which has
    the first ones of the row and stands there as it would alone.
    """
    if attention_mask is not None or more.get("use_vmap"):
        raise RuntimeError("documents in one row have no mask but their own")
    if (more["batch_size"], more["q_length"]) != grid.places.shape:
        raise RuntimeError("these are other rows than the layout of the documents")
    place = grid.tokens.amin(0)
    real = (grid.tokens < grid.places.numel() - 1)[:, None, None]
    seen = (mask_function(0, 0, place[:, None], place) & real).expand(-1, -1, len(place), -1)
    # padding has to see something
    return seen | torch.eye(len(place), dtype=torch.bool, device=seen.device)


def kind_of(mask_function: Callable[..., Tensor], window: int | None) -> MaskKind | None:
    """Return what a mask function of transformers lets a query see; None: neither of the two.

    It is asked for queries near and far; it must not depend on the batch.

    Args:
        window: One that the model may have: keys well beyond it are asked for.
    """
    reach = 2 * (window or 0) + 1024
    queries = torch.tensor([0, 1, 7, reach // 2, reach - 9, reach - 1])[:, None]
    keys = torch.arange(reach)[None]
    try:
        seen = mask_function(0, 0, queries, keys).expand(len(queries), reach)
    except Exception:  # it reads something of the batch
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
    model: Any, plan: ExecutionPlan | None = None, *, documents: bool = True
) -> Iterator[TrainingAttention | None]:
    """Train with the attention of a plan, and take documents of a row apart.

    Yields None where that is of no use, or not exact: the model has to dispatch its attention to
    torch's SDPA, or to cap its scores, which SDPA cannot, and do nothing else.

    Args:
        plan: By default what suits the model's device.
        documents: Whether rows may be laid out as documents.
    """
    plan = plan or plan_of(model)
    if not _applies(model) or not (documents or plan.attention == "grouped"):
        yield None
        return
    from transformers import AttentionInterface, AttentionMaskInterface  # slow to import

    before = _implementations(model.config)
    name = _free_name()
    attention = TrainingAttention(plan)
    AttentionInterface.register(name, attention.attend)
    AttentionMaskInterface.register(name, attention.mask)
    model.set_attn_implementation({k: name if v == before[""] else v for k, v in before.items()})
    try:
        yield attention
    finally:
        attention.layout = None
        model.set_attn_implementation(before)
        for table in (AttentionInterface, AttentionMaskInterface):
            table._global_mapping.pop(name, None)
        _taken.discard(name)


def _implementations(config: Any) -> dict[str, str]:
    """Return the attention of a model and of its parts, one of which may know less than others."""
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    found = {key: part._attn_implementation for key, part in parts.items() if part is not None}
    return {"": config._attn_implementation, **found}


def _free_name() -> str:
    """Return a name that no other model trains under."""
    names = (f"{PREFIX}attention" + (f"_{n}" if n else "") for n in range(len(_taken) + 1))
    name = next(name for name in names if name not in _taken)
    _taken.add(name)
    return name


def _applies(model: Any) -> bool:
    config: Any = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    capped = getattr(config, "attn_logit_softcapping", None) and not config.attention_dropout
    if implementation != "sdpa" and not (implementation == "eager" and capped):
        return False
    can = getattr(type(model), "_can_set_attn_implementation", None)
    return bool(can and can())
