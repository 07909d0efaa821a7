"""Targets: the weights of a model that a user names.

A target is one of

- a role, the same for all architectures: `q`, `gate`, `cross_v`, `expert_down` (roles.py lists
  them), or a group of roles: `attention`, `self_attention`, `cross_attention`, `ffn`, `experts`,
  `all-linear`;
- a qualified role or group: `encoder.q`, `decoder.ffn`, `language.attention`, `vision.all-linear`.
  In a vision-language model plain roles mean the language model; roles of the vision tower are
  `vision.q`, also written `vision_q`, and the `projector` connects the two. In a model that
  compares two equal towers (CLIP) plain roles mean both;
- a pattern of module names: the whole path or a suffix that begins after a dot, with shell
  wildcards (`*` also matches dots): `q_proj`, `self_attn.q_proj`, `layers.[0-3].*.v_proj`. It is
  not a regular expression. It selects every matching linear layer and stack of experts, towers
  included.

A word that is both a role and a module name means the role: `q` in T5 is self-attention only.
`all-linear` is every linear layer and stack of experts, towers included, each as a whole. Routers,
the indexers of sparse attention, and LM or classification heads are adapted only if named. The
dt_proj of Mamba and layers whose weights go to torch's own attention function (out_proj of
nn.MultiheadAttention, q, k, v and out_proj of WavLM) are no targets, because they are never called.

A role of a fused weight is the output rows that belong to it. If a module already carries an
adapter of peftkit, its site is that adapter's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from peftkit.errors import AdapterError, TargetError, did_you_mean, first_few
from peftkit.model import roles as table
from peftkit.model.places import ModelWeight, find_places, linear_shape, stacked_shape, walk
from peftkit.model.roles import is_role, matches


@dataclass(frozen=True, slots=True)
class Site:
    """One weight to adapt.

    Attributes:
        path: Module path in the live tree, "model.layers.0.self_attn.q_proj".
        roles: Targeted roles of this weight, in layout order; empty if a pattern targets the whole
            weight, or all-linear a whole fused one.
        rows: For a fused weight, targeted role -> int64 indices of its output rows. None: the
            whole output.
        parameter: Name of a parameter of the module at `path`: a stack of experts, or a router that
            is no linear layer. None: the module itself.
        by_group: Whether only a group (all-linear, attention, ...) targets it.
    """

    path: str
    roles: tuple[str, ...]
    rows: Mapping[str, Tensor] | None = None
    parameter: str | None = None
    by_group: bool = False


def resolve(model: nn.Module, targets: Sequence[str] | str, *, stacks: bool = True) -> list[Site]:
    """Return the sites that the targets name, without duplicates, in the order of the model.

    Args:
        stacks: Whether stacks of experts can be adapted; if not, no error suggests them.

    Raises:
        TargetError: Targets match nothing, or a fused weight that cannot be split; lists these
            targets and the roles of the model.
    """
    names = [targets] if isinstance(targets, str) else list(targets)
    places = find_places(model)
    chosen: dict[int, set[str]] = {}  # index of a place -> roles
    whole: set[int] = set()
    named: set[int] = set()
    failed: dict[str, ModelWeight | None] = {}  # target -> a fused weight that cannot be split
    for target in names:
        roles_of = _matcher(target)
        hits = [(i, roles) for i, place in enumerate(places) if (roles := roles_of(place))]
        for index, roles in hits:
            chosen.setdefault(index, set()).update(roles)
            if target.rpartition(".")[2] not in table.GROUPS:
                named.add(index)
            # a pattern or all-linear means the whole layer
            if roles == {""} or target.endswith(table.ALL_LINEAR):
                whole.add(index)
        fused = _unsplit_fused(places, target)
        if fused is not None or not hits:
            failed[target] = fused
    if failed or not names:
        raise no_match(model, places, failed, stacks)
    return [
        _site(places[i], chosen[i], whole=i in whole, by_group=i not in named)
        for i in sorted(chosen)
    ]


def find_roles(model: nn.Module) -> dict[str, list[Site]]:
    """Return the sites of every role of a model, by the role's name in targets."""
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
    """Return a function from a place to the roles that a target selects; {""} means all."""
    qualifier, _, rest = target.partition(".")
    if qualifier not in table.QUALIFIERS or not is_role(rest):
        qualifier, rest = "", target
    if not is_role(rest):
        return lambda place: {""} if not place.is_embedding and _has_name(place, target) else set()
    group_roles = table.GROUPS.get(rest, (rest,))

    def roles_of(place: ModelWeight) -> set[str]:
        if qualifier and not _is_on(place, qualifier):
            return set()
        if qualifier or rest == table.ALL_LINEAR:
            return {r for r in place.roles if r in group_roles}
        names = zip(place.roles, place.names, strict=True)
        return {role for role, name in names if name in group_roles}

    return roles_of


