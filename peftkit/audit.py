"""The audit of a model: how every parameter is really stored, and why where it is not in 4 or 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

from peftkit.events import Table

MAX_NAMES = 10


@dataclass(frozen=True, slots=True)
class AuditRow:
    """All parameters of one kind.

    Attributes:
        kind: "linear layers", "stacked experts", "embeddings", ...
        names: The last part of their names, each once, in the order of the model.
        stored: "nf4", "fp4", "int8", or the dtype.
        num_tensors, num_parameters, num_bytes: Bytes with scales; a tensor in two places is one.
        why: Why they are not quantised; empty where they are, or where nothing was asked for.
    """

    kind: str
    names: tuple[str, ...]
    stored: str
    num_tensors: int
    num_parameters: int
    num_bytes: int
    why: str = ""

    @property
    def is_quantized(self) -> bool:
        """Whether these are in 4 or 8 bits."""
        return self.stored in ("nf4", "fp4", "int8")


@dataclass(frozen=True, slots=True)
class Audit:
    """What a model's parameters are stored as, read from the live modules.

    Attributes:
        rows: Quantised kinds first, then by size.
        copy_bytes: Of the dequantised copies that are kept for speed, on top of `num_bytes`.
    """

    rows: tuple[AuditRow, ...]
    copy_bytes: int = 0

    @property
    def num_parameters(self) -> int:
        """Number of parameters; packed ones count as what they stand for."""
        return sum(row.num_parameters for row in self.rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters, without the kept copies."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def bits_per_parameter(self) -> float:
        """Mean over all parameters, scales counted in."""
        return 8 * self.num_bytes / max(self.num_parameters, 1)

    @property
    def quantized_as(self) -> str:
        """The kind that is quantised ("nf4"), several joined by +, or "none"."""
        return "+".join(sorted({row.stored for row in self.rows if row.is_quantized})) or "none"

    def table(self) -> Table:
        """Return the audit as a table to show: a row for each kind, and the total."""
        rows = [
            (
                f"{row.kind}: {_listed(row.names)}",
                row.stored,
                f"{row.num_tensors:,}",
                f"{row.num_parameters:,}",
                _megabytes(row.num_bytes),
                row.why,
            )
            for row in self.rows
        ]
        bits = f"{self.bits_per_parameter:.2f} bits each"
        total = ("all", bits, str(sum(row.num_tensors for row in self.rows)))
        rows.append((*total, f"{self.num_parameters:,}", _megabytes(self.num_bytes), ""))
        if self.copy_bytes:
            why = "dequantised once, kept for speed"
            rows.append(("copies of the quantised", "", "", "", _megabytes(self.copy_bytes), why))
        columns = ("weights", "stored as", "tensors", "parameters", "size", "why not quantised")
        return Table("The base as it is in memory", columns, tuple(rows))


def _listed(names: tuple[str, ...]) -> str:
    more = f", {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
