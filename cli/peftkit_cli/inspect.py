"""`peftkit inspect`: describe a model or an adapter, without loading weights."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from peftkit.errors import AdapterError, BaseError, PeftkitError, neighbours
from peftkit.figures import dtype_name
from peftkit.formats.folders import CONFIG, TENSORS
from peftkit_cli.arguments import Json, note

if TYPE_CHECKING:
    from torch import nn

    from peftkit.files.tensors import Entry
    from peftkit.formats.peft.low_rank import RoleUpdate
    from peftkit.model.targets import Site

ADAPTER_FILES = (CONFIG, TENSORS)


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that differ only in the layer number.

    Attributes:
        role: Role of the weights; for an adapter, the name of the tensors.
        modules: Module path, with * for the layer number.
        count: Number of weights.
        shape: "in -> out" for a model ("experts x in -> out"); for an adapter, the tensor's shape.
        parameters: Total number of values.
    """

    role: str
    modules: str
    count: int
    shape: str
    parameters: int


@dataclass(frozen=True, slots=True)
class MethodFacts:
    """A method with its defaults, on a model.

    Attributes:
        num_trainable: Number of trained parameters; None if the method cannot be used.
        merges: Whether the adapter can be merged into the weights.
        fresh_is_base: Whether a fresh adapter leaves the outputs unchanged.
        files: Programs that can read its files.
        remark: The reason for each "no".
    """

    method: str
    num_trainable: int | None
    merges: bool
    fresh_is_base: bool
    files: str
    remark: str


def inspect(what: str, as_json: Json = False) -> None:
    """Describe a model or an adapter, without loading weights.

    For a model: its roles, and the parameters that each method would train. For an adapter: its
    settings, tensors and the size of its updates.

    Args:
        what (ADAPTER|MODEL): An adapter folder; or a model: hub id, folder, .gguf file or short
            name.
    """
    from peftkit_cli.render import Renderer

    path = Path(what).expanduser()
    if path.name in ADAPTER_FILES:
        path = path.parent
    is_adapter = any((path / name).is_file() for name in ADAPTER_FILES)
    if not is_adapter and path.parent != Path() and path.parent.is_dir() and not path.exists():
        raise BaseError(f"there is no adapter or model '{what}'.", found=neighbours(path))
    methods: list[MethodFacts] = []
    updates: list[RoleUpdate] = []
    reason = ""
    with Renderer(transient=True):
        if is_adapter:
            facts, groups = adapter_facts(path)
            updates, reason = _updates(path)
        else:
            facts, groups, methods = model_facts(what)
    if as_json:
        last = {"updates": updates} if facts["kind"] == "adapter" else {"methods": methods}
        tables: dict[str, Sequence[Any]] = {"modules": groups, **last}
        lists = {name: [asdict(row) for row in rows] for name, rows in tables.items()}
        typer.echo(json.dumps({**facts, **lists}, indent=2))
    else:
        show(facts, groups, updates, methods)
    if reason:
        note(reason)


def adapter_facts(folder: Path) -> tuple[dict[str, object], list[Group]]:
    """Return facts from the config and the tensor header of an adapter."""
    from peftkit.formats.guard import check_safetensors
    from peftkit.formats.peft.load import read_adapter

    file = read_adapter(folder)
    tensors = check_safetensors(folder / TENSORS).tensors
    origin, method = file.provenance, file.method.model_dump(mode="json")
    facts = {
        "kind": "adapter",
        "folder": str(folder),
        **method,
        "targets": method["targets"] if file.made_here else file.fields.get("target_modules"),
        "base": origin.base,
        "base_revision": origin.revision,
        "base_fingerprint": origin.fingerprint,
        "base_loading": dict(origin.loading),
        "prompt_style": origin.prompt_style.kind if origin.prompt_style else None,
        "system_prompt": origin.prompt_style.system if origin.prompt_style else None,
        "made_by": "peftkit" if file.made_here else "another tool, in PEFT's format",
        "num_parameters": sum(math.prod(entry.shape) for entry in tensors.values()),
        "num_tensors": len(tensors),
        "num_bytes": (folder / TENSORS).stat().st_size,
    }
    return facts, sorted(grouped(_tensors(tensors)), key=lambda group: group.modules)


def _updates(folder: Path) -> tuple[list[RoleUpdate], str]:
    """Return the updates of an adapter by role; or [] and the reason."""
    from peftkit.formats.peft.low_rank import read_low_rank, role_updates

    try:
        return role_updates(read_low_rank(folder)[1]), ""
    except AdapterError as error:
        return [], f"No norms of the updates: {error}"


def _tensors(tensors: Mapping[str, Entry]) -> Iterator[tuple[str, str, str, int]]:
    for full_name, entry in tensors.items():
        path, mark, name = full_name.removeprefix("base_model.model.").partition(".lora_")
        shape = f"{' x '.join(map(str, entry.shape))} {entry.dtype.lower()}"
        yield (mark + name).removeprefix("."), path, shape, math.prod(entry.shape)


def grouped(weights: Iterable[tuple[str, str, str, int]]) -> list[Group]:
    """Group weights (role, path, shape, number of values) that differ only in the layer number."""
    sizes_by_kind: dict[tuple[str, str, str], list[int]] = {}
    for role, path, shape, size in weights:
        sizes_by_kind.setdefault((role, starred(path), shape), []).append(size)
    return [
        Group(role, modules, len(sizes), shape, sum(sizes))
        for (role, modules, shape), sizes in sizes_by_kind.items()
    ]


