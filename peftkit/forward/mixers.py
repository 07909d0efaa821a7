"""Modules that mix tokens outside of attention and isolate the documents of a padding-free batch.

Convolutions, linear attention and state spaces run over a whole row. In a padding-free batch, such
a mixer computes each document in a row of its own, padded on the right, and its output returns to
the positions of the tokens. A mixer is causal (probes.py checks the logits), so padding after a
document changes nothing before it: no kernel is required, and no list of architectures. Linear
layers inside a mixer are token-wise and compute the row without padding.

On a GPU whose kernels take bounds of documents (fla, causal-conv1d, mamba-ssm), the mixer computes
the documents one after the other instead. find_mixers.py finds the mixers and tries these ways.

Shapes: N tokens of the row, R documents, T tokens of the longest, padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.forward.mixer_kernels import with_delta_rule
from peftkit.kernels.varlen import Grid, Spans, gathered, into_grid
from peftkit.model.places import FrozenWrapper, is_linear


class Mixers:
    """The mixers of a model, which isolate the documents of the current layout.

    Attributes:
        paths: Paths of the mixers in the model.
        way: Names of arguments for the bounds of consecutive documents; (): each document is a
            padded row.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: list[str],
        layout: Callable[[], Grid | Spans | None],
        way: tuple[str, ...] = (),
    ) -> None:
        self.paths, self.way, self._model, self._layout = paths, way, model, layout
        self._grid_of_spans: tuple[Spans, Grid] | None = None
        self._grid: Grid | None = None  # of the mixer that is running
        self._input: tuple[Tensor, Tensor] | None = None  # the last one, as a grid and flat
        self._output: tuple[Tensor, Tensor] | None = None
        self._replaced: list[nn.Module] = []

    @property
    def description(self) -> str:
        """How documents are isolated, for the header of a run."""
        kinds = {type(self._model.get_submodule(path)).__name__ for path in self.paths}
        way = f"bounds by {' and '.join(self.way)}" if self.way else "a padded row per document"
        return f"{', '.join(sorted(kinds))}: {way}"

    def install(self) -> None:
        """Replace the forward passes of the mixers and of their linear layers."""
        for path in self.paths:
            module = self._model.get_submodule(path)
            self._replace(module, self._isolated, with_delta_rule(module, self._lengths))
            for linear in linear_layers(module):
                self._replace(linear, self._without_padding, linear.forward)

    def restore(self) -> None:
        """Restore the forward passes."""
        for module in self._replaced:
            module.__dict__.pop("forward", None)
        self._replaced = []

    def _replace(
        self, module: nn.Module, replacement: Callable[..., Any], original: Callable[..., Any]
    ) -> None:
        if "forward" in module.__dict__:
            return

        def forward(*args: Any, **named: Any) -> Any:
            return replacement(module, original, *args, **named)

        module.__dict__["forward"] = forward
        self._replaced.append(module)

    def _isolated(
        self, module: nn.Module, original: Callable[..., Any], *args: object, **named: object
    ) -> Any:
        """Run a mixer on each document separately."""
        layout = self._layout()
        if layout is None or self._grid is not None:  # padded rows, or a mixer inside a mixer
            return original(*args, **named)
        if isinstance(layout, Grid):
            return self._in_rows(original, args, named, layout)
        # only the kernels of evaluation are probed
        training, module.training = module.training, False
        try:
            if self.way:
                return self._in_sequence(original, args, named, layout)
            return self._in_rows(original, args, named, self._grid_of(layout))
        finally:
            module.training = training

    def _in_rows(self, original: Callable[..., Any], args: Any, named: Any, grid: Grid) -> Any:
        """Run a mixer on a padded row for each document."""
        self._grid = grid
        try:
            args, named = map_tokens((args, named), grid.places.shape, self._into_rows)
            return map_tokens(original(*args, **named), grid.tokens.shape, self._out_of_rows)
        finally:
            self._grid = self._input = self._output = None

    def _in_sequence(
        self, original: Callable[..., Any], args: Any, named: Any, spans: Spans
    ) -> Any:
        """Run a mixer on documents one after the other, each with its prefix, and their bounds."""
        total, bounds = spans.longest.shape[2], spans.keys
        num_keys = len(spans.tokens) or total
        document = torch.arange(len(bounds) - 1, device=bounds.device, dtype=torch.int32)
        index = document.repeat_interleave(bounds.diff(), output_size=num_keys)[None]
        values = {"seq_idx": index, "cu_seqlens": bounds, "cu_seq_lens_q": bounds}
        if len(spans.tokens):
            shape = torch.Size((1, total))
            args, named = map_tokens((args, named), shape, lambda x: _gathered(x, spans))
        out = original(*args, **named, **{name: values[name] for name in self.way})
        if not len(spans.tokens):
            return out
        shape = torch.Size((1, num_keys))
        return map_tokens(out, shape, lambda x: x.index_select(1, spans.first))

    def _grid_of(self, spans: Spans) -> Grid:
        if self._grid_of_spans is None or self._grid_of_spans[0] is not spans:
            self._grid_of_spans = spans, grid_of_spans(spans)
        return self._grid_of_spans[1]

    def _lengths(self) -> list[int] | None:
        """Return the lengths of the rows of the running mixer; None if all are full."""
        if self._grid is None:
            return None
        real = self._grid.tokens != self._grid.places.numel() - 1
        lengths: list[int] = real.sum(1).tolist()
        return lengths

    def _without_padding(
        self, module: nn.Module, original: Callable[..., Any], x: Tensor
    ) -> Tensor:
        """Run a linear layer of a mixer on the row without padding.

        Layers that read one tensor get one flat tensor: LoRA groups compare inputs by identity.
        """
        grid = self._grid
        out: Tensor
        if grid is None or x.shape[:-1] != grid.tokens.shape:
            out = original(x)
            return out
        if self._input is None or x is not self._input[0]:
            self._input = x, out_of(x, grid)
        out = original(self._input[1])
        self._output = into(out, grid), out
        return self._output[0]

    def _into_rows(self, x: Tensor) -> Tensor:
        assert self._grid is not None
        rows = into(x, self._grid)
        if self._input is None and x.is_floating_point():
            self._input = rows, x
        return rows

    def _out_of_rows(self, x: Tensor) -> Tensor:
        assert self._grid is not None
        if self._output is not None and x is self._output[0]:
            return self._output[1]
        return out_of(x, self._grid)


