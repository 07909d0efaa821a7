"""The modules in PEFT's config: written for an adapter, and matched in a model.

`target_modules` is a list of dotted endings, or one regular expression for whole paths.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import nn

from peftkit.adapter import Adapter
from peftkit.errors import AdapterError, first_few
from peftkit.files.safe_regex import fullmatches
from peftkit.files.strict_json import Json, JsonMap, shown
from peftkit.methods.base import Method
from peftkit.methods.peft_format import PeftFormat
from peftkit.methods.table import SHARED_FIELDS, format_of
from peftkit.model.places import is_transposed, own_table, token_tables
from peftkit.model.targets import Site

ANY = "all-linear"
LAYERS = ("layers_to_transform", "exclude_modules")
"""Fields that exclude modules from the targets again."""
PATTERNS = ("rank_pattern", "alpha_pattern")
_TAKEN = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Module names that PEFT treats as experts in a model with stacked experts."""
_IMPLIED = dict.fromkeys(("SEQ_CLS", "TOKEN_CLS"), ("classifier", "score"))
"""task_type -> modules that PEFT adds to `modules_to_save` implicitly."""
MAMBA = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
REFUSED = "out_proj"


def written_fields(adapter: Adapter, form: PeftFormat[Method]) -> Json:
    """Return the config fields of the adapter's method and targets."""
    modules, method = adapter.method_modules, adapter.method
    places = method.candidates(adapter.model)
    as_weights: set[str] = set()
    if form.peft_type == "LORA" and any(places.values()):
        # in models with stacked experts PEFT maps these names to the experts, which were modules
        # in older versions of transformers; the tensors are the same as `target_parameters`
        dense = (path for path, module in modules.items() if not module.stacked)
        as_weights = {path for path in dense if path.rpartition(".")[2] in _TAKEN}
    parameters = {f"{path}.{name}" for path, module in modules.items() for name in module.stacked}
    parameters |= {f"{path}.weight" for path in as_weights}
    subsets: dict[str, set[str]] = {field: set() for field in ("", *form.subset_fields)}
    for path, module in modules.items():
        if not module.stacked and path not in as_weights:
            subsets[form.subset_of(module)].add(path)
    others = {path.removesuffix(".base") for path, _ in adapter.model.named_modules()}
    others |= modules.keys()
    endings = {field: shortest_endings(paths, others - paths) for field, paths in subsets.items()}
    fields: Json = {"target_modules": sorted({e for es in endings.values() for e in es})}
    fields |= {field: endings[field] for field in form.subset_fields}
    if parameters:
        rest = {name.replace(".base.", ".") for name, _ in adapter.model.named_parameters()}
        rest |= _stacks(places)
        fields["target_parameters"] = shortest_endings(parameters, rest - parameters)
    fields |= form.fields(method, adapter.model, modules)
    if method.train_fully or method.token_rows:
        fields |= _fields_of_copies(adapter, others)
    for name in PATTERNS if as_weights else ():
        if name in fields:
            fields[name] = {
                f"{path}.weight" if path in as_weights else path: value
                for path, value in fields[name].items()
            }
    return fields


def _fields_of_copies(adapter: Adapter, others: set[str]) -> Json:
    """Return the fields of modules and rows of embeddings that are trained in full."""
    from peftkit.methods.modules_to_save import TokenRows, named_modules

    method, fields = adapter.method, Json()
    rows = {path: m for path, m in adapter.modules.items() if isinstance(m, TokenRows)}
    if whole := set(named_modules(adapter.model, method.train_fully)):
        fields["modules_to_save"] = _bare_endings(whole, others - whole)
        if any(adapter.modules[path].changes_ties for path in whole & adapter.modules.keys()):
            fields["ensure_weight_tying"] = True
    if isinstance(method.token_rows, dict):
        own_rows = {path: module.tokens.tolist() for path, module in rows.items() if module.owned}
        fields["trainable_token_indices"] = own_rows
    elif rows:  # of the input embedding, and of modules tied to it
        fields["trainable_token_indices"] = list(method.token_rows)
    return fields


