"""Attach a method's modules to a model: freeze, wrap, list, disable, detach."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from peftkit.errors import AdapterError, TargetError
from peftkit.execution.plan import ExecutionPlan
from peftkit.forward.fused import fused_modules
from peftkit.methods.base import AdapterModule, InitValues, Method
from peftkit.model.modes import adapters_off
from peftkit.model.places import unwrap_adapter
from peftkit.model.targets import Site


class Adapter:
    """A method's modules, attached to a frozen model.

    Attributes:
        model: The model, changed in place.
        method: The adapter's config.
        modules: Module path to adapter module, in the order of the model, then the `full` ones.
        full: Paths of modules outside of the method: fully trained modules, and modules with
            trained token rows.
        tables: Frozen tables of tokens that the adapter's file contains, because the published base
            has others: name in `state` to the base's parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        modules: dict[str, AdapterModule],
        full: Collection[str] = (),
    ) -> None:
        self.model, self.method, self.modules = model, method, modules
        self.full = frozenset(full)
        self.tables: dict[str, nn.Parameter] = {}
        self._handles = method.connect(model, self.method_modules)
        self._end_steps: Callable[[], object] = lambda: None

    @property
    def method_modules(self) -> dict[str, AdapterModule]:
        """The modules without those of `full`."""
        return {path: module for path, module in self.modules.items() if path not in self.full}

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the trainable parameters."""
        trained = [p for m in self.modules.values() for p in m.parameters() if p.requires_grad]
        return iter({id(p): p for p in trained}.values())  # tied tables train the same rows

    @property
    def num_trainable(self) -> int:
        return sum(p.numel() for p in self.parameters())

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Run the bare base within the context."""
        with adapters_off(self.model):
            yield

    def prepare_training(self) -> None:
        """Compute layers that read one input together in training mode, if the method supports it.

        `fit` calls it, in autocast's precision. In a custom training loop, the layers follow
        in-place changes and the steps of any optimizer; after a change through `.data`, call it
        again. Call `end_training` before the model is moved or cast.
        """
        self.end_training()
        group_modules(self.model)
        model = weakref.ref(self.model)  # the hook is global, and would keep the model in memory

        def refresh(*_: object) -> None:
            if (prepared := model()) is not None:
                refresh_copies(prepared)

        # fused optimizers do not change a tensor's version
        hook = register_optimizer_step_post_hook(refresh)
        self._end_steps = weakref.finalize(self.model, hook.remove)

    def end_training(self) -> None:
        """Undo `prepare_training`."""
        self._end_steps()
        ungroup_modules(self.model)

    @contextmanager
    def swapped_state(self, state: Mapping[str, Tensor]) -> Iterator[None]:
        """Use the tensors of another `state()` within the context."""
        before = {name: tensor.clone() for name, tensor in self.state().items()}
        self.load_state(state)
        try:
            yield
        finally:
            self.load_state(before)

    def detach(self) -> None:
        """Remove every adapter module; the model is the bare, frozen base again."""
        self.end_training()
        for handle in self._handles:
            handle.remove()
        for path, module in reversed(self.modules.items()):  # a module before its submodules
            _replace(self.model, path, module.base)
        self._handles, self.modules = [], {}

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save, by "module.path.tensor_name" or shared name."""
        tables = {name: table.detach() for name, table in self.tables.items()}
        return (
            self.method.shared(self.method_modules)
            | tables
            | {
                f"{path}.{name}": tensor
                for path, module in self.modules.items()
                for name, tensor in module.state().items()
            }
        )

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the tensors of a `state()`, all or none.

        Raises:
            AdapterError: Tensors are missing, unexpected or misshapen; lists all of them.
        """
        shared = self.method.shared(self.method_modules) | self.tables
        expected = {name: tuple(tensor.shape) for name, tensor in shared.items()} | {
            f"{path}.{name}": shape
            for path, module in self.modules.items()
            for name, shape in module.state_shapes().items()
        }
        problems = [f"missing: {name} {expected[name]}" for name in expected.keys() - state.keys()]
        problems += [f"unexpected: {name}" for name in state.keys() - expected.keys()]
        problems += [
            f"misshapen: {name} is {tuple(state[name].shape)}, not {expected[name]}"
            for name in expected.keys() & state.keys()
            if tuple(state[name].shape) != expected[name]
        ]
        if problems or not expected:
            raise AdapterError(
                f"the adapter does not fit {type(self.model).__name__}",
                found="\n".join(sorted(problems)) or "it has no tensors",
                fix="Use the base it was trained on: peftkit inspect ADAPTER",
            )
        with torch.no_grad():
            for name, tensor in shared.items():
                tensor.copy_(state[name])
        for path, module in self.modules.items():
            module.load({name: state[f"{path}.{name}"] for name in module.state_shapes()})


