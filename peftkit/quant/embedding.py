"""The token embedding and the output layer in 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from peftkit.kernels.packed import unpack_rows
from peftkit.model.places import embedding_of
from peftkit.quant.layers import Job, Packing, frozen_parameter


class QuantizedEmbedding(nn.Embedding):
    """A frozen embedding with its rows in 4 or 8 bits; only looked-up rows are unpacked.

    Attributes:
        packed, packing: The rows' bits, and their format.
        scale: Factor for looked-up rows.
    """

    def __init__(
        self, packed: Tensor, packing: Packing, padding_idx: int | None = None, scale: float = 1.0
    ) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = packing.form.shape
        self.padding_idx, self.max_norm, self.sparse = padding_idx, None, False
        self.packed = frozen_parameter(packed)
        self.packing, self.scale = packing, scale

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """All rows, dequantised at each access; without the factor."""
        return self.packing(self.packed)

    def forward(self, input: Tensor) -> Tensor:
        packing = self.packing
        if packing.unpacked is not None:
            rows = functional.embedding(input, packing.unpacked)
        else:
            rows = unpack_rows(self.packed, packing.scales, packing.form, packing.dtype, input)
        return rows if self.scale == 1.0 else rows * self.scale


def embedding_jobs(model: nn.Module, excluded: Collection[int]) -> list[Job]:
    """Return all uses of the token embedding's weight and of the output layer's weight.

    Weights with other uses too are left out: they stay unquantised.
    """
    of_model: Any = model
    head = of_model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tables = [module for module in (embedding_of(model), head) if module is not None]
    weights = {id(module._parameters.get("weight")) for module in tables} - {id(None)}
    jobs, unpacked = list[Job](), set[int]()
    for path, module in model.named_modules(remove_duplicate=False):
        weight = id(module._parameters.get("weight"))
        if weight not in weights:
            continue
        if _packs_whole(module) and id(module) not in excluded:
            jobs.append((path, module, "weight"))
        else:
            unpacked.add(weight)
    return [job for job in jobs if id(job[1]._parameters["weight"]) not in unpacked]


def _packs_whole(module: nn.Module) -> bool:
    """Return whether an embedding or output layer computes the same with a packed weight."""
    plain = type(module).forward in (nn.Embedding.forward, nn.Linear.forward)
    return plain or _is_scaled(module)


def _is_scaled(module: nn.Module) -> bool:
    """Return whether an embedding multiplies its rows by a number (BART, Gemma)."""
    return type(module).__name__.endswith("ScaledWordEmbedding") and hasattr(module, "embed_scale")


def embedding_scale(module: Any, dtype: torch.dtype) -> float:
    """Return the factor for an embedding's rows, rounded to their dtype if its class does so."""
    if not _is_scaled(module):
        return 1.0
    if not isinstance(module.embed_scale, Tensor):
        return float(module.embed_scale)
    return torch.tensor(module.scalar_embed_scale, dtype=dtype, device="cpu").item()