def model_facts(name: str) -> tuple[dict[str, object], list[Group], list[MethodFacts]]:
    """Build a model without weights; return its facts, weights by role, and methods."""
    from peftkit.model.blocks import blocks
    from peftkit.model.places import find_places
    from peftkit.model.targets import find_roles

    model = _without_weights(name)
    parameters = list(model.parameters())
    facts = {
        "kind": "model",
        "name": name,
        "architecture": type(model).__name__,
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "dtype": dtype_name(model.dtype),
        "num_blocks": len(blocks(model)),
        "num_weights": len(find_places(model)),
    }
    roles = find_roles(model).items()
    weights = (_weight(model, role, site) for role, sites in roles for site in sites)
    return facts, grouped(weights), list(method_facts(model))


def _without_weights(name: str) -> nn.Module:
    """Build a text-generating model, with or without media inputs."""
    from peftkit.base.skeleton import skeleton
    from peftkit.tasks.media.media_text import AudioTextConfig

    try:
        return skeleton(name)
    except BaseError as error:
        try:
            return skeleton(name, purpose=AudioTextConfig().purpose)
        except BaseError:
            raise error from None


def method_facts(model: nn.Module) -> Iterator[MethodFacts]:
    """Attach each method to a model without weights, and yield its facts."""
    from peftkit.adapter import attach
    from peftkit.methods.prefix import CacheKindError
    from peftkit.methods.table import METHODS

    for name, kind in METHODS.items():
        method, num_trainable = kind(type=name), None
        remarks = [method.unmergeable, method.fresh_changes]
        try:
            adapter = attach(model, method, fresh=False)
        except PeftkitError as error:
            # some models do not run without weights, and a prefix is measured by running them
            unmeasured = isinstance(error, CacheKindError)
            why = "only the weights tell whether it suits" if unmeasured else str(error)
            remarks.insert(0, why.splitlines()[0].rstrip("."))
        else:
            num_trainable = adapter.num_trainable
            adapter.detach()
        yield MethodFacts(
            method=name,
            num_trainable=num_trainable,
            merges=not method.unmergeable,
            fresh_is_base=not method.fresh_changes,
            files=f"peftkit, {method.files}" if method.files else "peftkit",
            remark="; ".join(filter(None, remarks)),
        )


def _weight(model: nn.Module, role: str, site: Site) -> tuple[str, str, str, int]:
    *experts, num_in, num_out = shape = weight_shape(model, role, site)
    path = site.path if site.parameter is None else f"{site.path}.{site.parameter}"
    text = " x ".join([*map(str, experts), f"{num_in} -> {num_out}"])
    return role, path, text, math.prod(shape)


def weight_shape(model: nn.Module, role: str, site: Site) -> tuple[int, ...]:
    """Return the shape ([experts,] in, out) of a role within a weight."""
    from peftkit.model.places import is_linear, linear_shape, stacked_shape

    module = model.get_submodule(site.path)
    if site.parameter is not None and getattr(module, site.parameter).ndim == 3:
        *leading, num_out = stacked_shape(module, site.parameter)
    elif site.parameter is None and is_linear(module):
        *leading, num_out = linear_shape(module)
    else:  # an embedding, (rows, width), or of patches, (width, channels, ...); a bare router
        weight = getattr(module, site.parameter or "weight")
        first, second = weight.shape[0], weight[0].numel()
        *leading, num_out = (first, second) if site.parameter is None else (second, first)
    return (*leading, len(site.rows[role]) if site.rows else num_out)


def starred(path: str) -> str:
    """Return a module path with * for the layer number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def show(
    facts: Mapping[str, Any],
    groups: Sequence[Group],
    updates: Sequence[RoleUpdate],
    methods: Sequence[MethodFacts],
) -> None:
    """Print the facts as lines, and the rest as tables, on stdout."""
    from peftkit.figures import count, size
    from peftkit_cli.render import print_table

    texts = {name: _text(value) for name, value in facts.items() if value not in (None, {}, [])}
    texts["num_parameters"] = count(facts["num_parameters"])
    if "num_bytes" in facts:
        texts["num_bytes"] = size(facts["num_bytes"])
    width = max(len(name) for name in texts)
    for name, text in texts.items():
        typer.echo(f"{name:{width}}  {text}")
    rows = [(g.role, g.modules, str(g.count), g.shape, count(g.parameters)) for g in groups]
    first = "role" if facts["kind"] == "model" else "tensor"
    print_table("", (first, "modules", "count", "shape", "parameters"), rows)
    if updates:
        columns = ("role", "layers", "norm of the update", "rank", "effective rank")
        rows = [
            (u.role, str(u.num_layers), f"{u.norm:.4g}", str(u.rank), f"{u.effective_rank:.1f}")
            for u in updates
        ]
        print_table("", columns, rows)
    if methods:
        title = "Methods, each with its defaults"
        names = ("method", "trains", "merges", "starts as the base", "read by", "")
        print_table(title, names, method_rows(methods, facts["num_parameters"]))


def _text(value: object) -> str:
    """Format the value of a fact; paths that differ only in the layer number are listed once."""
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        counts = Counter(starred(name) for name in value)
        return ", ".join(f"{name} ({n} x)" if n > 1 else name for name, n in counts.items())
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)
    return str(value)


def method_rows(methods: Sequence[MethodFacts], num_parameters: int) -> list[tuple[str, ...]]:
    """Return the table's rows as text."""
    from peftkit.figures import count

    return [
        (
            one.method,
            "-"
            if one.num_trainable is None
            else f"{count(one.num_trainable)} ({one.num_trainable / num_parameters:.2%})",
            *(("no", "yes")[is_so] for is_so in (one.merges, one.fresh_is_base)),
            one.files,
            one.remark,
        )
        for one in methods
    ]