def _is_on(place: ModelWeight, qualifier: str) -> bool:
    """Return whether a place is in a tower (vision, ...) or a half (encoder, decoder)."""
    if qualifier in table.TOWERS:
        return place.side == qualifier
    if qualifier in table.HALVES:
        segments = place.path.split(".")
        return not place.set_apart and any(re.fullmatch(rf"(.*_)?{qualifier}", s) for s in segments)
    return place.side == ""


def _unsplit_fused(places: list[ModelWeight], target: str) -> ModelWeight | None:
    """Return a weight that fuses the target with other roles in an unknown order."""
    match = re.fullmatch(r"(.*[._])?(q|k|v|gate|up)", target)
    if not match:
        return None
    roles_of = _matcher((match[1] or "") + table.WHOLES[match[2]])
    return next((place for place in places if roles_of(place) - {""}), None)


def _has_name(place: ModelWeight, pattern: str) -> bool:
    names = [place.path, f"{place.path}.{place.parameter}"]
    return any(matches(name, pattern) for name in (names if place.parameter else names[:1]))


# ------------------------------------------------------------------- errors


MAX_LISTED = 24
"""Layers that the error lists for an unknown architecture."""


def no_match(
    model: nn.Module,
    places: list[ModelWeight],
    failed: Mapping[str, ModelWeight | None],
    stacks: bool,
) -> TargetError:
    """Return the error for failed targets.

    Args:
        failed: Target to the fused weight that it may be a part of, or None.
        stacks: Whether stacks of experts can be adapted.
    """
    name = type(model).__name__
    quoted = ", ".join(f"'{target}'" for target in failed)
    problem = f"no linear layer matches target{'s' if len(failed) > 1 else ''} {quoted} in {name}."
    if not failed:
        problem = f"no targets are given for {name}."
    reasons = [reason for item in failed.items() if (reason := _reason(model, *item))]
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
    if is_role(target):  # a valid role that this model lacks
        near = next((name for name in present if name.endswith(f"_{target}")), "")
        return f"Did you mean '{near}'?" if near else ""
    leaves = {place.path.rpartition(".")[2] for place in places if not place.is_embedding}
    return did_you_mean(target, [*present, *table.GROUPS, *sorted(leaves)])


def _reason(model: nn.Module, target: str, fused: ModelWeight | None) -> str:
    """Return one line on why a target matches nothing, or ""."""
    if fused is not None:
        return (
            f"'{target}' may be in {fused.path}, fused in an order that peftkit does not know: "
            f"target the whole as '{fused.names[0]}'."
        )
    if is_role(target) or is_role(target.partition(".")[2]):
        return ""
    others = Counter(type(m).__name__ for path, m, _ in walk(model) if matches(path, target))
    if others:
        kinds = ", ".join(f"{count} {kind}" for kind, count in others.most_common(4))
        return f"'{target}' matches modules, but none of them is linear: {kinds}."
    if re.search(r"[\\^$|+()]", target):
        return (
            f"'{target}' looks like a regular expression; patterns use shell wildcards: * ? [0-3]."
        )
    return ""


