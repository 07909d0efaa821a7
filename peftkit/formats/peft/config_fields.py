"""Which modules an adapter adapts, as PEFT's config says it: by the ends of their names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import Any

from peftkit.adapter import Adapter
from peftkit.formats.peft.target_modules import shortest_endings, targeted
from peftkit.methods.modules_to_save import named_modules
from peftkit.methods.protocol import AdapterModule
from peftkit.methods.table import format_of
from peftkit.methods.token_rows import TokenRows
from peftkit.model.targets import Site

LAYERS = ("layers_to_transform", "exclude_modules")
"""Fields that exclude modules from the targets again."""


PATTERNS = ("rank_pattern", "alpha_pattern")
_TAKEN = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Module names that PEFT takes for experts in a model with stacked experts."""


def written_fields(adapter: Adapter) -> dict[str, Any]:
    """Return the config fields of the adapter's method and targets."""
    modules, method, form = adapter.own, adapter.method, format_of(adapter.method)
    places = method.candidates(adapter.model)
    as_weights = _as_weights(modules, places) if form.peft_type == "LORA" else set()
    parameters = {f"{path}.{name}" for path, module in modules.items() for name in module.stacked}
    parameters |= {f"{path}.weight" for path in as_weights}
    subsets: dict[str, set[str]] = {field: set() for field in ("", *form.subset_fields)}
    for path, module in modules.items():
        if not module.stacked and path not in as_weights:
            subsets[form.subset_of(module)].add(path)
    others = {path.removesuffix(".base") for path, _ in adapter.model.named_modules()}
    others |= modules.keys()
    endings = {field: shortest_endings(paths, others - paths) for field, paths in subsets.items()}
    fields: dict[str, Any] = {"target_modules": sorted({e for es in endings.values() for e in es})}
    fields |= {field: endings[field] for field in form.subset_fields}
    if parameters:
        rest = {name.replace(".base.", ".") for name, _ in adapter.model.named_parameters()}
        rest |= _stacks(places)
        fields["target_parameters"] = shortest_endings(parameters, rest - parameters)
    fields |= form.fields(method, adapter.model, modules)
    rows = {path: m for path, m in adapter.modules.items() if isinstance(m, TokenRows)}
    if whole := set(named_modules(adapter.model, method.train_fully)):
        fields["modules_to_save"] = _bare_endings(whole, others - whole)
    if isinstance(method.token_rows, dict):
        kept = {path: module.tokens.tolist() for path, module in rows.items() if module.owned}
        fields["trainable_token_indices"] = kept
    elif rows:  # of the input embedding, and of what is tied to it
        fields["trainable_token_indices"] = list(method.token_rows)
    for name in PATTERNS if as_weights else ():
        if name in fields:
            fields[name] = {
                f"{path}.weight" if path in as_weights else path: value
                for path, value in fields[name].items()
            }
    return fields


def _bare_endings(paths: Collection[str], others: Collection[str]) -> list[str]:
    """Return endings as PEFT reads `modules_to_save`, which ignores dots."""
    return sorted(
        next(
            (
                ending
                for ending in accumulate(reversed(path.split(".")), lambda end, s: f"{s}.{end}")
                if not any(other.endswith(ending) for other in others)
            ),
            path,
        )
        for path in paths
    )


def _as_weights(
    modules: Mapping[str, AdapterModule], places: Mapping[str, tuple[str, ...]]
) -> set[str]:
    """Return the linear layers that must be written as `target_parameters` for PEFT.

    In models with stacked experts PEFT takes some module names for the experts', which were modules
    in older versions of transformers. The tensors of a layer are the same in both forms.
    """
    if not any(places.values()):
        return set()
    return {p for p, m in modules.items() if not m.stacked and p.rpartition(".")[2] in _TAKEN}


def sites_of(
    fields: Mapping[str, Any], places: Mapping[str, tuple[str, ...]], found: Collection[str]
) -> list[Site]:
    """Return the sites that a PEFT config names, and those that have tensors anyway.

    Args:
        fields: The config.
        places: Paths of all candidate modules, each with its stacks of experts.
        found: Paths that have tensors.
    """
    stacks = set(targeted(sorted(_stacks(places)), fields.get("target_parameters")))
    paths = set(found)
    if not any(fields.get(key) for key in LAYERS):
        paths |= set(targeted(places, fields.get("target_modules")))
    named = fields.get("target_parameters")
    paths |= {path for path in places if targeted([f"{path}.weight"], named)}
    sites = []
    for path, names in places.items():
        sites += [Site(path, (), None, name) for name in names if f"{path}.{name}" in stacks]
        if path in paths and not names:
            sites.append(Site(path=path, roles=()))
    return sites


def _stacks(places: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {f"{path}.{name}" for path, names in places.items() for name in names}