def _bare_endings(paths: Collection[str], others: Collection[str]) -> list[str]:
    """Return the endings for `modules_to_save`, where PEFT ignores dots."""
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


def refused_by_peft(adapter: Adapter) -> str:
    """Return a known reason why PEFT does not load an adapter, or "".

    PEFT 0.21 refuses LoRA on out_proj by the model's type (tuners_utils.py), and reads stacks of
    experts as (experts, out, in) unless the module has the attribute is_transposed (Llama 4's does
    not). peftkit follows the model's layout.
    """
    if format_of(adapter.method).peft_type != "LORA":
        return ""
    kind = getattr(getattr(adapter.model, "config", None), "model_type", "")
    reason = ""
    if kind in MAMBA and any(path.rpartition(".")[2] == REFUSED for path in adapter.method_modules):
        reason = f"it takes no LoRA on {REFUSED} in models of type {kind}"
    for path, module in adapter.method_modules.items():
        experts = module.base
        if module.stacked and is_transposed(experts) and not hasattr(experts, "is_transposed"):
            reason = f"it swaps the rows and columns of the stacks in {path}"
    if not reason:
        return ""
    return (
        f"PEFT does not load this adapter: {reason}. peftkit loads and merges it; for PEFT, remove "
        "these from the targets."
    )


def sites_of(
    fields: Mapping[str, object],
    places: Mapping[str, tuple[str, ...]],
    with_tensors: Collection[str],
) -> list[Site]:
    """Return the sites that a PEFT config targets or the file has tensors for.

    Args:
        fields: The config.
        places: Paths of all candidate modules, each with its stacks of experts.
        with_tensors: Paths of modules that have tensors.
    """
    stacks = set(targeted(sorted(_stacks(places)), fields.get("target_parameters")))
    paths = {*with_tensors, *selected(places, fields)}
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


def check_targets(targets: object, message: str, name: str = "target_modules") -> None:
    """Check the type of `target_modules` or a similar field.

    Raises:
        AdapterError: The value is not null, a string or a list of strings.
    """
    if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        return
    if targets is not None and not isinstance(targets, str):
        raise AdapterError(
            message,
            found=f"{name}: {shown(targets)}",
            fix="It must be a list of module names, or one regular expression.",
        )


def targeted(paths: Iterable[str], targets: object) -> list[str]:
    """Return the paths that `target_modules` matches; none if it names no module ("all-linear").

    Raises:
        AdapterError: The pattern is invalid, or takes too long.
    """
    if isinstance(targets, list):
        return [path for path in paths if any(ends_with(path, target) for target in targets)]
    if isinstance(targets, str) and targets != ANY:
        return fullmatches(targets, list(paths))
    return []


def selected(paths: Iterable[str], fields: Mapping[str, object]) -> list[str]:
    """Return the paths that a config selects: its targets in its layers, without exclusions.

    This is PEFT's rule (tuners_utils.py: check_target_module_exists).

    Raises:
        AdapterError: A pattern is invalid, or takes too long.
    """
    targets, layers = fields.get("target_modules"), fields.get("layers_to_transform")
    chosen = targeted(paths, targets)
    if isinstance(targets, list) and layers not in (None, []):  # for patterns, PEFT has no layers
        numbers = layers if isinstance(layers, list) else [layers]
        layer_of = _layers(chosen, fields.get("layers_pattern"))
        chosen = [path for path in chosen if path in targets or layer_of.get(path) in numbers]
    excluded = targeted(chosen, fields.get("exclude_modules"))
    return [path for path in chosen if path not in excluded]


