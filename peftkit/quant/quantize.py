"""Quantise the linear layers and stacked experts of a model in place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from peftkit.errors import BaseError, first_few
from peftkit.events import Listener, Progress, ignore
from peftkit.kernels.packed import unpack_rows
from peftkit.model.places import embedding_of, find_places, is_conv1d, is_linear, own_table
from peftkit.quant.layers import FLOATS, Job, Packing, QuantizedLinear, frozen_parameter, pack
from peftkit.quant.weights import adopt_bitsandbytes
from peftkit.settings import BaseConfig

KINDS = ("nf4", "fp4", "int8")
MAX_LISTED = 10
OUTPUT, HEAD, ROUTER, TIED = "the output layer", "a head", "a router", "tied to an embedding"
NEVER_PACKED = (OUTPUT, HEAD, ROUTER, TIED)
"""Reasons for linear layers that are never quantised."""


def quantize_model(
    model: nn.Module,
    kind: str,
    *,
    double_quant: bool = True,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    keep: Collection[str] = (),
    embeddings: str = "none",
    on_event: Listener = ignore,
) -> None:
    """Quantise every linear layer and stack of experts of a model in place, one at a time.

    The output layer, layers tied to an embedding, classification heads, and routers stay
    unquantised. Linear layers become QuantizedLinear. A layer that computes more than x W^T + b
    keeps its class and reads a dequantised weight, like stacked experts; it holds this weight from
    forward to backward, unless the block is recomputed.

    Args:
        kind: "nf4", "fp4" or "int8".
        double_quant: Quantise the scales of the 4-bit kinds as well.
        compute_dtype: By default each weight's dtype.
        device: Device of the quantised weights; the rest of the model is not moved.
        keep: Paths of further modules that stay unquantised, with their submodules.
        embeddings: The kind for the embedding and the output layer, or "none".

    Raises:
        BaseError: Linear layers could not be quantised, or there are none; lists them.
    """
    if kind not in KINDS:
        raise BaseError(f"cannot quantise to {kind!r}.", fix=f"Use one of {', '.join(KINDS)}.")
    adopt_bitsandbytes(model, compute_dtype)
    layers = quantizable(model, keep)
    jobs = quantizable(model, keep, embeddings=True) if embeddings != "none" else layers
    users: dict[int, list[Job]] = {}
    for job in jobs:
        users.setdefault(id(job[1]._parameters.get(job[2])), []).append(job)
    packings: dict[int, Packing] = {}
    problems = []
    for done, (path, module, name) in enumerate(jobs, start=1):
        weight = module._parameters.get(name)
        try:
            if isinstance(module, QuantizedLinear):
                if module.kind != kind:
                    raise ValueError(f"it is in {module.kind} already")
            elif id(weight) not in packings:
                if weight is None:
                    raise ValueError("its weight is no parameter")
                if not path:
                    raise ValueError("it is the whole model; give the model that contains it")
                source = weight.t() if stores_transposed(module, name) else weight
                packed, packing = pack(
                    source.to(device),
                    kind if done <= len(layers) else embeddings,
                    double_quant=double_quant,
                    dtype=compute_dtype,
                )
                new = nn.Parameter(packed, requires_grad=False)
                packings[id(new)] = packing
                for _, user, leaf in users[id(weight)]:
                    user._parameters[leaf] = new  # frees the weight even if the layer is in use
        except ValueError as error:
            problems.append(f"{path}.{name} of {type(module).__name__}: {error}")
        on_event(Progress("Quantising the base", done, len(jobs)))
    if problems or not layers:
        raise not_quantizable(model, kind, problems)
    install_packed(model, jobs, packings, device)


def not_quantizable(model: nn.Module, kind: str, problems: Sequence[str]) -> BaseError:
    """Return the error that lists the weights that cannot be quantised, with reasons."""
    return BaseError(
        f"cannot quantise {type(model).__name__} to {kind}.",
        found=first_few(problems, MAX_LISTED) or "It has no linear layers.",
        fix="Load it with quantize: none, or give a model in 16 or 32 bits.",
    )


def quantizable(
    model: nn.Module, keep: Collection[str] = (), *, embeddings: bool = False
) -> list[Job]:
    """Return all weights to quantise: linear layers under each of their paths, stacks once.

    Args:
        keep: Paths of modules that stay unquantised, with their submodules.
        embeddings: Whether to include the token embedding and the output layer.
    """
    excluded = {id(m) for path in keep for m in model.get_submodule(path).modules()}
    unquantized = excluded | set(never_packed(model))
    jobs = [job for job in _quantizable(model) if id(job[1]) not in unquantized]
    return jobs + embedding_jobs(model, excluded) if embeddings else jobs


def never_packed(model: nn.Module) -> dict[int, str]:
    """Return id(module) -> reason of the linear layers that are never quantised."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if getter else None
    reasons = {id(module): OUTPUT for module in (head.modules() if head else ())}
    for place in find_places(model):
        if place.roles[0] == "head":
            reasons.setdefault(id(place.module), HEAD)
        elif place.roles[0] in ("router", "shared_router") and not place.parameter:
            reasons[id(place.module)] = ROUTER
    tables = (own_table(m) for m in model.modules() if isinstance(m, nn.Embedding))
    tied = {id(table) for table in tables if table is not None}
    for module in model.modules():
        if is_linear(module) and id(own_table(module)) in tied:
            reasons[id(module)] = TIED
    return reasons


