"""The output rows of a layer that an adapter changes: all, or those of some roles of a fused one.

Shapes: out output rows of the layer, N adapted ones, r rank, R = r times the adapted roles,
`...` is E experts, or nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peftkit.errors import AdapterError
from peftkit.model.targets import Site


class RowSlice(nn.Module):
    """The rows of a site, and how tensors of these rows become tensors of all rows and back.

    Args:
        num_outputs: out.
        rank: r of each role's own columns in a matrix (out, R).

    Attributes:
        rows: (N,): indices of the adapted rows; None where all rows are adapted.
        columns: (N, r): the columns of each row's role in a matrix (out, R), likewise.
        num_rows: N.
        num_roles: Roles of a fused layer with a pair of matrices each; 1 for a whole layer.
    """

    rows: Tensor | None
    columns: Tensor | None

    def __init__(
        self, site: Site, num_outputs: int, device: torch.device | None, rank: int = 1
    ) -> None:
        super().__init__()
        self.site, self.num_outputs = site, num_outputs
        parts = list(site.rows.values()) if site.rows else []
        self.num_roles = len(parts) or 1
        rows = columns = None
        if parts:
            rows = torch.cat(parts).to(device)
            owner = torch.arange(len(parts)).repeat_interleave(torch.tensor(list(map(len, parts))))
            columns = (owner[:, None] * rank + torch.arange(rank)).to(device)
        self.num_rows = num_outputs if rows is None else len(rows)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def spread(self, own: Tensor, fill: float = 0.0) -> Tensor:
        """Return a vector (N,) as one of all rows (out,), with `fill` in the others."""
        if self.rows is None:
            return own
        return own.new_full((self.num_outputs,), fill).index_put((self.rows,), own)

    def spread_matrix(self, own: Tensor) -> Tensor:
        """Return B (..., N, r) as that of all rows, (..., out, R), which is zero outside."""
        if self.rows is None or self.columns is None:
            return own
        num_columns = self.num_roles * own.shape[-1]
        full = own.new_zeros(*own.shape[:-2], self.num_outputs, num_columns)
        index: tuple[Tensor, ...] = (self.rows[:, None], self.columns)
        if own.ndim == 3:
            index = (torch.arange(len(own), device=own.device)[:, None, None], *index)
        return full.index_put(index, own)

    def take(self, full: Tensor, fill: float = 0.0) -> Tensor:
        """Return the adapted rows' part (N,) of a file's vector of all rows.

        Raises:
            AdapterError: Another row is not `fill`.
        """
        if self.rows is None:
            return full
        own = full[self.rows.to(full.device)]
        self._check_rest(full != fill, own != fill)
        return own

    def take_matrix(self, full: Tensor) -> Tensor:
        """Return the part (..., N, r) of a file's B (..., out, R).

        Raises:
            AdapterError: B is not zero outside.
        """
        if self.rows is None or self.columns is None:
            return full
        own = full[..., self.rows[:, None].to(full.device), self.columns.to(full.device)]
        self._check_rest(full, own)
        return own

    def _check_rest(self, full: Tensor, own: Tensor) -> None:
        if torch.count_nonzero(full) != torch.count_nonzero(own):
            path = ".".join(filter(None, (self.site.path, self.site.parameter)))
            raise AdapterError(
                f"the adapter of {path} is not one of {', '.join(self.site.roles)}",
                found="it changes rows of other roles too",
                fix=f"Load it as an adapter of the whole layer: target {path} by its name.",
            )
