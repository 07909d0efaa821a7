"""The adapted rows of a fused weight, and tensors of these rows within tensors of all rows.

Shapes: out output rows of a layer, N adapted ones, r rank, R = r times the adapted roles, `...` is
E experts, or nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peftkit.errors import AdapterError
from peftkit.model.targets import Site


class RowSlice(nn.Module):
    """The adapted rows of a site; expands tensors of these rows to all rows, and extracts them.

    Args:
        num_outputs: out.
        rank: r; each role has r columns of a matrix (out, R).

    Attributes:
        rows: (N,) indices of the adapted rows; None if all rows are adapted.
        columns: (N, r) columns of each row's role in a matrix (out, R), or None.
        num_rows: N.
        num_roles: Targeted roles of a fused layer, each with a pair of matrices; 1 for a whole
            layer.
    """

    rows: Tensor | None
    columns: Tensor | None

    def __init__(
        self, site: Site, num_outputs: int, device: torch.device | None, rank: int = 1
    ) -> None:
        super().__init__()
        self.site, self.num_outputs = site, num_outputs
        rows_of_roles = list(site.rows.values()) if site.rows else []
        self.num_roles = len(rows_of_roles) or 1
        rows = columns = None
        if rows_of_roles:
            rows = torch.cat(rows_of_roles).to(device)
            sizes = torch.tensor(list(map(len, rows_of_roles)))
            owner = torch.arange(len(sizes)).repeat_interleave(sizes)  # (N,): role of each row
            columns = (owner[:, None] * rank + torch.arange(rank)).to(device)
        self.num_rows = num_outputs if rows is None else len(rows)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def spread(self, vector: Tensor, fill: float = 0.0) -> Tensor:
        """Expand a vector (N,) to all rows (out,), with `fill` elsewhere."""
        if self.rows is None:
            return vector
        return vector.new_full((self.num_outputs,), fill).index_put((self.rows,), vector)

    def spread_matrix(self, b: Tensor) -> Tensor:
        """Expand B (..., N, r) to all rows and columns (..., out, R), with zeros elsewhere."""
        if self.rows is None or self.columns is None:
            return b
        full = b.new_zeros(*b.shape[:-2], self.num_outputs, self.num_roles * b.shape[-1])
        index: tuple[Tensor, ...] = (self.rows[:, None], self.columns)
        if b.ndim == 3:
            index = (torch.arange(len(b), device=b.device)[:, None, None], *index)
        return full.index_put(index, b)

    def take(self, full: Tensor, fill: float = 0.0) -> Tensor:
        """Extract the adapted rows (N,) of a file's vector of all rows.

        Raises:
            AdapterError: A value in another row is not `fill`.
        """
        if self.rows is None:
            return full
        rows = full[self.rows.to(full.device)]
        self._check_rest(full != fill, rows != fill)
        return rows

    def take_matrix(self, full: Tensor) -> Tensor:
        """Extract the adapted rows and columns (..., N, r) of a file's B (..., out, R).

        Raises:
            AdapterError: B has other nonzero values.
        """
        if self.rows is None or self.columns is None:
            return full
        rows = full[..., self.rows[:, None].to(full.device), self.columns.to(full.device)]
        self._check_rest(full, rows)
        return rows

    def _check_rest(self, full: Tensor, rows: Tensor) -> None:
        if torch.count_nonzero(full) != torch.count_nonzero(rows):
            path = ".".join(filter(None, (self.site.path, self.site.parameter)))
            raise AdapterError(
                f"the adapter of {path} is not one of {', '.join(self.site.roles)}",
                found="it changes rows of other roles too",
                fix=f"Load it as an adapter of the whole layer: target {path} by its name.",
            )
