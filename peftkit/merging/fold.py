"""Merging a weight: W' = method.merged_weight(W) in float32, for a live module or a tensor.

Shapes: weights are (out, in), as the module multiplies; a Conv1D stores the transpose.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from peftkit.adapter import Adapter
from peftkit.errors import MergeError, RunError
from peftkit.events import Listener, Notice, Stage
from peftkit.figures import dtype_name
from peftkit.files import disk
from peftkit.files.tensors import non_finite
from peftkit.formats.open_adapter import Opened
from peftkit.methods.base import AdapterModule, Method
from peftkit.model.places import (
    embedding_of,
    is_conv1d,
    is_linear,
    output_layer,
    own_table,
    unwrap_adapter,
)
from peftkit.quant.weights import weight_of

UNTIED = (
    "The merged model has separate tables for embedding and head (tie_word_embeddings: false): the "
    "base uses one for both, and the adapter changes them differently."
)


@dataclass(slots=True)
class Tally:
    """How much a merge changed the weights, summed over all of them."""

    num_weights: int = 0
    weight: float = 0.0
    """Sum of squares of the weights before."""
    update: float = 0.0
    """Sum of squares of the update."""
    rounding: float = 0.0
    """Sum of squares of the rounding errors of the stored weights."""
    along: float = 0.0
    """Sum of <q(W + U) - q(W), U>, with the weights W, the update U and the rounding q."""
    num_changed: int = 0
    """Number of values that differ after storing."""
    instead: str = ""
    """Advice if the new weights cannot be stored; "" means to choose another dtype."""

    def add(
        self, before: Tensor, exact: Tensor, stored: Tensor, rounded: Tensor | None = None
    ) -> None:
        """Add a weight: the original, the exact merge, and the stored merge (in its dtype).

        Args:
            rounded: The original, rounded like `stored`; None: cast to its dtype.

        Raises:
            MergeError: The stored weight overflows.
        """
        self.num_weights += 1
        self.weight += _squares(before)
        update = exact - before
        self.update += _squares(update)
        new = stored.float()
        self.rounding += _squares(new - exact)
        rounded = before.to(stored.dtype) if rounded is None else rounded
        self.along += float(torch.sum((new - rounded.float()) * update, dtype=torch.float64))
        self.num_changed += int(torch.count_nonzero(new != before))
        if not math.isfinite(self.update):
            raise too_large_values()
        if not math.isfinite(self.rounding):
            dtype = dtype_name(stored.dtype)
            kind = "the types of the base's file" if self.instead else dtype
            raise MergeError(
                f"the merged weights are too large for {kind}",
                fix=self.instead or "Merge with --dtype bf16 or fp32.",
            )

    @property
    def relative_update(self) -> float:
        """Size of the update relative to the weights."""
        return math.sqrt(self.update / self.weight) if self.weight else 0.0

    @property
    def survived(self) -> float:
        """Share of the update in the stored weights: <q(W + U) - q(W), U> / |U|^2.

        Rounding noise that is independent of the update averages out. About 0: the update is
        deleted, because it is smaller than half a step of the grid that the weights are on.
        """
        return self.along / self.update if self.update else 0.0

    @property
    def relative_rounding(self) -> float:
        """Size of the rounding error relative to the update, including the base's own rounding."""
        return math.sqrt(self.rounding / self.update) if self.update else 0.0

    def check(self) -> None:
        """Check that the merged model differs from its base.

        Raises:
            MergeError: The update is zero, or is lost in rounding.
        """
        message = "the merged model would be its base, unchanged"
        if not self.update > 0:
            fix = "Give an adapter that has been trained."
            raise MergeError(message, found="the adapter's update is zero", fix=fix)
        if not self.num_changed:
            fix = self.instead or "Merge with --dtype fp32."
            raise MergeError(message, found="the update is lost when it is rounded", fix=fix)


def too_large_values() -> MergeError:
    """Return the error for an adapter that makes its base compute infinities or NaN."""
    return MergeError(
        "the adapter cannot be merged",
        found="its values are so large that the base computes infinities or NaN with it",
        fix="Its training diverged, or its file is damaged: take an earlier checkpoint.",
    )


def _squares(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float32)) ** 2