def _gathered(x: Tensor, spans: Spans) -> Tensor:
    """Return values of tokens (1, N, ...) in the order of the documents' keys (1, K, ...)."""
    if not x.is_floating_point():
        return x.index_select(1, spans.tokens)
    return gathered(x[0].flatten(1)[:, None], spans)[:, 0].unflatten(1, x.shape[2:])[None]


def grid_of_spans(spans: Spans) -> Grid:
    """Return the grid of a row's documents without synchronising with the GPU."""
    bounds = spans.keys[:-1].long()  # the last document is the row's padding
    _, longest, total = spans.longest.shape[:3]
    width, pad, device = longest + 1, total - 1, bounds.device
    index = bounds[:-1, None] + torch.arange(width, device=device)
    keys = spans.tokens if len(spans.tokens) else torch.arange(total, device=device)
    tokens = torch.where(index < bounds[1:, None], keys[index.clamp(max=len(keys) - 1)], pad)
    first = spans.first if len(spans.first) else torch.arange(total, device=device)
    unused = first >= bounds[-1]
    document = (torch.searchsorted(bounds, first, right=True) - 1).clamp(max=len(bounds) - 2)
    places = torch.where(unused, width - 1, document * width + first - bounds[document])
    owner = torch.searchsorted(bounds, spans.copies, right=True) - 1
    copies = owner * width + spans.copies - bounds[owner]
    return Grid(tokens, places[None], torch.cat([copies, places[pad].expand(2)]), unused)


def into(x: Tensor, grid: Grid) -> Tensor:
    """Return values of tokens (1, N, ...) as (R, T, ...)."""
    if not x.is_floating_point():
        return x[0][grid.tokens]
    return into_grid(x.flatten(2)[:, None], grid)[:, 0].unflatten(2, x.shape[2:])


def out_of(x: Tensor, grid: Grid) -> Tensor:
    """Return (R, T, ...) as (1, N, ...)."""
    return x.flatten(0, 1).index_select(0, grid.places.flatten())[None]


def map_tokens(tree: Any, shape: torch.Size, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to the tensors (*shape, ...) in nested tuples, lists and dicts.

    Raises:
        RuntimeError: A tensor belongs to pairs of tokens, such as a mask of attention.
    """
    if isinstance(tree, tuple | list):
        return type(tree)(map_tokens(each, shape, change) for each in tree)
    if isinstance(tree, dict):
        return {name: map_tokens(each, shape, change) for name, each in tree.items()}
    if not isinstance(tree, Tensor):
        return tree
    if tree.dim() == 4 and tree.shape[-1] == shape[1]:
        raise RuntimeError("a mixer has a mask of pairs of tokens")
    return change(tree) if tree.shape[:2] == shape and tree.dim() > 1 else tree


def linear_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost linear layers inside a module, with their adapters."""
    for child in module.children():
        if isinstance(child, FrozenWrapper) or is_linear(child):
            yield child
        else:
            yield from linear_layers(child)
