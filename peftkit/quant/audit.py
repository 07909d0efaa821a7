"""The audit of a model: the storage of every parameter, and the reason if it is not quantised.

It inspects the live modules, not a config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from peftkit.errors import first_few
from peftkit.events import Table
from peftkit.figures import dtype_name, size
from peftkit.model.places import FrozenWrapper, ModelWeight, find_places, is_linear, own_table
from peftkit.quant.layers import Packing, packed_tensors
from peftkit.quant.quantize import NEVER_PACKED, ROUTER, never_packed

MAX_NAMES = 10


@dataclass(frozen=True, slots=True)
class AuditRow:
    """All parameters of one kind.

    Attributes:
        kind: "linear layers", "stacked experts", "embeddings", ...
        stored: "nf4", "fp4", "int8", or the dtype.
        why: Reason why they are not quantised; empty if they are.
        names: The distinct last segments of their paths, in the order of the model.
        num_tensors, num_parameters, num_bytes: Totals. Packed tensors count with their unpacked
            number of parameters, and their bytes include scales; a tied tensor counts once.
    """

    kind: str
    stored: str
    why: str
    names: tuple[str, ...]
    num_tensors: int
    num_parameters: int
    num_bytes: int

    @property
    def is_quantized(self) -> bool:
        return not self.why


@dataclass(frozen=True, slots=True)
class Audit:
    """The storage of a model's parameters.

    Attributes:
        rows: A row per kind, largest first.
        copy_bytes: Bytes of dequantised copies that save time, not in `num_bytes`.
    """

    rows: tuple[AuditRow, ...]
    copy_bytes: int = 0

    @property
    def num_parameters(self) -> int:
        """Number of parameters; `model.parameters()` miscounts quantised ones."""
        return sum(row.num_parameters for row in self.rows)

    @property
    def num_in_matrices(self) -> int:
        """Number of parameters in matrix products: no vectors, embeddings, heads or routers."""
        kinds = ("linear layers", "stacked experts", "other")
        rows = (row for row in self.rows if row.kind in kinds and row.why not in NEVER_PACKED)
        return sum(row.num_parameters for row in rows)

    @property
    def num_bytes(self) -> int:
        return sum(row.num_bytes for row in self.rows)

    @property
    def bits_per_parameter(self) -> float:
        return 8 * self.num_bytes / max(self.num_parameters, 1)

    @property
    def quantized_as(self) -> str:
        """The kind in use ("nf4"); several kinds are joined by "+"; "none" without any."""
        return "+".join(sorted({row.stored for row in self.rows if row.is_quantized})) or "none"

    def table(self) -> Table:
        """Return a row for each kind, the total, and the copies."""
        rows = [
            (
                f"{row.kind}: {first_few(row.names, MAX_NAMES, ', ')}",
                row.stored,
                f"{row.num_tensors:,}",
                f"{row.num_parameters:,}",
                size(row.num_bytes),
                row.why,
            )
            for row in self.rows
        ]
        number = f"{sum(row.num_tensors for row in self.rows):,}"
        bits = f"{self.bits_per_parameter:.2f} bits"
        total = size(self.num_bytes)
        rows.append(("all", bits, number, f"{self.num_parameters:,}", total, ""))
        if self.copy_bytes:
            total = size(self.copy_bytes)
            rows.append(("unpacked copies for speed", "16 or 32 bits", "", "", total, ""))
        columns = ("weights", "stored as", "tensors", "parameters", "size", "not quantised because")
        is_plain = self.quantized_as == "none"
        width = len(columns) - is_plain  # reasons are only useful if some parameters are quantised
        stored = self.rows[0].stored if is_plain and self.rows else self.quantized_as
        summary = (
            f"The base in memory: {self.num_parameters:,} parameters, {stored}, "
            f"{bits} each, {size(self.num_bytes)}"
        )
        if self.copy_bytes:
            summary += f", and {size(self.copy_bytes)} of unpacked copies for speed"
        cells = tuple(row[:width] for row in rows)
        return Table("The base in memory", columns[:width], cells, summary)


def audit(model: nn.Module) -> Audit:
    """Return the audit of a model's parameters, without those of an adapter."""
    groups: dict[tuple[str, str, str], list[tuple[str, int, int]]] = {}
    stacks = {(p.module, p.parameter): p for p in find_places(model) if p.parameter}
    tables = {id(own_table(m)) for m in model.modules() if isinstance(m, nn.Embedding)}
    copy_bytes = 0
    for path, packed, packing in packed_tensors(model):
        kind = "linear layers" if len(packing.form.shape) == 2 else "stacked experts"
        if id(packed) in tables:
            kind = "embeddings"
        fact = (path, packing.form.shape.numel(), packing.num_bytes(packed))
        groups.setdefault((kind, packing.form.kind, ""), []).append(fact)
        if packing.unpacked is not None:
            copy_bytes += packing.unpacked.numel() * packing.unpacked.element_size()
    reasons = never_packed(model)
    if groups:  # otherwise nothing is quantised on any side
        for tower in filter(lambda place: place.set_apart, find_places(model)):
            reasons.setdefault(id(tower.module), f"{tower.side} side: base.quantize_towers")
    for path, module, name, tensor in _plain_parameters(model):
        place = stacks.get((module, name))
        kind, why = _kind_of(module, name, tensor, place, reasons.get(id(module), ""))
        stored = dtype_name(tensor.dtype)
        label = path if name in ("weight", "bias") else f"{path}.{name}"
        fact = (label, tensor.numel(), tensor.nbytes)
        groups.setdefault((kind, stored, why), []).append(fact)
    rows = [
        AuditRow(
            *group,
            # the last segments that are not numbers
            names=tuple(
                dict.fromkeys(
                    next((name for name in reversed(path.split(".")) if not name.isdigit()), path)
                    for path, _, _ in facts
                )
            ),
            num_tensors=len(facts),
            num_parameters=sum(n for _, n, _ in facts),
            num_bytes=sum(b for _, _, b in facts),
        )
        for group, facts in groups.items()
    ]
    return Audit(tuple(sorted(rows, key=lambda row: -row.num_parameters)), copy_bytes)


def _plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield (module path, module, name, parameter) once per unpacked parameter of the base."""
    visited = {id(packed) for _, packed, _ in packed_tensors(model)}
    wrappers = [each for each in model.modules() if isinstance(each, FrozenWrapper)]
    adapters = {part for each in wrappers for part in {*each.modules()} - {*each.base.modules()}}
    for path, module in model.named_modules():
        if module in adapters:
            continue
        for name, tensor in module._parameters.items():
            if tensor is None or id(tensor) in visited or isinstance(module, Packing):
                continue
            visited.add(id(tensor))
            yield path, module, name, tensor


def _kind_of(
    module: nn.Module, name: str, tensor: Tensor, place: ModelWeight | None, reason: str
) -> tuple[str, str]:
    """Return the kind of an unpacked parameter, and the reason why it is not packed."""
    if place is not None:
        if place.roles[0].endswith("router"):
            return "routers", ROUTER
        return "stacked experts", "stacked expert parameter"
    if "bias" in name.lower():
        return "biases", "small"
    if is_linear(module) and name == "weight":
        return "linear layers", reason or "not requested"
    if isinstance(module, nn.Embedding):
        return "embeddings", "looked up, not multiplied"
    if tensor.ndim < 2:
        return "norms and other vectors", "small"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolutions", "not in a linear layer"
    return "other", "not in a linear layer"