def weights_to_pack(
    settings: BaseConfig, model: nn.Module, head: Sequence[str], *, tables: bool = False
) -> dict[Job, str]:
    """Return the weights of a model to pack, with the kind of each ("nf4", ...).

    Args:
        head: Paths of the classification head's modules, which stay unquantised.
        tables: Whether the files may hold the token embedding and the output layer packed.
    """
    packs_towers = settings.quantize_towers or settings.quantize == "none"  # as in the files
    keep = head if packs_towers else (*head, *tower_paths(model))
    jobs: dict[Job, str] = dict.fromkeys(quantizable(model, keep), settings.quantize)
    if tables or settings.quantize_embeddings != "none":
        both = quantizable(model, keep, embeddings=True)
        jobs |= dict.fromkeys(both[len(jobs) :], settings.quantize_embeddings)
    return jobs


def install_packed(
    model: nn.Module,
    jobs: Iterable[Job],
    packings: Mapping[int, Packing],
    device: torch.device | None,
) -> None:
    """Replace layers whose parameters hold packed data by quantised layers.

    Args:
        jobs: `quantizable` of the model before its weights were packed.
        packings: id(parameter) to its packing; other parameters do not change.
        device: Device of the packed weights, to which biases are moved.
    """
    replaced: dict[nn.Module, nn.Module] = {}
    for path, module, name in jobs:
        packed = module._parameters.get(name)
        if module in replaced:
            model.set_submodule(path, replaced[module])
            continue
        if packed is None or (packing := packings.get(id(packed))) is None:
            continue
        if isinstance(module, nn.Embedding):
            scale = embedding_scale(module, packing.dtype)
            replaced[module] = QuantizedEmbedding(packed, packing, module.padding_idx, scale)
            model.set_submodule(path, replaced[module].train(module.training))
            continue
        if name != "weight" or not _packed_is_plain(module, packed, packing):
            parametrize.register_parametrization(module, name, packing, unsafe=True)
            continue
        bias = cast("Tensor | None", module.bias)
        moved = None if bias is None else bias.to(device)
        replaced[module] = QuantizedLinear(packed, packing, moved).train(module.training)
        module._parameters.pop("weight", None)
        model.set_submodule(path, replaced[module])


def stores_transposed(module: nn.Module, name: str) -> bool:
    """Return whether a layer stores its weight transposed, as (in, out)."""
    return name == "weight" and is_conv1d(module) and has_plain_forward(module)


def _packed_is_plain(module: nn.Module, packed: Tensor, packing: Packing) -> bool:
    """Return whether a layer computes x W^T + b, by its class or a test."""
    if has_plain_forward(module) or is_conv1d(module):
        return has_plain_forward(module)
    unpacked, bias = packing(packed), module._parameters.get("bias")
    unpacked = unpacked if bias is None else unpacked.to(bias.device)
    module._parameters["weight"] = nn.Parameter(unpacked, requires_grad=False)
    try:
        return _is_plain(module)
    finally:
        module._parameters["weight"] = cast(nn.Parameter, packed)


def has_plain_forward(module: nn.Module) -> bool:
    """Return whether a layer's class computes x W^T + b."""
    plain: list[Any] = [cls for cls in type(module).__mro__ if cls.__name__ == "Conv1D"]
    return any(type(module).forward is cls.forward for cls in (*plain, nn.Linear))


def tower_paths(model: nn.Module) -> list[str]:
    """Return the paths of the linear layers in a language model's towers and projectors.

    Empty for a model that is a tower itself, or compares two towers.
    """
    return [place.path for place in find_places(model) if place.set_apart and place.path]


def _quantizable(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield (path, module, parameter): linear layers under each of their paths, stacks once."""
    for path, module in model.named_modules(remove_duplicate=False):
        if is_linear(module) and not parametrize.is_parametrized(module, "weight"):
            yield path, module, "weight"
    for place in find_places(model):
        name = place.parameter if place.roles[0].startswith("expert") else None
        if name is not None and name in place.module._parameters:
            yield place.path, place.module, name


def _is_plain(module: nn.Module) -> bool:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None or weight.dtype not in FLOATS or weight.ndim != 2:
        return False
    x = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device)[None]
    with torch.no_grad():
        try:
            expected, output = functional.linear(x, weight, bias), module(x)
        except Exception:  # a layer that rejects such an input is not plain
            return False
    if not isinstance(output, Tensor) or output.shape != expected.shape:
        return False
    # rounding depends on the order of summation
    return bool((output - expected).abs().max() <= 0.02 * expected.abs().max())


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
            rows = unpack_rows(packing.weight(self.packed), packing.dtype, input)
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