def merge_into(
    adapter: Adapter, *, tally: Tally | None = None, dtype: torch.dtype | None = None
) -> nn.Module:
    """Merge an adapter into the live weights of its model and remove its modules.

    Args:
        adapter: An adapter of a model in 16 or 32 bits; if a weight cannot be merged, none is.
        tally: Updated with the changes.
        dtype: The dtype in which the caller stores the weights; used for `tally` only.

    Returns:
        The model with transformers' module classes and the merged weights.

    Raises:
        MergeError: The method has no merged form, or a weight is quantised or shared.
    """
    tally = tally or Tally()
    check_all(adapter)
    for path, module in adapter.modules.items():
        for name in module.changed:
            weight = dict(module.base.named_parameters()).get(name)
            if weight is None or not weight.is_floating_point():
                raise MergeError(
                    f"cannot merge into {path}",
                    found=f"its {name} is quantised ({type(module.base).__name__})",
                    fix="Load the base with quantize='none' and the adapter on it, then merge.",
                )
    for module in adapter.modules.values():
        _fold(module, module.base, dtype, tally)
    adapter.detach()
    return adapter.model


@torch.no_grad()
def _fold(module: AdapterModule, layer: nn.Module, dtype: torch.dtype | None, tally: Tally) -> None:
    """Write the merged weights of a module into a layer.

    Args:
        layer: The module's base, or the same layer of another model.
        dtype: Dtype in which they are stored; by default the layer's.
    """
    stored = module.weights(layer)
    for name, source in module.weights(module.base).items():
        before = source.float()
        exact = module.merged_weight(before, name)
        tally.add(before, exact, exact.to(dtype or stored[name].dtype))
        stored[name].copy_(exact)


@torch.no_grad()
def merged_tensor(
    module: AdapterModule,
    name: str,
    tensor: Tensor,
    *,
    dtype: torch.dtype,
    tally: Tally,
    trained_over: torch.dtype | None = None,
) -> Tensor:
    """Return a tensor of the base's files, in their layout, with the adapter merged in.

    Args:
        module: A module on a skeleton of the base, whose parameter of this name is replaced.
        dtype: Dtype of the result.
        trained_over: Dtype to which the tensor is rounded first.
    """

    def laid_out(values: Tensor) -> Tensor:
        module.base._parameters[name] = nn.Parameter(values, requires_grad=False)
        return module.weights(module.base)[name]

    empty = module.base.get_parameter(name)
    merged = torch.empty_like(tensor, dtype=dtype)
    before = laid_out(tensor if trained_over is None else tensor.to(trained_over)).float()
    exact = module.merged_weight(before, name)
    stored = laid_out(merged).copy_(exact)
    tally.add(before, exact, stored)
    module.base._parameters[name] = empty
    return merged


@torch.no_grad()
def merge_dequantized(adapter: Adapter, dtype: torch.dtype, *, tally: Tally) -> nn.Module:
    """Return a new, unquantised model from a quantised one with an adapter, which is removed.

    Args:
        adapter: An adapter of a model in which some or all weights are quantised.
        dtype: Dtype of every float tensor of the new model.
        tally: Updated for the adapted weights.

    Raises:
        MergeError: The method has no merged form, or a weight is shared.
    """
    modules, quantized = dict(adapter.modules), adapter.model
    check_all(adapter)
    plain = _unquantized_skeleton(quantized)
    _check_unshared(adapter, plain)  # packed copies of a shared weight are separate
    adapter.detach()
    _dequantize(quantized, plain, dtype)
    for path, module in modules.items():
        _fold(module, plain.get_submodule(path), dtype, tally)
    return plain


def _unquantized_skeleton(model: nn.Module) -> nn.Module:
    """Return a model of the same class on the meta device, not quantised, with tied weights."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain: Any = type(model)(config)
    plain.tie_weights()
    return cast(nn.Module, plain)


def _dequantize(model: nn.Module, plain: nn.Module, dtype: torch.dtype) -> None:
    """Load the dequantised weights of a model into a skeleton of its class."""
    state = {}
    for name, expected in plain.state_dict().items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        is_matrix = leaf == "weight" and is_linear(module)
        tensor = weight_of(module) if is_matrix else getattr(module, leaf)
        if is_matrix and is_conv1d(plain.get_submodule(path)):
            tensor = tensor.t()
        assert tensor.shape == expected.shape, name
        state[name] = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype).contiguous()
    plain.load_state_dict(state, assign=True)
    cast(Any, plain).tie_weights()
    if hasattr(model, "generation_config"):  # encoders have none
        cast(Any, plain).generation_config = model.generation_config


def check_all(adapter: Adapter) -> None:
    """Raise MergeError for methods that cannot be merged, and for shared weights."""
    check_mergeable(adapter.method)
    _check_unshared(adapter, adapter.model)


def _check_unshared(adapter: Adapter, model: nn.Module) -> None:
    """Raise MergeError if an adapted weight is shared in the adapter's model, or in a bare one."""
    shared = shared_parameters(model)
    for path, module in adapter.modules.items():
        layer = module.base if model is adapter.model else model.get_submodule(path)
        parameters = dict(layer.named_parameters())
        alone = not module.changes_ties
        if alone and any(id(parameters.get(name)) in shared for name in module.changed):
            raise MergeError(
                f"cannot merge into {path} alone",
                found="It shares its weight with another layer (tied embeddings, shared blocks).",
                fix="Merge into a folder, which separates a tied embedding and head. Or use the "
                "adapter unmerged, or leave this layer out of the targets.",
            )


