"""Targets: the weights of a model that a user names.

A target is one of

- a role, whatever the architecture calls it: `q`, `gate`, `cross_v`, `expert_down` (roles.py lists
  them), or a group of roles: `attention`, `self_attention`, `cross_attention`, `ffn`, `experts`,
  `all-linear`;
- a qualified role or group: `encoder.q`, `decoder.ffn`, `language.attention`, `vision.all-linear`.
  In a vision-language model plain roles mean the language side, and the tower's are `vision.q`,
  also written `vision_q`; the `projector` joins them. In a model that compares two equal towers
  (CLIP) plain roles mean both;
- a pattern of module names: the whole path or its end from a dot on, with a shell's wildcards
  (`*` also crosses dots): `q_proj`, `self_attn.q_proj`, `layers.[0-3].*.v_proj`. It is no regular
  expression. It takes every linear layer and stack of experts that it matches, towers included.

A word that is both a role and a module name means the role: `q` in T5 is self-attention only.
`all-linear` is every linear layer and stack of experts, towers included, each as a whole. Routers,
the indexers of sparse attention, and LM or classification heads are adapted only when named. The
out_proj inside torch's own MultiheadAttention and the dt_proj of Mamba are no targets, because they
are never called.

A role of a fused weight is the output rows that belong to it. A site inside an adapter of peftkit
is the adapter's.

Shapes: out output rows of a layer, N adapted ones, r rank, R = r times the adapted roles, `...` is
E experts, or nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import Tensor, nn

from peftkit.errors import AdapterError, TargetError, did_you_mean, first_few
from peftkit.model import roles as table
from peftkit.model.places import ModelWeight, find_places, linear_shape, stacked_shape, walk

_LISTED = 24  # lines of an error that lists the layers of an unknown architecture


@dataclass(frozen=True, slots=True)
class Site:
    """One weight to adapt.

    Attributes:
        path: Module path in the live tree, "model.layers.0.self_attn.q_proj".
        roles: The targeted roles of this weight, in layout order; empty if a pattern targets the
            whole weight, or all-linear a whole fused one.
        rows: Of a fused weight: targeted role -> int64 indices of its output rows. None means the
            whole output.
        parameter: Name of a parameter of the module at `path`: a stack of experts, or a router that
            is no linear layer. None means the module itself.
        by_group: Only a group (all-linear, attention, ...) targets it.
    """

    path: str
    roles: tuple[str, ...]
    rows: Mapping[str, Tensor] | None = None
    parameter: str | None = None
    by_group: bool = False


class RowSlice(nn.Module):
    """The adapted rows of a site; converts tensors of these rows to tensors of all rows and back.

    Args:
        num_outputs: out.
        rank: r of each role's own columns in a matrix (out, R).

    Attributes:
        rows: (N,): indices of the adapted rows; None where all rows are adapted.
        columns: (N, r): the columns of each row's role in a matrix (out, R), or None.
        num_rows: N.
        num_roles: Roles of a fused layer with a pair of matrices each; 1 for a whole layer.
    """

    rows: Tensor | None
    columns: Tensor | None

    def __init__(
        self, site: Site, num_outputs: int, device: torch.device | None, rank: int = 1
    ) -> None:
        super().__init__()
        self.site, self.num_outputs = site, num_outputs
        parts = list(site.rows.values()) if site.rows else []
        self.num_roles = len(parts) or 1
        rows = columns = None
        if parts:
            rows = torch.cat(parts).to(device)
            owner = torch.arange(len(parts)).repeat_interleave(torch.tensor(list(map(len, parts))))
            columns = (owner[:, None] * rank + torch.arange(rank)).to(device)
        self.num_rows = num_outputs if rows is None else len(rows)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def spread(self, own: Tensor, fill: float = 0.0) -> Tensor:
        """Return a vector (N,) as one of all rows (out,), with `fill` elsewhere."""
        if self.rows is None:
            return own
        return own.new_full((self.num_outputs,), fill).index_put((self.rows,), own)

    def spread_matrix(self, own: Tensor) -> Tensor:
        """Return B (..., N, r) as a matrix of all rows (..., out, R), zero elsewhere."""
        if self.rows is None or self.columns is None:
            return own
        num_columns = self.num_roles * own.shape[-1]
        full = own.new_zeros(*own.shape[:-2], self.num_outputs, num_columns)
        index: tuple[Tensor, ...] = (self.rows[:, None], self.columns)
        if own.ndim == 3:
            index = (torch.arange(len(own), device=own.device)[:, None, None], *index)
        return full.index_put(index, own)

    def take(self, full: Tensor, fill: float = 0.0) -> Tensor:
        """Return the adapted rows (N,) of a file's vector of all rows.

        Raises:
            AdapterError: A value elsewhere is not `fill`.
        """
        if self.rows is None:
            return full
        rows = full[self.rows.to(full.device)]
        self._check_rest(full != fill, rows != fill)
        return rows

    def take_matrix(self, full: Tensor) -> Tensor:
        """Return the adapted rows and columns (..., N, r) of a file's B (..., out, R).

        Raises:
            AdapterError: B is not zero elsewhere.
        """
        if self.rows is None or self.columns is None:
            return full
        rows = full[..., self.rows[:, None].to(full.device), self.columns.to(full.device)]
        self._check_rest(full, rows)
        return rows

    def _check_rest(self, full: Tensor, own: Tensor) -> None:
        if torch.count_nonzero(full) != torch.count_nonzero(own):
            path = ".".join(filter(None, (self.site.path, self.site.parameter)))
            raise AdapterError(
                f"the adapter of {path} is not one of {', '.join(self.site.roles)}",
                found="it changes rows of other roles too",
                fix=f"Load it as an adapter of the whole layer: target {path} by its name.",
            )


def resolve(model: nn.Module, targets: Sequence[str] | str, *, stacks: bool = True) -> list[Site]:
    """Return the sites that the targets name, each once, in the order of the model.

    Args:
        stacks: Whether stacks of experts can be adapted; otherwise no error suggests them.

    Raises:
        TargetError: Lists every target that matches nothing, or only a part of what it means, and
            the roles of the model.
    """
    names = [targets] if isinstance(targets, str) else list(targets)
    places = find_places(model)
    chosen: dict[int, set[str]] = {}  # index of a place -> roles
    whole: set[int] = set()
    named: set[int] = set()
    failed: list[str] = []
    for target in names:
        chooses = _matcher(target)
        hits = [(i, roles) for i, place in enumerate(places) if (roles := chooses(place))]
        for index, roles in hits:
            chosen.setdefault(index, set()).update(roles)
            if target.rpartition(".")[2] not in table.GROUPS:
                named.add(index)
            # a pattern or all-linear means the whole layer
            if roles == {""} or target.endswith(table.ALL_LINEAR):
                whole.add(index)
        if not hits or _find_unsplit_fused(places, target):
            failed.append(target)
    if failed or not names:
        raise _no_match(model, places, failed, stacks)
    return [
        _site(places[i], chosen[i], whole=i in whole, by_group=i not in named)
        for i in sorted(chosen)
    ]


def find_roles(model: nn.Module) -> dict[str, list[Site]]:
    """Return the sites of every role of a model, by the name that a user writes."""
    sites: dict[str, list[Site]] = {}
    for place in find_places(model):
        for role, name in zip(place.roles, place.names, strict=True):
            sites.setdefault(name, []).append(_site(place, {role}))
    return sites


def _site(
    place: ModelWeight, roles: set[str], *, whole: bool = False, by_group: bool = False
) -> Site:
    names = dict(zip(place.roles, place.names, strict=True))
    if whole and place.repeats:
        return Site(place.path, (), None, place.parameter, by_group)
    targeted = [role for role in names if role in roles]
    rows = place.rows(targeted)
    targeted_names = tuple(names[role] for role in targeted)
    return Site(place.path, targeted_names, rows, place.parameter, by_group)


def _matcher(target: str) -> Callable[[ModelWeight], set[str]]:
    """Return a function from a place to those of its roles that a target names; {""} means all."""
    qualifier, _, rest = target.partition(".")
    if qualifier not in table.QUALIFIERS or not _is_role(rest):
        qualifier, rest = "", target
    if not _is_role(rest):
        return lambda place: {""} if not place.is_embedding and _has_name(place, target) else set()
    group_roles = table.GROUPS.get(rest, (rest,))

    def chooses(place: ModelWeight) -> set[str]:
        if qualifier and not _is_on(place, qualifier):
            return set()
        if qualifier or rest == table.ALL_LINEAR:
            return {r for r in place.roles if r in group_roles}
        names = zip(place.roles, place.names, strict=True)
        return {role for role, name in names if name in group_roles}

    return chooses


def _is_role(word: str) -> bool:
    side, _, role = word.partition("_")
    return (
        word in table.ROLES
        or word in table.GROUPS
        or (side in table.TOWERS and role in table.ROLES and role not in table.UNSIDED)
    )


def _is_on(place: ModelWeight, qualifier: str) -> bool:
    """Return whether a place is in the tower (vision, ...) or half (encoder, decoder) named."""
    if qualifier in table.TOWERS:
        return place.side == qualifier
    if qualifier in table.HALVES:
        segments = place.path.split(".")
        return not place.set_apart and any(re.fullmatch(rf"(.*_)?{qualifier}", s) for s in segments)
    return place.side == ""


def _find_unsplit_fused(places: list[ModelWeight], target: str) -> ModelWeight | None:
    """Return a weight in which a role is fused with others in an unknown order."""
    match = re.fullmatch(r"(.*[._])?(q|k|v|gate|up)", target)
    if not match:
        return None
    chooses = _matcher((match[1] or "") + table.WHOLES[match[2]])
    return next((place for place in places if chooses(place) - {""}), None)


def _has_name(place: ModelWeight, pattern: str) -> bool:
    names = [place.path, f"{place.path}.{place.parameter}"]
    return any(matches(name, pattern) for name in (names if place.parameter else names[:1]))


def matches(path: str, pattern: str) -> bool:
    """Return whether a shell pattern matches a path or its end from a dot on."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")


