"""Merging a weight: W' = method.merged_weight(W) in float32, for a live module or a tensor.

Shapes: every weight here is (out, in), as the module multiplies; a Conv1D keeps it transposed.
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
from peftkit.files import disk
from peftkit.files.tensors import non_finite
from peftkit.formats.open_adapter import Opened
from peftkit.methods.base import AdapterModule, Method
from peftkit.model.places import is_conv1d, is_linear
from peftkit.quant.weights import weight_of


@dataclass(slots=True)
class Tally:
    """How much a merge changed the weights, summed over all of them."""

    num_weights: int = 0
    weight: float = 0.0
    """Sum of squares of the weights before."""
    update: float = 0.0
    """Sum of squares of the update."""
    rounding: float = 0.0
    """Sum of squares of what was lost when the new weights were stored."""
    num_changed: int = 0
    """Number of values that differ after storing."""
    instead: str = ""
    """What to do where the new weights cannot be stored; "": give another dtype."""

    def add(self, before: Tensor, exact: Tensor, stored: Tensor) -> None:
        """Add one weight: before, exactly merged, and as stored (in its own dtype).

        Raises:
            MergeError: It overflows.
        """
        self.num_weights += 1
        self.weight += _squares(before)
        update = exact - before
        self.update += _squares(update)
        new = stored.float()
        self.rounding += _squares(new - exact)
        self.num_changed += int(torch.count_nonzero(new != before))
        if not math.isfinite(self.update):
            raise too_large_values()
        if not math.isfinite(self.rounding):
            own = str(stored.dtype).removeprefix("torch.")
            kind = "the types of the base's file" if self.instead else own
            raise MergeError(
                f"the merged weights are too large for {kind}",
                fix=self.instead or "Merge with --dtype bf16 or fp32.",
            )

    @property
    def relative_update(self) -> float:
        """Size of the update relative to the weights."""
        return math.sqrt(self.update / self.weight) if self.weight else 0.0

    @property
    def relative_rounding(self) -> float:
        """Size of the rounding error, relative to the update."""
        return math.sqrt(self.rounding / self.update) if self.update else 0.0

    def check(self) -> None:
        """Refuse a merge that leaves the model equal to its base.

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
    """Return the error for an adapter with which its base computes no finite numbers."""
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
        adapter: On a model in 16 or 32 bits; nothing is changed unless all of it can be merged.
        tally: Counts what was done.
        dtype: The one the caller will store the weights in; used for `tally` only.

    Returns:
        The model, with the classes that transformers gave it and the merged weights.

    Raises:
        MergeError: The method has no merged form, or a weight is quantised or is shared.
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
        dtype: In which they will be stored; by default the layer's own.
    """
    stored = module.weights(layer)
    for name, source in module.weights(module.base).items():
        before = source.float()
        exact = module.merged_weight(before, name)
        tally.add(before, exact, exact.to(dtype or stored[name].dtype))
        stored[name].copy_(exact)


@torch.no_grad()
def merged_tensor(
    module: AdapterModule, name: str, tensor: Tensor, *, dtype: torch.dtype, tally: Tally
) -> Tensor:
    """Return a tensor of the base's files, laid out as there, with the adapter merged in.

    Args:
        module: On a base without weights of its own, whose parameter of this name is replaced.
        dtype: Of the result.
    """

    def laid_out(values: Tensor) -> Tensor:
        module.base._parameters[name] = nn.Parameter(values, requires_grad=False)
        return module.weights(module.base)[name]

    empty = module.base.get_parameter(name)
    merged = torch.empty_like(tensor, dtype=dtype)
    before = laid_out(tensor).float()
    exact = module.merged_weight(before, name)
    stored = laid_out(merged).copy_(exact)
    tally.add(before, exact, stored)
    module.base._parameters[name] = empty
    return merged


@torch.no_grad()
def merge_dequantized(adapter: Adapter, dtype: torch.dtype, *, tally: Tally) -> nn.Module:
    """Return a new, unquantised model from a quantised one with an adapter, which is removed.

    Args:
        adapter: On a model whose weights are quantised, some or all.
        dtype: Of every float tensor of the new model.
        tally: Updated for the adapted weights.

    Raises:
        MergeError: The method has no merged form, or a weight is shared.
    """
    modules, quantized = dict(adapter.modules), adapter.model
    check_all(adapter)
    adapter.detach()
    plain = _dequantized(quantized, dtype)
    for path, module in modules.items():
        _fold(module, plain.get_submodule(path), dtype, tally)
    return plain


def _dequantized(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Build another model of this class, with dequantised weights."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
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
        plain.generation_config = model.generation_config
    return plain


def check_all(adapter: Adapter) -> None:
    """Refuse methods that cannot be merged, and weights that another module shares."""
    check_mergeable(adapter.method)
    shared = shared_parameters(adapter.model)
    for path, module in adapter.modules.items():
        parameters = dict(module.base.named_parameters())
        alone = not module.changes_ties
        if alone and any(id(parameters.get(name)) in shared for name in module.changed):
            raise MergeError(
                f"cannot merge into {path} alone",
                found="it shares its weight with another layer (tied embeddings)",
                fix="Use the adapter unmerged, or leave this layer out of the targets.",
            )


def shared_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that more than one module uses (tied embeddings)."""
    uses = Counter(
        id(parameter) for module in model.modules() for parameter in module.parameters(False)
    )
    return {key for key, count in uses.items() if count > 1}