def untie(adapter: Adapter) -> bool:
    """Separate the embedding and the head of a model if its adapter changes one alone, or each.

    Returns:
        Whether they were tied and are now two tables.
    """
    model: Any = adapter.model
    embedding, head = embedding_of(model), output_layer(model)
    if embedding is None or head is None:
        return False
    tables = (unwrap_adapter(embedding), head)
    table, config = own_table(head), model.config.get_text_config()
    num_users = sum(module._parameters.get("weight") is table for module in model.modules())
    is_one = own_table(tables[0]) is table
    changed = any(m.base in tables and not m.changes_ties for m in adapter.modules.values())
    if not changed or not (config.tie_word_embeddings and (num_users == 2 or not is_one)):
        return False
    if is_one:
        head.weight = nn.Parameter(cast(Tensor, table).detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = config.tie_word_embeddings = False
    return True


def shared_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that more than one module uses (tied embeddings)."""
    uses = Counter(
        id(parameter) for module in model.modules() for parameter in module.parameters(False)
    )
    return {key for key, count in uses.items() if count > 1}


def check_mergeable(method: Method) -> None:
    """Raise MergeError for a method that changes more than weights."""
    if method.unmergeable:
        others = f", or load it with {method.files}" if method.files else ""
        raise MergeError(
            f"an adapter of type '{method.type}' cannot be merged",
            found=method.unmergeable,
            fix=f"Use it unmerged{others}.",
        )


def check_original(method: Method, from_quantized: bool) -> None:
    """Check that the method may be merged into the unquantised weights of its base.

    Raises:
        MergeError: The method compensates for a quantisation error that these do not have.
    """
    if method.fresh_changes and not method.unmergeable and not from_quantized:
        raise MergeError(
            "this adapter cannot be merged into the original weights of its base",
            found=f"Before any training {method.fresh_changes}, and they were not quantised.",
            fix="Merge with --from-quantized into a folder, which uses the weights of training.",
        )


def write_in_memory(
    opened: Opened, folder: Path, dtype: torch.dtype, tally: Tally, on_event: Listener
) -> None:
    """Merge in memory and save as transformers does, every float tensor in `dtype`.

    Raises:
        MergeError: The method has no merged form, or a weight is shared.
        RunError: A weight does not fit the dtype, or the disk is full.
    """
    on_event(Stage("Merging the model in memory"))
    if untie(opened.adapter):
        on_event(Notice(UNTIED))
    kind = opened.base.audit.quantized_as
    if kind == "none":
        model: Any = merge_into(opened.adapter, tally=tally, dtype=dtype).to(dtype)
    else:
        on_event(Notice(dequantised_note(kind)))
        model = merge_dequantized(opened.adapter, dtype, tally=tally)
    if bad := non_finite(model.state_dict()):
        raise RunError(
            f"cannot write {len(bad)} weights in {dtype}",
            found=f"They hold NaN, Infinity, or numbers too large for it, such as {bad[0]}.",
            fix="Write bf16 or fp32.",
        )
    parameters = model.parameters()
    disk.check_space(folder, sum(p.numel() * p.element_size() for p in parameters))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # hides the progress bar
            model.save_pretrained(folder, max_shard_size="5GB")
        opened.base.processor.save_pretrained(folder)
    except (OSError, SafetensorError) as problem:
        free = disk.free_bytes(folder)
        reason = f"{problem}\n{free:,} bytes are free on the disk."
        raise RunError(f"cannot write {folder}", found=reason) from problem
    for path in folder.iterdir():  # safetensors writes files that only their owner can read
        path.chmod((folder / "config.json").stat().st_mode)


def precision_note(kind: str) -> str:
    """Return a note on a merge into the original weights of a base that was quantised."""
    return (
        f"It was trained over the base in {kind} and merged into the original weights. Its "
        f"completions differ slightly from peftkit chat, which loads the base in {kind}."
    )


def dequantised_note(kind: str) -> str:
    """Return a note for the user on what merging into quantised weights costs."""
    return (
        f"Merged into the dequantised {kind} weights of the base, over which the adapter was "
        "trained. The model takes at least 16 bits for each weight and keeps their rounding."
    )