def _layers(paths: Collection[str], names: Any) -> dict[str, int]:
    """Return the layer of each path: the first number, or the first one after a name or pattern."""
    numbers = {
        path: [(path[: m.start()], int(m[1])) for m in re.finditer(r"\.(\d+)(?=\.)", path)]
        for path in paths
    }
    lists = sorted({path for pairs in numbers.values() for path, _ in pairs})
    holders = {path for path in lists if "." in path}
    if names:
        patterns = [names] if isinstance(names, str) else names
        holders = {p for n in patterns for p in fullmatches(rf"(?:.*\.)?(?:{n})", lists)}
    return {
        path: next(number for holder, number in pairs if holder in holders)
        for path, pairs in numbers.items()
        if any(holder in holders for holder, _ in pairs)
    }


def missing_targets(
    fields: Mapping[str, object], paths: Iterable[str], with_tensors: Collection[str]
) -> list[str]:
    """Return the names in `target_modules` that select modules, none of which has tensors.

    Args:
        paths: The model's modules that can be adapted.
    """
    targets, chosen = fields.get("target_modules"), selected(paths, fields)
    hits = {
        name: [path for path in chosen if ends_with(path, name)]
        for name in (targets if isinstance(targets, list) else ())
    }
    return sorted(name for name, hit in hits.items() if hit and not {*hit} & {*with_tensors})


def shortest_endings(paths: Iterable[str], others: Collection[str]) -> list[str]:
    """Return the shortest dotted endings that match all of `paths` and none of `others`."""
    pending, chosen, length = set(paths), set(), 1
    while pending:
        for path in sorted(pending):
            ending = ".".join(path.split(".")[-length:])
            if ending == path or not any(ends_with(other, ending) for other in others):
                chosen.add(ending)
                pending.discard(path)
        length += 1
    return sorted(chosen)


def ends_with(path: str, ending: str) -> bool:
    """Return whether a dotted path equals or ends with another."""
    return path == ending or path.endswith("." + ending)


def with_implied_heads(fields: Mapping[str, object], tensors: Collection[str]) -> JsonMap:
    """Return a config with `modules_to_save` extended by heads that the task implies, if present.

    Older PEFT wrote null there (peft_model.py: PeftModelForSequenceClassification).
    """
    named = fields.get("modules_to_save") or []
    if not isinstance(named, list):
        return fields
    weight = r"(^|\.){}(\.\w+)*\.weight$"
    missing = [
        head
        for head in _IMPLIED.get(str(fields.get("task_type")), ())
        if head not in named
        and any(re.search(weight.format(head), n) and ".lora_" not in n for n in tensors)
    ]
    return {**fields, "modules_to_save": [*named, *missing]} if missing else fields


def fit_to_model(
    model: nn.Module,
    method: Method,
    fields: Mapping[str, object],
    tensors: Collection[str],
    *,
    folder: Path,
    made_here: bool,
) -> tuple[Method, list[Site]]:
    """Find the sites of an adapter's tensors in a model.

    Args:
        method, fields, tensors: The folder's method, config, and tensor names.
        folder: The folder, for messages.
        made_here: Whether the method has the user's targets, with roles and rows of fused layers,
            which PEFT's config cannot express. Otherwise the sites come from config and tensors,
            and the returned method targets them.

    Raises:
        AdapterError: A tensor is missing, or belongs to no module that the method can adapt.
        TargetError: The method targets a module that is not in this model.
    """
    full = trained_fully(fields, model)
    _check_trained(full, fields, tensors, folder)
    rows: Iterable[str] = ()
    if method.token_rows:
        from peftkit.methods.modules_to_save import find_rows

        rows = find_rows(model, method)
    others = [f"{path}." for path in (*full, *rows)]
    rest = [name for name in tensors if not name.startswith(tuple(others))]
    places, shared = method.candidates(model), method.shared_names
    unexpected = sorted(name for name in rest if name not in shared and not _owner(name, places))
    if unexpected or not rest:
        fix = "Use the base it was trained on: peftkit inspect ADAPTER"
        if any(".lora_embedding_" in name for name in unexpected):
            fix = (
                "LoRA on embeddings is not supported. Merge it with PEFT; or train the table in "
                "full, or some of its rows: train_fully, token_rows."
            )
        raise AdapterError(
            f"the adapter in {folder} does not fit {type(model).__name__}",
            found="\n".join(f"unexpected: {name}" for name in unexpected) or "no tensors",
            fix=fix,
        )
    with_tensors = {_owner(name, places) for name in rest}
    if made_here or method.acts_on_input:
        sites = method.sites(model)
    else:
        sites = sites_of(fields, places, with_tensors)
    if not method.acts_on_input:
        _check_targets(fields, sites, places, with_tensors, tuple(others), folder)
    if made_here:
        return method, sites
    paths = (f"{s.path}.{s.parameter}" if s.parameter else s.path for s in sites)
    update = {"targets": tuple(dict.fromkeys(paths)), "train_fully": tuple(full)}
    return method.model_copy(update=update), sites


