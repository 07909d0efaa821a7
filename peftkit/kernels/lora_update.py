"""Several adapted layers that read one input, their updates beside the products with the base.

    y_i = X W_i^T + b_i + H_i B_i^T        H = X (s A)^T, one product for all layers
    G_i = dy_i B_i        dX = sum over layers of dy_i W_i + G s A
    dA = s G^T X        dB_i = dy_i^T H_i

The base's weights are read as they lie, packed ones too: nothing is laid out anew, which for a
model that fills a GPU would not fit. Each update is added to the base's product where that stands:
one array of the output's size, not two. Neither B A nor dW is formed. Pieces of X may each have
an adapter of their own: the products with the base are made once for all of them.

What the backward pass needs is saved before the products with the base are made. A block that is
recomputed ends with its last saved tensor, so that its last product is not made a second time.

Shapes: M rows of input, m of a piece, R sum of its ranks, in; out of each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from peftkit.kernels.packed import PackedFormat, times_packed, unpack


class Layer(NamedTuple):
    """One layer of the group, and which of the tensors are its own.

    Attributes:
        form: How its weight is packed; None: it is not, and `num_tensors` is one.
        num_tensors: The weight and its scales.
        has_bias: Whether a bias follows them.
    """

    form: PackedFormat | None
    num_tensors: int
    has_bias: bool


class Piece(NamedTuple):
    """Rows of X that one adapter changes; they follow those of the pieces before.

    Attributes:
        num_rows: m. None: all of X.
        layers: Places of the layers that the adapter changes; () for the bare base.
        ranks: Of each of these.
    """

    num_rows: int | None
    layers: tuple[int, ...]
    ranks: tuple[int, ...]


class _Update(NamedTuple):
    """A piece that an adapter changes, and its tensors.

    Attributes:
        span: Its rows. lora_a: (R, in), s A. scales: (R,). lora_b: (out, r) of each layer.
    """

    piece: Piece
    span: slice
    lora_a: Tensor
    scales: Tensor
    lora_b: list[Tensor]

    def rows(self, x: Tensor) -> Tensor:
        """Return its rows of a tensor (M, ...)."""
        return x if self.piece.num_rows is None else x[self.span]

    def by_layer(self, hidden: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Return H (m, r) and B (out, r) of each layer."""
        parts = hidden.split(self.piece.ranks, 1)
        return dict(zip(self.piece.layers, zip(parts, self.lora_b, strict=True), strict=True))


def beside(
    x: Tensor,
    dropped: Tensor | None,
    pieces: tuple[Piece, ...],
    layers: tuple[Layer, ...],
    *tensors: Tensor,
) -> tuple[Tensor, ...]:
    """Return y = X W^T + b + X (s A)^T B^T, (M, out), of each layer; X, A and B have gradients.

    Args:
        x: (M, in). dropped: The input of A where that is another one, after dropout.
        pieces: At least one has an adapter; rows after the last piece have none.
        tensors: Of each piece with an adapter s A (R, in) in x's dtype, s of each of its rows (R,),
            and B (out, r) of each layer; then of each layer its weight, scales and bias; then A
            and then B of each piece's layers: what the gradients go to; not read.
    """
    updates, _, masters = _parted(pieces, layers, tensors)
    read = x if dropped is None else dropped
    with torch.no_grad():
        hidden = [torch.mm(update.rows(read), update.lora_a.t()) for update in updates]
    given = (x, dropped, *hidden, *tensors[: len(tensors) - len(masters)])
    saved: list[Any] = []
    if not torch.compiler.is_compiling():
        masters[0] = Saved.apply(saved, masters[0], *given)
    found: tuple[Tensor, ...] = BesideLinear.apply(saved, pieces, layers, *given, *masters)
    return found


