"""Low-rank updates that differ from row to row of one batch.

The A's of the adapters in the batch lie in one stack, their B's in another, rank below rank.
There are two ways to give each row its own, and the cheaper one is taken at each call:

- masked: every row against the whole stack, in one product, and the ranks that are not the row's
  set to zero. Each adapter is read once; a row pays for the ranks of all of them.
- batched: each row's own ranks, gathered, in one batched product. A row pays for its own ranks
  only (as many as the highest rank among them), and for the copy.

Shapes: M rows of the batch, T tokens, r rank of one adapter, R sum of the ranks in the stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

GATHER_TOKENS = {torch.float32: 4, torch.float64: 4}
"""Copying a row's ranks costs what so many tokens cost in the product; measured on a CPU."""
GATHER_TOKENS_16_BIT = 24
"""Products in 16 bits are faster, and copies are not."""


@dataclass(frozen=True, slots=True)
class RowRanks:
    """Which ranks of a stack are whose.

    Attributes:
        foreign: (M, 1, R) bool: the ranks that are not the row's.
        own: (M * width,): each row's ranks; None where they are the whole stack, in its order.
        width: The highest rank. total: R.
        padded: Rows have less than `width` ranks; `own` names rank R for them, which is zero.
    """

    foreign: Tensor
    own: Tensor | None
    width: int
    total: int
    padded: bool

    @classmethod
    def of(
        cls, slots: Sequence[int | None], ranks: Sequence[int], device: torch.device
    ) -> RowRanks:
        """Find the ranks of each row.

        Args:
            slots: For each row the place of its adapter in the stack, or None.
            ranks: Of the adapters in the stack.
        """
        starts = torch.tensor([0, *ranks]).cumsum(0).tolist()
        width, total = max(ranks), starts[-1]
        own = torch.full((len(slots), width), total)
        foreign = torch.ones(len(slots), 1, total, dtype=torch.bool)
        for row, slot in enumerate(slots):
            if slot is not None:
                start, stop = starts[slot], starts[slot + 1]
                own[row, : stop - start] = torch.arange(start, stop)
                foreign[row, 0, start:stop] = False
        flat = own.flatten()
        in_order = torch.equal(flat, torch.arange(total))
        return cls(
            foreign.to(device),
            None if in_order else flat.to(device),
            width,
            total,
            padded=bool((flat == total).any()),
        )

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Lay tensors (r, n) below each other: (R, n), and a row of zeros where it is needed."""
        zero = [tensors[0].new_zeros(1, tensors[0].shape[1])] if self.padded else []
        return torch.cat([*tensors, *zero])

    def masked_is_cheaper(self, num_tokens: int, dtype: torch.dtype) -> bool:
        """Choose the way for rows of so many tokens."""
        copy = 0 if self.own is None else GATHER_TOKENS.get(dtype, GATHER_TOKENS_16_BIT)
        return num_tokens * self.total < (num_tokens + copy) * self.width


def add_lora_by_row(out: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: RowRanks) -> Tensor:
    """Return ``out[m] + x[m] A^T B^T`` with the A and B of each row m.

    Args:
        out: (M, T, out), the frozen layer's output. x: (M, T, in), its input.
        a: (R, in). b: (R, out), scaled; both made by `ranks.stack`, in `out`'s dtype.
    """
    x = x.to(out.dtype)
    if ranks.masked_is_cheaper(x.shape[1], out.dtype):
        return _masked(out, x, a, b, ranks)
    return _batched(out, x, a, b, ranks)


def _masked(out: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: RowRanks) -> Tensor:
    hidden = functional.linear(x, a[: ranks.total])  # (M, T, R)
    # filled, not multiplied: what another row's adapter makes of this row may be infinite
    hidden = hidden.masked_fill(ranks.foreign, 0)
    flat = torch.addmm(out.flatten(0, 1), hidden.flatten(0, 1), b[: ranks.total])
    return flat.view(out.shape)


def _batched(out: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: RowRanks) -> Tensor:
    if ranks.own is not None:
        a, b = a.index_select(0, ranks.own), b.index_select(0, ranks.own)
    own_a, own_b = (t.view(len(x), ranks.width, -1) for t in (a, b))  # (M, r, in), (M, r, out)
    return torch.baddbmm(out, torch.bmm(x, own_a.transpose(1, 2)), own_b)
