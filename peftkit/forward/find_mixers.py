"""Finds the modules that mix tokens outside of attention, and a way to isolate their documents.

A model is probed: a module mixes documents if its output for one document changes with the other
tokens of its input. The smallest such modules are the mixers. The ways of `Mixers` are tried, and
the logits of a padding-free batch decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.forward.attention import TrainingAttention
from peftkit.forward.mixers import Mixers, grid_of_spans, map_tokens
from peftkit.forward.noise import Trial
from peftkit.kernels.varlen import Grid, Spans
from peftkit.model.places import FrozenWrapper, is_linear

WAYS: tuple[tuple[str, ...], ...] = (("cu_seq_lens_q", "seq_idx"), ("cu_seqlens", "seq_idx"))
"""Names by which mixers of transformers take the bounds of documents. Without kernels for them
transformers raises an error; a mixer that ignores a name does not isolate the documents."""
MAX_ROUNDS = 3
"""Mixers inside and around other mixers (RWKV, RG-LRU) are found in later rounds."""


def isolate_mixers(
    model: nn.Module,
    attention: TrainingAttention,
    layouts: Sequence[bool],
    is_isolated: Callable[[bool], bool],
) -> bool:
    """Isolate documents in a model's mixers; return whether its padding-free batches are right.

    If they are, `attention.mixers` is installed, and `attention.takes_spans` is set.

    Args:
        layouts: Layouts that attention supports: spans (True), a grid (False).
        is_isolated: Runs the model on documents in this layout, and returns whether they have the
            logits that they have alone.
    """
    has_attention = attention.num_layers > 0
    if not has_attention and _is_on_gpu(model):
        layouts = (True, False)
    for spans in layouts:
        paths: list[str] = []
        for _ in range(MAX_ROUNDS):
            found = find_mixers(model, attention, partial(is_isolated, spans))
            if not (new := [path for path in found if path not in paths]):
                break
            paths += new
            # without attention, spans have no use except for kernels
            ways = (*WAYS, *[()] * has_attention) if spans else ((),)
            for way in ways:
                _install(attention, Mixers(model, paths, lambda: attention.layout, way))
                if is_isolated(spans):
                    return True
        _install(attention, None)
    return False


def _install(attention: TrainingAttention, mixers: Mixers | None) -> None:
    if attention.mixers is not None:
        attention.mixers.restore()
    attention.mixers = mixers
    if mixers is not None:
        mixers.install()


def _is_on_gpu(model: nn.Module) -> bool:
    return any(parameter.device.type == "cuda" for parameter in model.parameters())


def find_mixers(
    model: nn.Module, attention: TrainingAttention, run: Callable[[], object]
) -> list[str]:
    """Return the paths of the smallest modules that mix documents.

    Each kind of module (class, and classes of the modules inside) is probed once, by another
    forward pass on its inputs.

    Args:
        run: Runs the model on a row of several documents in the layout of `attention`.
    """
    modules = {
        path: module for path, module in model.named_modules() if path and not _is_simple(module)
    }
    kinds = {module: _kind_of(module) for module in modules.values()}
    mixes: dict[Any, bool] = {}
    is_probing = False

    def probe(module: nn.Module, args: object, named: object, out: Any) -> None:
        nonlocal is_probing
        if is_probing or kinds[module] in mixes or attention.layout is None:
            return
        is_probing = True
        try:
            mixes[kinds[module]] = _mixes(module, args, named, out, attention.layout)
        finally:
            is_probing = False

    handles = [module.register_forward_hook(probe, with_kwargs=True) for module in modules.values()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    mixing = [path for path, module in modules.items() if mixes.get(kinds[module])]
    return [path for path in mixing if not any(inner.startswith(f"{path}.") for inner in mixing)]


def _is_simple(module: nn.Module) -> bool:
    """Return whether a module is token-wise, or part of one that is, or is never called."""
    return is_linear(module) or isinstance(module, FrozenWrapper | nn.Embedding | nn.ModuleList)


def _kind_of(module: nn.Module) -> Any:
    return type(module), tuple((name, type(child)) for name, child in module.named_modules())


def _mixes(module: nn.Module, args: Any, named: Any, out: Any, layout: Grid | Spans) -> bool:
    """Return whether a document's output changes if all other tokens of the input change."""
    if isinstance(layout, Spans):
        layout = grid_of_spans(layout)
    shape = layout.places.shape
    document = layout.tokens[1]  # its row ends with padding
    document = document[document != layout.places.numel() - 1].cpu()
    others = torch.ones(shape, dtype=torch.bool)
    others[0, document] = False
    has_changed = False

    def change(x: Tensor) -> Tensor:
        nonlocal has_changed
        if not x.is_floating_point():
            return x
        has_changed = True
        return torch.where(others.view(*shape, *[1] * (x.dim() - 2)).to(x.device), 0.7 - x, x)

    def outputs(output: Any) -> list[Tensor]:
        return [x[0, document].float() for x in _token_outputs(output, shape)]

    try:
        changed, named_changed = map_tokens((args, named), shape, change)
        if not has_changed:
            return False
        trial = Trial(module, lambda: outputs(module(*args, **named)), outputs(out))
        return not trial.accepts(outputs(module.forward(*changed, **named_changed)))
    except RuntimeError:  # it has masks of pairs of tokens
        return False


def _token_outputs(output: Any, shape: torch.Size) -> list[Tensor]:
    tensors: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        tensors.append(x)
        return x

    map_tokens(output, shape, keep)
    return tensors