# ------------------------------------------------------------------- errors


def _no_match(
    model: nn.Module, places: list[ModelWeight], failed: list[str], stacks: bool
) -> TargetError:
    name = type(model).__name__
    quoted = ", ".join(f"'{target}'" for target in failed)
    problem = f"no linear layer matches target{'s' if len(failed) > 1 else ''} {quoted} in {name}."
    if not failed:
        problem = f"no targets are given for {name}."
    reasons = [reason for target in failed if (reason := _why(model, places, target))]
    usable = [place for place in places if stacks or not place.is_stack]
    guesses = [_guess(usable, target) for target in failed]
    hints = " ".join(dict.fromkeys(filter(None, guesses)))
    details = "\n".join([*reasons, " ".join(filter(None, [_roles_found(places), hints]))])
    source = getattr(getattr(model, "config", None), "_name_or_path", "") or "MODEL"
    return TargetError(
        problem, found=details, fix=f"List every layer with: peftkit inspect {source}"
    )


def _guess(places: list[ModelWeight], target: str) -> str:
    """Return "Did you mean 'x'?" of a role of this model or the name of a layer, or ""."""
    present = dict.fromkeys(name for place in places for name in place.names)
    if _is_role(target):  # a right word that is not in this model
        near = next((name for name in present if name.endswith(f"_{target}")), "")
        return f"Did you mean '{near}'?" if near else ""
    leaves = {place.path.rpartition(".")[2] for place in places if not place.is_embedding}
    return did_you_mean(target, [*present, *table.GROUPS, *sorted(leaves)])