class Saved(torch.autograd.Function):
    """Saves tensors for the backward pass of a node after it, whose input is what this returns."""

    @staticmethod
    def forward(ctx: Any, nodes: list[Any], through: Tensor, *tensors: Tensor | None) -> Tensor:
        """Return `through` as it is, and put this node into `nodes`."""
        ctx.save_for_backward(*tensors)
        ctx.num_tensors = len(tensors)
        nodes.append(ctx)
        return through.view_as(through)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of `through`."""
        return None, grad, *(None for _ in range(ctx.num_tensors))


class BesideLinear(torch.autograd.Function):
    """The product of `beside`, with gradients of X, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        saved: list[Any],
        pieces: tuple[Piece, ...],
        layers: tuple[Layer, ...],
        x: Tensor,
        dropped: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return (M, out) of each layer.

        Args:
            saved: The node that has saved what the backward pass needs; empty: this one does.
            tensors: H (m, R) of each piece with an adapter. The others are those of `beside`.
        """
        hidden, others = _hidden(pieces, tensors)
        updates, base, masters = _parted(pieces, layers, others)
        if not saved:
            ctx.save_for_backward(x, dropped, *tensors[: len(tensors) - len(masters)])
        ctx.saved, ctx.pieces, ctx.layers = saved, pieces, layers
        ctx.dtypes = [master.dtype for master in masters]
        owned = [update.by_layer(h) for update, h in zip(updates, hidden, strict=True)]
        outputs = []
        for n, (layer, own) in enumerate(zip(layers, base, strict=True)):
            bias = own[-1].to(x.dtype) if layer.has_bias else None
            out = functional.linear(x, _weight(layer, own, x.dtype), bias)
            for update, parts in zip(updates, owned, strict=True):
                if n in parts:
                    part, b = parts[n]
                    update.rows(out).addmm_(part, b.t())
            outputs.append(out)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, dropped, and each A and B."""
        x, dropped, *rest = (ctx.saved[0] if ctx.saved else ctx).saved_tensors
        layers: tuple[Layer, ...] = ctx.layers
        hidden, others = _hidden(ctx.pieces, rest)
        updates, base, _ = _parted(ctx.pieces, layers, others)
        grad_x = grad_read = None
        if ctx.needs_input_grad[3]:  # else nothing below these layers learns
            for grad, layer, own in zip(grads, layers, base, strict=True):
                grad_x = _add_product(grad_x, grad, layer, own)
            grad_read = grad_x if dropped is None else torch.zeros_like(dropped)
        masters: list[Tensor] = []
        for update, own_hidden in zip(updates, hidden, strict=True):
            masters += _own_gradients(
                update, own_hidden, grads, x if dropped is None else dropped, grad_read
            )
        cast = [g.to(dtype) for g, dtype in zip(masters, ctx.dtypes, strict=True)]
        grad_dropped = None if dropped is None else grad_read
        return None, None, None, grad_x, grad_dropped, *[None] * len(rest), *cast


def _own_gradients(
    update: _Update,
    hidden: Tensor,
    grads: Sequence[Tensor],
    read: Tensor,
    grad_read: Tensor | None,
) -> list[Tensor]:
    """Return the gradients of a piece's A and B; that of its rows of what A reads is added."""
    own = {n: update.rows(grads[n]) for n in update.piece.layers}
    parts = update.by_layer(hidden)
    backs = [torch.mm(grad, parts[n][1]) for n, grad in own.items()]
    back = torch.cat(backs, 1) if len(backs) > 1 else backs[0]
    if grad_read is not None:
        update.rows(grad_read).addmm_(back, update.lora_a)
    grad_a = torch.mm(back.t(), update.rows(read)) * update.scales[:, None]
    grads_b = [torch.mm(grad.t(), parts[n][0]) for n, grad in own.items()]
    return [*grad_a.split(update.piece.ranks), *grads_b]


def _hidden(pieces: tuple[Piece, ...], tensors: Sequence[Tensor]) -> tuple[Any, Any]:
    """Return H of each piece with an adapter, and all other tensors."""
    count = sum(bool(piece.layers) for piece in pieces)
    return tensors[:count], tensors[count:]