def _roles_found(places: list[ModelWeight]) -> str:
    """Return "Roles found: q, k, v (32 layers), head."; without roles, a list of the layers."""
    counts: dict[str, set[str]] = {}
    for place in places:
        for name in place.names:
            counts.setdefault(name, set()).add(place.block)
    if not counts.keys() - {"other", "head", "embed", "pos_embed", "projector"}:
        return _layers_found(places)
    grouped: dict[int, list[str]] = {}
    for name in sorted(counts, key=_order):
        grouped.setdefault(len(counts[name] - {""}), []).append(name)
    texts = []
    for count, names in grouped.items():
        layers = f" ({count} layer{'s' if count > 1 else ''})" if count else ""
        texts.append(", ".join(names) + layers)
    return f"Roles found: {', '.join(texts)}."


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
        return "It has no linear layer."
    listed = first_few((f"{line} x {count}" for line, count in lines.items()), MAX_LISTED, "\n  ")
    return f"No roles are known in it. Its linear layers:\n  {listed}"


class RowSlice(nn.Module):
    """The adapted rows of a site; expands tensors of these rows to all rows, and extracts them.

    Args:
        num_outputs: out.
        rank: r; each role has r columns of a matrix (out, R).

    Attributes:
        rows: (N,) indices of the adapted rows; None if all rows are adapted.
        columns: (N, r) columns of each row's role in a matrix (out, R), or None.
        num_rows: N.
        num_roles: Targeted roles of a fused layer, each with a pair of matrices; 1 for a whole
            layer.
    """

    rows: Tensor | None
    columns: Tensor | None

    def __init__(
        self, site: Site, num_outputs: int, device: torch.device | None, rank: int = 1
    ) -> None:
        super().__init__()
        self.site, self.num_outputs = site, num_outputs
        rows_of_roles = list(site.rows.values()) if site.rows else []
        self.num_roles = len(rows_of_roles) or 1
        rows = columns = None
        if rows_of_roles:
            rows = torch.cat(rows_of_roles).to(device)
            sizes = torch.tensor(list(map(len, rows_of_roles)))
            owner = torch.arange(len(sizes)).repeat_interleave(sizes)  # (N,): role of each row
            columns = (owner[:, None] * rank + torch.arange(rank)).to(device)
        self.num_rows = num_outputs if rows is None else len(rows)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def spread(self, vector: Tensor, fill: float = 0.0) -> Tensor:
        """Expand a vector (N,) to all rows (out,), with `fill` elsewhere."""
        if self.rows is None:
            return vector
        return vector.new_full((self.num_outputs,), fill).index_put((self.rows,), vector)

    def spread_matrix(self, b: Tensor) -> Tensor:
        """Expand B (..., N, r) to all rows and columns (..., out, R), with zeros elsewhere."""
        if self.rows is None or self.columns is None:
            return b
        full = b.new_zeros(*b.shape[:-2], self.num_outputs, self.num_roles * b.shape[-1])
        index: tuple[Tensor, ...] = (self.rows[:, None], self.columns)
        if b.ndim == 3:
            index = (torch.arange(len(b), device=b.device)[:, None, None], *index)
        return full.index_put(index, b)

    def take(self, full: Tensor, fill: float = 0.0) -> Tensor:
        """Extract the adapted rows (N,) of a file's vector of all rows.

        Raises:
            AdapterError: A value in another row is not `fill`.
        """
        if self.rows is None:
            return full
        rows = full[self.rows.to(full.device)]
        self._check_rest(full != fill, rows != fill)
        return rows

    def take_matrix(self, full: Tensor) -> Tensor:
        """Extract the adapted rows and columns (..., N, r) of a file's B (..., out, R).

        Raises:
            AdapterError: B has other nonzero values.
        """
        if self.rows is None or self.columns is None:
            return full
        rows = full[..., self.rows[:, None].to(full.device), self.columns.to(full.device)]
        self._check_rest(full, rows)
        return rows

    def _check_rest(self, full: Tensor, rows: Tensor) -> None:
        if torch.count_nonzero(full) != torch.count_nonzero(rows):
            path = ".".join(filter(None, (self.site.path, self.site.parameter)))
            raise AdapterError(
                f"the adapter of {path} is not one of {', '.join(self.site.roles)}",
                found="it changes rows of other roles too",
                fix=f"Load it as an adapter of the whole layer: target {path} by its name.",
            )