def _why(model: nn.Module, places: list[ModelWeight], target: str) -> str:
    """Return one line on why a target matches nothing, if the reason is known."""
    if fused := _find_unsplit_fused(places, target):
        return (
            f"'{target}' may be in {fused.path}, fused in an order that is not known here: "
            f"target the whole as '{fused.names[0]}'."
        )
    if _is_role(target) or _is_role(target.partition(".")[2]):
        return ""
    others = Counter(type(m).__name__ for path, m, _ in walk(model) if matches(path, target))
    if others:
        kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common(4))
        return f"'{target}' matches modules, but none of them is linear: {kinds}."
    if re.search(r"[\\^$|+()]", target):
        return f"'{target}' looks like a regular expression; patterns are a shell's: * ? [0-3]."
    return ""


def _roles_found(places: list[ModelWeight]) -> str:
    """Return "Roles found: q, k, v (32 layers), head." or, without roles, a list of the layers."""
    counts: dict[str, set[str]] = {}
    for place in places:
        for name in place.names:
            counts.setdefault(name, set()).add(place.block)
    if not counts.keys() - {"other", "head", "embed", "pos_embed", "projector"}:
        return _layers_found(places)
    grouped: dict[int, list[str]] = {}
    for name in sorted(counts, key=_order):
        grouped.setdefault(len(counts[name] - {""}), []).append(name)
    parts = []
    for count, names in grouped.items():
        layers = f" ({count} layer{'s' if count > 1 else ''})" if count else ""
        parts.append(", ".join(names) + layers)
    return f"Roles found: {', '.join(parts)}."


def _order(name: str) -> tuple[bool, int]:
    side, _, role = name.partition("_")
    plain = side not in table.TOWERS
    return not plain, table.ROLES.index(name if plain else role)


def _layers_found(places: list[ModelWeight]) -> str:
    lines: Counter[str] = Counter()
    for place in places:
        if not place.is_embedding:
            shape = (
                stacked_shape(place.module, cast(str, place.parameter))[1:]
                if place.is_stack
                else linear_shape(place.module)
            )
            path = re.sub(r"(?<![^.])\d+(?=\.|$)", "*", place.path)
            lines[f"{path} ({shape[0]} -> {shape[1]})"] += 1
    if not lines:
        return "It has no linear layer at all."
    listed = first_few((f"{line} x {count}" for line, count in lines.items()), _LISTED, "\n  ")
    return f"No roles are known in it. Its linear layers:\n  {listed}"