def attach(
    model: nn.Module,
    method: Method,
    *,
    sites: list[Site] | None = None,
    starts: Mapping[str, InitValues] | None = None,
    fresh: bool = True,
    seed: int = 0,
) -> Adapter:
    """Freeze a model and attach a method's modules; the model's output stays the same.

    Args:
        model: Any transformer; changed in place.
        method: The method; `method.targets` selects the modules, by default without vision and
            audio towers.
        sites: The sites to adapt; by default `method.sites(model)`.
        starts: Initial values by module path, from the function that `method.initializer` names.
        fresh: Whether to set initial values; False if a state is loaded next.
        seed: Seed of the initial values, which are the same on every device.

    Raises:
        TargetError: A target is not in this model, or the method cannot adapt it.
        AdapterError: The model already has an adapter, or `starts` are for another method.
    """
    if any(unwrap_adapter(m) is not m for m in model.modules()):  # also a bank's layers
        raise AdapterError(
            f"{type(model).__name__} already has an adapter",
            fix="Call its detach() first, or merge it.",
        )
    outermost: list[str] = []
    full: dict[str, AdapterModule] = {}
    rows: dict[str, AdapterModule] = {}
    if method.train_fully or method.token_rows:
        from peftkit.methods.modules_to_save import trained_copies

        outermost, full, rows = trained_copies(model, method)
    method = method.for_model(model)
    grouped: dict[str, list[Site]] = {}
    for site in method.sites(model) if sites is None else sites:
        if not any(f"{site.path}.".startswith(f"{path}.") for path in outermost):
            grouped.setdefault(site.path, []).append(site)
    _check_sites(method, grouped, rows)
    full |= rows
    modules: dict[str, AdapterModule] = {}
    for path, path_sites in grouped.items():
        base, first = model.get_submodule(path), path_sites[0]
        is_linear = first.parameter is None
        modules[path] = (
            method.wrap(base, first) if is_linear else method.wrap_experts(base, path_sites)
        )
    if fresh and (method.initializer or starts is not None):
        _check_starts(method, modules, starts)
    method.share(modules)
    modules |= full
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for path, module in modules.items():
        module.base.requires_grad_(False)
        if fresh and starts is not None and path not in full:
            module.init_from(*starts[path])
        elif fresh:
            module.reset(generator)
        module.train(model.training)
        _replace(model, path, module)
    if (stream := getattr(model, "block_stream", None)) is not None:
        stream.move_unstreamed(model)  # the new modules, which are still in host memory
    return Adapter(model, method, modules, full)


def group_modules(model: nn.Module, *, serves: bool = False) -> None:
    """Group the adapter modules that read one input, if the method supports it.

    Args:
        serves: Group them for generation instead of training.
    """
    ungroup_modules(model)
    for kind in _groupable_kinds(model):
        kind.form_groups(model, serves=serves)


def separate_wrong_groups(model: nn.Module) -> str:
    """Undo groups that compute something else than single modules; return what differs, or ""."""
    problems = [kind.separate_wrong_groups(model) for kind in _groupable_kinds(model)]
    return next(filter(None, problems), "")


