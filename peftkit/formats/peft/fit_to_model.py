"""Fits an adapter's files to a model: the modules it adapts; whether config and tensors agree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from peftkit.adapter import Adapter
from peftkit.errors import AdapterError, first_few
from peftkit.files.strict_json import shown
from peftkit.formats.peft.config_fields import ANY, shortest_endings, sites_of, targeted, unmatched
from peftkit.methods.modules_to_save import find_rows, named_modules
from peftkit.methods.protocol import Method
from peftkit.methods.table import format_of
from peftkit.model.targets import Site


def fit_to_model(
    model: nn.Module,
    method: Method,
    fields: Mapping[str, Any],
    tensors: Collection[str],
    *,
    folder: Path,
    made_here: bool,
) -> tuple[Method, list[Site]]:
    """Return a folder's method with the modules that it adapts in a model.

    Args:
        method, fields, tensors: What the folder holds; of the tensors the names.
        folder: For messages.
        made_here: Saved by peftkit, so that the method has the user's targets. Otherwise they come
            from PEFT's config and the tensors, and the returned method has them.

    Raises:
        AdapterError: A tensor belongs to no module that the method could adapt, or is missing.
        TargetError: The method names a module that is not in this model.
    """
    if made_here:
        full = named_modules(model, method.train_fully)
    else:
        full = _trained_whole(method, tensors, model, folder)
        method = method.model_copy(update={"train_fully": tuple(full)})
    beside = [*full, *find_rows(model, method)]
    rest = [name for name in tensors if not any(name.startswith(f"{p}.") for p in beside)]
    places = method.candidates(model)
    shared = method.shared_names
    strange = sorted(name for name in rest if name not in shared and not _owner(name, places))
    if strange or not rest:
        raise AdapterError(
            f"the adapter in {folder} does not fit {type(model).__name__}",
            found="\n".join(f"unexpected: {name}" for name in strange) or "no tensors",
            fix="Use the base it was trained on: peftkit inspect ADAPTER",
        )
    if made_here:
        return method, method.sites(model)
    if method.acts_on_input:
        sites = method.sites(model)
    else:
        sites = sites_of(fields, places, {_owner(name, places) for name in rest})
    paths = (f"{s.path}.{s.parameter}" if s.parameter else s.path for s in sites)
    targets = tuple(dict.fromkeys(paths))  # saved again, it says where it sits
    return method.model_copy(update={"targets": targets}), sites


def _trained_whole(
    method: Method, tensors: Collection[str], model: nn.Module, folder: Path
) -> list[str]:
    """Return the paths of the modules that a foreign file's `modules_to_save` names.

    By PEFT's own rule, which ignores dots. A name may match nothing in this model.
    """
    found = [
        path
        for path, module in model.named_modules()
        if path.endswith(method.train_fully) and any(True for _ in module.parameters())
    ]
    missing = [path for path in found if not any(n.startswith(f"{path}.") for n in tensors)]
    if missing:
        raise AdapterError(
            f"{folder} has no tensors for the module {_some(missing)}",
            found=f"modules_to_save: {_some(method.train_fully)}",
            fix="The file is incomplete, or belongs to another base.",
        )
    return found


def _owner(name: str, places: Collection[str]) -> str:
    """Return the module that a tensor belongs to, or an empty string."""
    while name and name not in places:
        name = name.rpartition(".")[0]
    return name


def check_targets_of(fields: Mapping[str, Any], adapter: Adapter, folder: Path) -> None:
    """Refuse a config whose targets are not the modules with tensors: scales would be wrong.

    Raises:
        AdapterError: Names targets without tensors, or modules with tensors that are no target.
    """
    paths = {path for path, module in adapter.own.items() if not module.stacked}
    targets = fields.get("target_modules")
    stacks = [
        f"{path}.{name}"
        for path, module in adapter.own.items()
        for name in module.stacked or ("weight",)
    ]
    missing = unmatched(targets, paths | adapter.full)
    missing += unmatched(fields.get("target_parameters"), stacks)
    if missing:
        raise AdapterError(
            f"{folder} has no tensors for the target {_some(missing)}",
            found=f"tensors for {_some(shortest_endings(paths, []))}",
            fix="The file is incomplete, or belongs to another base.",
        )
    extra = paths - set(targeted(paths, targets))
    extra -= {p for p in paths if targeted([f"{p}.weight"], fields.get("target_parameters"))}
    if extra and targets not in (None, ANY):
        raise AdapterError(
            f"{folder} has tensors for modules that its config does not target",
            found=_some(sorted(extra)),
            fix="The config or the tensors belong to another adapter.",
        )


def _some(names: Sequence[str]) -> str:
    """Return the first few of untrusted names, shortened."""
    return first_few(map(shown, names), 5, ", ")


def completed(adapter: Adapter, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the tensors that a foreign file leaves out, because PEFT computes them when loading."""
    complete: dict[str, Tensor] = {}
    for path, module in adapter.modules.items():
        own = {
            n.removeprefix(path + "."): t for n, t in tensors.items() if n.startswith(path + ".")
        }
        try:
            own = dict(format_of(adapter.method).with_missing(module, own))
        except KeyError as error:
            if not own:
                continue  # named with all others that are missing
            raise AdapterError(
                f"{path} has no tensor {error}", fix="The file is incomplete."
            ) from error
        complete |= {f"{path}.{name}": tensor for name, tensor in own.items()}
    return complete | {name: t for name, t in tensors.items() if name not in complete}