def trained_fully(fields: JsonMap, model: nn.Module) -> list[str]:
    """Return the paths of the modules that `modules_to_save` trains in full.

    This follows PEFT's rule, which ignores dots; `ensure_weight_tying` adds tables that are tied to
    one of them. A name may match no module.
    """
    names = tuple(fields.get(SHARED_FIELDS["train_fully"]) or ())
    paths = [
        path
        for path, module in model.named_modules()
        if path.endswith(names) and any(True for _ in module.parameters())
    ]
    tables = {path: own_table(module) for path, module in token_tables(model).items()}
    tied = {id(tables[path]) for path in paths if path in tables}
    if fields.get("ensure_weight_tying"):
        paths += [p for p, table in tables.items() if p not in paths and id(table) in tied]
    return paths


def _check_trained(
    paths: Sequence[str], fields: JsonMap, tensors: Collection[str], folder: Path
) -> None:
    missing = [path for path in paths if not any(n.startswith(f"{path}.") for n in tensors)]
    if missing:
        raise AdapterError(
            f"{folder} has no tensors for the module {_some(missing)}",
            found=f"modules_to_save: {_some(fields.get(SHARED_FIELDS['train_fully']) or ())}",
            fix="The file is incomplete, or belongs to another base.",
        )


def _owner(name: str, places: Collection[str]) -> str:
    """Return the module that a tensor belongs to, or an empty string."""
    while name and name not in places:
        name = name.rpartition(".")[0]
    return name


def _check_targets(
    fields: Mapping[str, object],
    sites: Collection[Site],
    places: Mapping[str, tuple[str, ...]],
    with_tensors: Collection[str],
    others: tuple[str, ...],
    folder: Path,
) -> None:
    """Refuse a config whose targets differ from the modules with tensors: scales would be wrong.

    Args:
        others: Prefixes of modules that are trained in full, which have no tensors of the method.

    Raises:
        AdapterError: Targets have no tensors, or modules with tensors are not targeted.
    """
    names = fields.get("target_parameters")
    stacks = [f"{site.path}.{site.parameter or 'weight'}" for site in sites]
    free = [path for path, of in places.items() if not of and not f"{path}.".startswith(others)]
    missing = missing_targets(fields, free, with_tensors)
    if isinstance(names, list):
        missing += [n for n in names if not any(ends_with(stack, n) for stack in stacks)]
    if missing:
        raise AdapterError(
            f"{folder} has no tensors for the target {_some(missing)}",
            found=f"tensors for {_some(shortest_endings(with_tensors, []))}",
            fix="The file is incomplete, or belongs to another base.",
        )
    targets, paths = fields.get("target_modules"), {*free} & {*with_tensors}
    extra = paths - {*targeted(paths, targets)}
    extra -= {path for path in paths if targeted([f"{path}.weight"], names)}
    if extra and targets not in (None, ANY):
        raise AdapterError(
            f"{folder} has tensors for modules that its config does not target",
            found=_some(sorted(extra)),
            fix="The config or the tensors belong to another adapter.",
        )


def _some(names: Sequence[str]) -> str:
    return first_few(map(shown, names), 5, ", ")
