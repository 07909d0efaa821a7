"""Trained copies of parts of the base: whole modules, such as heads, and rows of tokens.

Trained rows replace rows of the embedding, y = E'[ids], or of the head, W' h, where E' and W'
differ from the frozen tables in these rows only. If the head is tied to the embedding, both use the
same rows. The table is not copied and gets no gradient. In files the rows are PEFT's
`trainable_token_indices`: the tensor "token_adapter.trainable_tokens_delta" holds the rows
themselves, in the order of the tokens in the config.

Shapes: n tokens with trained rows, H width, V vocabulary; `...` is any leading shape.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from peftkit.errors import TargetError, did_you_mean
from peftkit.methods.base import ADAPTER_DTYPES, AdapterModule, Method, Modules
from peftkit.model.places import input_embedding, is_linear
from peftkit.model.targets import Site

NAME = "token_adapter.trainable_tokens_delta"


class TunedModule(AdapterModule):
    """A frozen module that computes with trained copies of some of its parameters.

    Other attributes are the base's, because models also access the submodules of a head.

    Args:
        names: Names of the base's direct parameters, not of its submodules'.
        prefix: Prefix of these names in PEFT's files.
        copies: Copies by id of the original, shared by tied parameters; new copies are added.

    Attributes:
        trained: The copies, in the order of `names`.
    """

    def __init__(
        self,
        base: nn.Module,
        site: Site,
        *,
        names: Sequence[str],
        dtype: torch.dtype,
        prefix: str = "",
        copies: dict[int, nn.Parameter] | None = None,
    ) -> None:
        super().__init__(base, site)
        self.names, self.prefix = tuple(names), prefix
        self.trained = nn.ParameterList()
        copies = {} if copies is None else copies
        for parameter in (base.get_parameter(name) for name in names):
            if id(parameter) not in copies:
                # fewer bits would change the base
                exact = torch.promote_types(dtype, parameter.dtype)
                copies[id(parameter)] = nn.Parameter(parameter.detach().to(exact, copy=True))
            self.trained.append(copies[id(parameter)])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["base"], name)

    def forward(self, *args: object, **kwargs: object) -> Any:
        if not self.enabled:
            return self.base(*args, **kwargs)
        used = {
            name: trained.to(self.base.get_parameter(name).dtype) for name, trained in self._pairs()
        }
        return torch.func.functional_call(self.base, used, args, kwargs)

    @property
    def weight(self) -> Tensor:
        """The active weight, for models that read it instead of calling the module."""
        return self._used("weight")

    @property
    def bias(self) -> Tensor | None:
        return self._used("bias")

    def _used(self, name: str) -> Any:
        frozen = getattr(self.base, name)
        if not self.enabled or name not in self.names:
            return frozen
        return self.trained[self.names.index(name)].to(frozen.dtype)

    def _pairs(self) -> Iterator[tuple[str, Tensor]]:
        return zip(self.names, cast("Iterator[Tensor]", self.trained), strict=True)

    def reset(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            for name, trained in self._pairs():
                trained.copy_(self.base.get_parameter(name))

    def state(self) -> dict[str, Tensor]:
        return {self.prefix + name: trained.detach() for name, trained in self._pairs()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, trained in self._pairs():
            trained.copy_(state[self.prefix + name])

    @property
    def changed(self) -> tuple[str, ...]:
        return self.names

    def weights(self, base: nn.Module) -> dict[str, Tensor]:
        return {name: base.get_parameter(name) for name in self.names}

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        return self.trained[self.names.index(name)].detach().to(weight.device, torch.float32)


def trained_copies(
    model: nn.Module, method: Method
) -> tuple[list[str], dict[str, AdapterModule], dict[str, AdapterModule]]:
    """Return the paths in `method.train_fully`, and the wrappers of these and of token rows.

    Raises:
        TargetError: As `named_modules`, `wrap_fully` and `token_modules`.
    """
    outermost = named_modules(model, method.train_fully)
    full: dict[str, AdapterModule] = {}
    for path in outermost:
        full |= wrap_fully(model, path, ADAPTER_DTYPES[method.dtype])
    return outermost, full, token_modules(model, method, outermost)


def wrap_fully(model: nn.Module, path: str, dtype: torch.dtype) -> dict[str, AdapterModule]:
    """Return wrappers that train a module with all its submodules, the innermost first.

    Submodules keep their paths, and gradient checkpointing may recompute them.

    Raises:
        TargetError: The module has no parameters, or quantised ones.
    """
    module = model.get_submodule(path)
    packed = [name for name, p in module.named_parameters() if not p.is_floating_point()]
    if packed or not any(True for _ in module.parameters()):
        raise TargetError(
            f"cannot train {path} in full",
            found=f"{packed[0]} is quantised" if packed else "it has no parameters",
            fix="Use modules in 16 bits: heads, norms, embeddings.",
        )
    copies: dict[int, nn.Parameter] = {}
    tuned: dict[str, AdapterModule] = {}
    for name, part in reversed(list(module.named_modules(prefix=path, remove_duplicate=False))):
        names = [n for n, p in part._parameters.items() if p is not None]
        if names:
            site = Site(path=name, roles=())
            tuned[name] = TunedModule(part, site, names=names, dtype=dtype, copies=copies)
    return tuned


def tie_copies(modules: Modules) -> None:
    """Train one copy of each parameter that several modules share (PEFT's ensure_weight_tying)."""
    copies: dict[int, tuple[TunedModule, nn.Parameter]] = {}
    for module in [m for m in modules.values() if isinstance(m, TunedModule)]:
        for index, name in enumerate(module.names):
            key = id(module.base.get_parameter(name))
            owner, trained = copies.setdefault(key, (module, module.trained[index]))
            if owner is not module:
                module.trained[index] = trained
                owner.changes_ties = module.changes_ties = True


def named_modules(model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the paths of the modules that match `names`: whole paths, or endings after a dot.

    Raises:
        TargetError: A name matches no module.
    """
    paths = [path for path, _ in model.named_modules() if path]
    matches = {name: [p for p in paths if f".{p}".endswith(f".{name}")] for name in names}
    missing = [name for name, hits in matches.items() if not hits]
    if missing:
        leaves = sorted({path.rpartition(".")[2] for path in paths})
        raise TargetError(
            f"no module is called {', '.join(map(repr, missing))} in {type(model).__name__}.",
            found=did_you_mean(missing[0], leaves),
            fix="Use names that peftkit inspect MODEL lists.",
        )
    chosen = {path for hits in matches.values() for path in hits}
    inner = {p for p in chosen if any(p.startswith(f"{other}.") for other in chosen)}
    return [path for path in paths if path in chosen - inner]


class TokenRows(AdapterModule):
    """A frozen embedding or head (V, H) with some trained rows.

    Args:
        tokens: Token ids of the rows.
        tied: The wrapper that owns and saves the rows, if another module has the same table.

    Attributes:
        rows: (n, H), in the order of the tokens.
        original: (n, H): the base's rows.
    """

    tokens: Tensor
    order: Tensor
    original: Tensor
    rows: nn.Parameter
    changes_ties = True

    def __init__(
        self,
        base: nn.Module,
        site: Site,
        *,
        tokens: tuple[int, ...],
        dtype: torch.dtype,
        tied: TokenRows | None = None,
    ) -> None:
        super().__init__(base, site)
        weight = self.weight
        self.owned, self.in_head = tied is None, not isinstance(base, nn.Embedding)
        ids = torch.tensor(tokens, device=weight.device)
        self.register_buffer("tokens", ids, persistent=False)
        self.register_buffer("order", ids.argsort(), persistent=False)
        original = weight.detach()[ids].clone()
        self.register_buffer("original", original, persistent=False)
        exact = torch.promote_types(dtype, original.dtype)  # fewer bits would change the base
        self.rows = nn.Parameter(original.to(exact, copy=True)) if tied is None else tied.rows
        if not self.in_head:
            self._check_base()

    @torch.no_grad()
    def _check_base(self) -> None:
        """Refuse an embedding that does more than look up and scale its rows."""
        indices = torch.arange(len(self.tokens), device=self.tokens.device)
        if indices.is_meta or torch.equal(self._embedded(indices), self.base(self.tokens)):
            return
        raise TargetError(
            f"cannot train rows of {self.site.path}",
            found=f"{type(self.base).__name__} does more than look up and scale its rows.",
            fix=f"Train the whole of it: train_fully: [{self.site.path}]",
        )

    def _embedded(self, index: Tensor) -> Tensor:
        """Return the trained rows (..., H) by index into the tokens, with the base's scaling."""
        rows = functional.embedding(index, self.rows.to(self.original.dtype))
        scale = getattr(self.base, "embed_scale", None)
        if scale is None:
            return rows
        return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        out: Tensor = self.base(x, *args, **kwargs)
        if not self.enabled:
            return out
        if self.in_head:
            change = (self.rows - self.original.to(self.rows.dtype)).to(out.dtype)
            update = functional.linear(x.to(out.dtype), change)  # (..., n), zero at the start
            return out.index_add(-1, self.tokens, update.to(out.dtype))
        ordered = self.tokens[self.order]
        place = torch.searchsorted(ordered, x).clamp(max=len(ordered) - 1)  # (...)
        hit = ordered[place] == x
        return torch.where(hit[..., None], self._embedded(self.order[place]), out)

    def reset(self, generator: torch.Generator) -> None:
        with torch.no_grad():
            self.rows.copy_(self.original)

    def state(self) -> dict[str, Tensor]:
        return {NAME: self.rows.detach()} if self.owned else {}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        if self.owned:
            self.rows.copy_(state[NAME])

    @property
    def changed(self) -> tuple[str, ...]:
        return ("weight",) if self.owned else ()

    def weights(self, base: nn.Module) -> dict[str, Tensor]:
        return {name: cast(Tensor, getattr(base, name)) for name in self.changed}

    def merged_weight(self, weight: Tensor, name: str = "weight") -> Tensor:
        return weight.index_copy(0, self.tokens.to(weight.device), self.rows.detach().to(weight))


def repeated_names(modules: Modules) -> set[str]:
    """Return the tensors in which PEFT repeats trained rows, for modules with the same table."""
    rows = {path: module for path, module in modules.items() if isinstance(module, TokenRows)}
    return {f"{path}.{NAME}" for path, module in rows.items() if not module.owned}


class Rows(NamedTuple):
    """The trained rows of a module, and the path of the module that owns them."""

    tokens: tuple[int, ...]
    owner: str


def find_rows(model: nn.Module, method: Method) -> dict[str, Rows]:
    """Return the modules with trained rows by path; owners come before modules tied to them.

    Raises:
        TargetError: A module or token does not exist, or the method does not allow trained rows.
    """
    if not method.token_rows:
        return {}
    if not method.takes_token_rows:
        raise TargetError(
            f"token_rows are not for an adapter of type '{method.type}'",
            found="PEFT supports them with LoRA only, and would ignore them.",
            fix="Use lora or dora; or train the whole table: train_fully: [embed_tokens]",
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    rows: dict[str, Rows] = {}
    for owner, tokens in _tokens_by_module(model, method.token_rows).items():
        weight = _table(modules[owner], owner)
        _check_tokens(tokens, len(weight), owner)
        if owner in rows:
            if rows[owner].tokens != tokens:
                raise TargetError(
                    f"{owner} is tied to {rows[owner].owner}: both have the same rows.",
                    fix="List the tokens once, or the same tokens for both.",
                )
            continue
        rows[owner] = Rows(tokens, owner)
        for path, module in modules.items():
            if path != owner and module._parameters.get("weight") is weight:
                _table(module, path)
                rows[path] = Rows(tokens, owner)
    return rows


def token_modules(
    model: nn.Module, method: Method, taken: Collection[str]
) -> dict[str, AdapterModule]:
    """Return wrappers that train `method.token_rows`, by path.

    Args:
        taken: Paths of modules that are trained in full.

    Raises:
        TargetError: As `find_rows`; or a module is inside one that is trained in full.
    """
    modules: dict[str, TokenRows] = {}
    for path, (tokens, owner) in find_rows(model, method).items():
        if any(f"{path}.".startswith(f"{other}.") for other in taken):
            raise TargetError(
                f"{path} is trained in full, and its rows cannot be trained too",
                fix="Remove it from train_fully, or remove token_rows.",
            )
        modules[path] = TokenRows(
            model.get_submodule(path),
            Site(path=path, roles=()),
            tokens=tokens,
            dtype=ADAPTER_DTYPES[method.dtype],
            tied=modules.get(owner),
        )
    return dict(modules)


def _tokens_by_module(
    model: nn.Module, rows: tuple[int, ...] | Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    if not isinstance(rows, Mapping):
        return {input_embedding(model): rows}
    tokens_of = {}
    for name, tokens in rows.items():
        path, *others = named_modules(model, [name])
        if others:
            raise TargetError(
                f"token_rows: '{name}' matches {1 + len(others)} modules",
                found=", ".join([path, *others][:4]),
                fix="Use the full path of one module; modules tied to it have the same rows.",
            )
        tokens_of[path] = tuple(tokens)
    return tokens_of


def _table(module: nn.Module, path: str) -> Tensor:
    weight = module._parameters.get("weight")
    if weight is None or not (isinstance(module, nn.Embedding) or is_linear(module)):
        raise TargetError(
            f"cannot train rows of {path}",
            found=f"{type(module).__name__} is neither an embedding nor a head in 16 bits or more.",
            fix="Use token_rows for the token embedding or the head.",
        )
    return weight


def _check_tokens(tokens: tuple[int, ...], num_rows: int, path: str) -> None:
    invalid = sorted({t for t in tokens if not 0 <= t < num_rows or tokens.count(t) > 1})
    if invalid or not tokens:
        raise TargetError(
            f"cannot train the rows {', '.join(map(str, invalid)) or 'of no token'} of {path}",
            found=f"It has rows 0 to {num_rows - 1}; each can be listed once.",
            fix="Use token ids of the model; new tokens must be added to it first.",
        )