def _parted(
    pieces: tuple[Piece, ...], layers: tuple[Layer, ...], tensors: Sequence[Tensor]
) -> tuple[list[_Update], list[list[Tensor]], list[Tensor]]:
    """Return the pieces with an adapter, what each layer's base has, and all that is left."""
    rest, updates, base, start = list(tensors), [], [], 0
    for piece in pieces:
        span = slice(start, start + (piece.num_rows or 0))
        start = span.stop
        if piece.layers:
            lora_a, scales, *lora_b = rest[: 2 + len(piece.layers)]
            updates.append(_Update(piece, span, lora_a, scales, lora_b))
            rest = rest[2 + len(piece.layers) :]
    for layer in layers:
        count = layer.num_tensors + layer.has_bias
        base.append(rest[:count])
        rest = rest[count:]
    return updates, base, rest


def _weight(layer: Layer, own: list[Tensor], dtype: torch.dtype) -> Tensor:
    if layer.form is None:
        return own[0].to(dtype)  # of another one under autocast
    return unpack(own[0], tuple(own[1 : layer.num_tensors]), layer.form, dtype)


def _add_product(total: Tensor | None, grad: Tensor, layer: Layer, own: list[Tensor]) -> Tensor:
    """Return total + dy W; dy W where there is no total yet."""
    if layer.form is not None:
        return times_packed(grad, own[0], own[1 : layer.num_tensors], *layer.form, total)
    weight = own[0].to(grad.dtype)
    return torch.mm(grad, weight) if total is None else torch.addmm(total, grad, weight)


def add_lora(base_out: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """Return ``base_out + scaling * x A^T B^T`` (Hu et al., 2021, eq. 3).

    The scaled B and one addmm leave no temporary of the output's size, and autograd's own formulas
    are then the minimal ones: G = dY (sB), dA = G^T x, dB = s dY^T (x A^T), dx = G A.

    Args:
        base_out: (..., out), the frozen layer's output.
        x: (..., in), the layer's input (after dropout).
        lora_a: (R, in). lora_b: (out, R). Both are cast to `base_out`'s dtype here.
        scaling: alpha / r.
    """
    dtype = base_out.dtype
    hidden = functional.linear(x.to(dtype), lora_a.to(dtype))  # (..., R)
    scaled_b = (scaling * lora_b).to(dtype)  # (out, R), scaled in the adapter's precision
    flat = torch.addmm(
        base_out.reshape(-1, base_out.shape[-1]),
        hidden.reshape(-1, hidden.shape[-1]),
        scaled_b.t(),
    )
    return flat.view(base_out.shape)


def low_rank(x: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
    """Return ``x A^T B^T`` (..., out); shapes as in `add_lora`."""
    return functional.linear(functional.linear(x, lora_a.to(x.dtype)), lora_b.to(x.dtype))


def adapted_row_norms(
    weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float, squared_norms: Tensor
) -> Tensor:
    """Return ||W + s B A|| of each output row without forming the sum.

    ||w + s b A||^2 = ||w||^2 + 2 s b (A w) + s^2 b (A A^T) b^T for a row w of W and b of B.

    Args:
        weight: (out, in). lora_a: (R, in). lora_b: (out, R).
        squared_norms: (out,), ||w||^2, which training never changes.

    Returns:
        (out,) float32.
    """
    a, b = lora_a.float(), lora_b.float()
    cross = functional.linear(weight, lora_a.to(weight.dtype)).float()  # (out, R) = W A^T
    gram = a @ a.t()  # (R, R)
    squared = squared_norms + ((2 * scaling) * cross + (scaling * scaling) * (b @ gram)).mul(b).sum(
        1
    )
    return squared.clamp_min(torch.finfo(torch.float32).tiny).sqrt()