def ungroup_modules(model: nn.Module) -> None:
    """Undo `group_modules`: each adapter module computes separately."""
    for module in _adapter_modules(model):
        module.group = None


def _adapter_modules(model: nn.Module) -> list[AdapterModule]:
    return [module for module in model.modules() if isinstance(module, AdapterModule)]


def _groupable_kinds(model: nn.Module) -> list[type[AdapterModule]]:
    kinds = dict.fromkeys(type(module) for module in _adapter_modules(model))
    return [kind for kind in kinds if kind.can_group]


@contextmanager
def prepared_for_training(model: nn.Module, plan: ExecutionPlan) -> Iterator[None]:
    """Group adapter modules and fuse modules of the base within the context, as planned."""
    from peftkit.forward.mixer_kernels import adapters_applied  # a leaf

    try:
        if plan.lora_grouped:
            group_modules(model)
        with adapters_applied(model), fused_modules(model) if plan.fused_kernels else nullcontext():
            yield
    finally:
        if plan.lora_grouped:
            ungroup_modules(model)


def refresh_copies(model: nn.Module) -> None:
    """Update the groups' copies of trained values, and drop their pending outputs.

    Call it after an optimizer step, and after a forward pass without a backward pass.
    """
    for kind in _groupable_kinds(model):
        kind.refresh_groups(model)


def adapter_paths(model: nn.Module) -> dict[str, str]:
    """Return a description of grouped and single adapter layers, for the header of a run."""
    groups = [module.group for module in _adapter_modules(model) if module.can_group]
    num_single, num_groups = groups.count(None), len({*groups} - {None})
    texts = [f"{num_groups} groups of {len(groups) - num_single} layers"] if num_groups else []
    texts += [f"{num_single} single layers"] if num_single else []
    return {"adapter": ", ".join(texts)}


@contextmanager
def prepared_for_serving(model: nn.Module, plan: ExecutionPlan) -> Iterator[None]:
    """Group adapter modules and fuse modules of the base for generation within the context."""
    before = {module: module.group for module in _adapter_modules(model)}
    group_modules(model, serves=True)
    try:
        with fused_modules(model) if plan.fused_kernels else nullcontext():
            yield
    finally:
        for module, group in before.items():
            module.group = group


def check_fits(model: nn.Module, method: Method) -> None:
    """Check targets and ranks like `attach`, on a model without weights.

    Args:
        model: Changed; not usable afterwards.

    Raises:
        TargetError: See `attach`.
    """
    if method.acts_on_input:  # it has no targets, and its checks run the model
        return
    if method.initializer:  # initial values come from weights or data
        method = method.model_copy(update={"init": "default"})
    attach(model, method, fresh=False)


def _check_sites(method: Method, sites: Collection[str], rows: Collection[str]) -> None:
    """Refuse a method without sites, and sites on modules with trained token rows."""
    if not sites:
        raise TargetError(
            f"there are no modules to adapt with {method.type}",
            found="All of its targets are in fully trained modules.",
            fix="Remove these modules from train_fully.",
        )
    if overlap := [path for path in sites if path in rows]:
        raise TargetError(
            f"{overlap[0]} cannot have both {method.type} and trained token rows",
            fix="Remove it from the targets, or remove token_rows.",
        )


def _check_starts(
    method: Method, modules: Collection[str], starts: Mapping[str, InitValues] | None
) -> None:
    """Refuse missing initial values, and initial values for another method."""
    initializer = method.initializer
    if initializer and starts is None:
        raise AdapterError(
            f"attach(...) does not compute the initial values of this {method.type} adapter",
            fix=f"Compute them with {initializer}(...), then call attach(..., starts=...).",
        )
    if starts is not None and not (initializer and starts.keys() >= set(modules)):
        missing = sorted(set(modules) - starts.keys())
        raise AdapterError(
            f"these starts do not fit this {method.type} adapter",
            found=f"Missing: {missing[0]}" if initializer else "The method accepts none.",
            fix=f"Compute them with {initializer}(...)." if initializer else "Remove starts.",
        )


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
