"""Low-rank updates that differ between the rows of a batch.

The A's of the adapters in the batch are concatenated along the ranks, and so are their B's. Each
call uses the cheaper of two algorithms:

- masked: one product of every row with all ranks, then the ranks of other adapters are set to zero.
  Each adapter is read once; each row costs the sum of all ranks.
- batched: one batched product with the gathered ranks of each row. Each row costs the highest rank
  of the adapters, plus the copy.

Shapes: M rows of the batch, T tokens, r rank of one adapter, R sum of the ranks in the stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

GATHER_TOKENS = {torch.float32: 4, torch.float64: 4}
"""Cost of copying a row's ranks, in tokens of the product; measured on a CPU."""
GATHER_TOKENS_16_BIT = 24
"""The same in 16 bits, where products are faster but copies are not."""


@dataclass(frozen=True, slots=True)
class RowRanks:
    """The ranks in a stack that belong to each row.

    Attributes:
        foreign: (M, 1, R) bool: the ranks that do not belong to the row.
        indices: (M * width,): each row's ranks; None if these are the whole stack in order.
        width: The highest rank. total: R.
        padded: Whether rows have fewer than `width` ranks; `indices` is then padded with R, a row
            of zeros.
    """

    foreign: Tensor
    indices: Tensor | None
    width: int
    total: int
    padded: bool

    @classmethod
    def of(
        cls, slots: Sequence[int | None], ranks: Sequence[int], device: torch.device
    ) -> RowRanks:
        """Return the ranks of each row.

        Args:
            slots: Index of each row's adapter in the stack, or None.
            ranks: Rank of each adapter in the stack.
        """
        starts = torch.tensor([0, *ranks]).cumsum(0).tolist()
        width, total = max(ranks), starts[-1]
        indices = torch.full((len(slots), width), total)
        foreign = torch.ones(len(slots), 1, total, dtype=torch.bool)
        for row, slot in enumerate(slots):
            if slot is not None:
                start, stop = starts[slot], starts[slot + 1]
                indices[row, : stop - start] = torch.arange(start, stop)
                foreign[row, 0, start:stop] = False
        flat = indices.flatten()
        in_order = torch.equal(flat, torch.arange(total))
        return cls(
            foreign.to(device),
            None if in_order else flat.to(device),
            width,
            total,
            padded=bool((flat == total).any()),
        )

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenate tensors (r, n) to (R, n), with a row of zeros if `padded`."""
        zero = [tensors[0].new_zeros(1, tensors[0].shape[1])] if self.padded else []
        return torch.cat([*tensors, *zero])

    def masked_is_cheaper(self, num_tokens: int, dtype: torch.dtype) -> bool:
        """Return whether the masked algorithm is cheaper for rows of this many tokens."""
        copy = 0 if self.indices is None else GATHER_TOKENS.get(dtype, GATHER_TOKENS_16_BIT)
        return num_tokens * self.total < (num_tokens + copy) * self.width


def add_lora_by_row(out: Tensor, x: Tensor, a: Tensor, b: Tensor, ranks: RowRanks) -> Tensor:
    """Return ``out[m] + x[m] A^T B^T`` with the A and B of each row m, in place of `out`.

    Args:
        out: (M, T, out), the frozen layer's output, contiguous. x: (M, T, in), its input.
        a: (R, in). b: (R, out), scaled; both from `ranks.stack`, in `out`'s dtype.
    """
    x = x.to(out.dtype)
    if ranks.masked_is_cheaper(x.shape[1], out.dtype):
        hidden = functional.linear(x, a[: ranks.total])  # (M, T, R)
        # filled, not multiplied by zero: other adapters may give infinite values for this row
        hidden = hidden.masked_fill(ranks.foreign, 0)
        out.view(-1, out.shape[-1]).addmm_(hidden.flatten(0, 1), b[: ranks.total])
        return out
    if ranks.indices is not None:
        a, b = a.index_select(0, ranks.indices), b.index_select(0, ranks.indices)
    row_a, row_b = (t.view(len(x), ranks.width, -1) for t in (a, b))  # (M, r, in), (M, r, out)
    return out.baddbmm_(torch.bmm(x, row_a.transpose(1, 2)), row_b)