def check_mergeable(method: Method) -> None:
    """Raise MergeError, by name, for a method that changes more than weights."""
    if method.unmergeable:
        others = f", or load it with {method.files}" if method.files else ""
        raise MergeError(
            f"an adapter of type '{method.type}' cannot be merged",
            found=method.unmergeable,
            fix=f"Use it unmerged{others}.",
        )


def check_original(method: Method, from_quantized: bool) -> None:
    """Refuse to merge into the original weights what makes up for their loss in quantising.

    Raises:
        MergeError: The method compensates for a quantisation error that is not there.
    """
    if method.fresh_changes and not method.unmergeable and not from_quantized:
        raise MergeError(
            "this adapter cannot be merged into the original weights of its base",
            found=f"Before any training {method.fresh_changes}, and they were not quantised.",
            fix="Merge with --from-quantized into a folder: into the weights of training.",
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
    kind = opened.base.audit.quantized_as
    if kind == "none":
        model: Any = merge_into(opened.adapter, tally=tally, dtype=dtype).to(dtype)
    else:
        on_event(Notice(cost_of(kind)))
        model = merge_dequantized(opened.adapter, dtype, tally=tally)
    if bad := non_finite(model.state_dict()):
        raise RunError(
            f"cannot write {len(bad)} weights in {dtype}",
            found=f"they hold NaN, Infinity, or numbers too large for it, as {bad[0]}",
            fix="Write bf16 or fp32.",
        )
    parameters = model.parameters()
    disk.check_space(folder, sum(p.numel() * p.element_size() for p in parameters))
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
            model.save_pretrained(folder, max_shard_size="5GB")
        opened.base.processor.save_pretrained(folder)
    except (OSError, SafetensorError) as problem:
        free = disk.free_bytes(folder)
        reason = f"{problem}\n{free:,} bytes are free on the disk."
        raise RunError(f"cannot write {folder}", found=reason) from problem
    for path in folder.iterdir():  # the library writes them for their owner alone
        path.chmod((folder / "config.json").stat().st_mode)


def precision_note(kind: str) -> str:
    """Return a note on a merge into the original weights of a base that was quantised."""
    return (
        f"It was trained over the base in {kind} and merged into the original weights, so that "
        f"its answers differ a little from those of peftkit chat, which loads {kind}."
    )


def cost_of(kind: str) -> str:
    """Return a note for the user on what merging into quantised weights costs."""
    return (
        f"Merged into the {kind} weights of the base, dequantised: that is what the adapter was "
        "trained over. The model takes 16 bits for each weight or more, and keeps their rounding."
    )
