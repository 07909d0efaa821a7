"""A model's blocks: activation checkpointing and compilation.

Blocks are the layers that transformers marks for gradient checkpointing. peftkit sets these marks
and its checkpointing function directly: transformers' switch also makes the embeddings' output
require a gradient, which costs a backward pass through all blocks below the lowest adapter.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.utils.checkpoint import checkpoint

from peftkit.errors import PeftkitError
from peftkit.execution.plan import Activations, ExecutionPlan, activation_modes
from peftkit.forward.compiler import no_compiler
from peftkit.kernels.device import gpu_of
from peftkit.kernels.fused import recipe_of, saving_results
from peftkit.kernels.packed import recomputing
from peftkit.kernels.tiled import tiled, why_not_tiled
from peftkit.model.blocks import STREAMED, feed_forward_modules, recomputable_blocks
from peftkit.model.modes import modes_kept
from peftkit.model.places import FrozenWrapper

_LOG = logging.getLogger(__name__)
BACKEND = "inductor"
"""Backend of torch.compile."""

MAX_COMPILED_VERSIONS = 64
"""Maximum compiled versions of all blocks together: with or without a gradient, one row or several,
short or long, ... With torch's default of 8, further versions would silently run eagerly."""

COMPILER_WARNING = r"The \.grad attribute of a Tensor that is not a leaf"
"""A warning about code inside torch.compile."""


class Blocks:
    """The blocks of one model.

    Until `restore`, it changes the marks for gradient checkpointing and their function, the blocks'
    compiled call, the forward of feed-forward modules and, while blocks are compiled, torch's
    compiler settings.

    Args:
        plan: By default the plan for the model's device.

    Attributes:
        blocks: The innermost blocks, in the order of the model.
        activations: The activation mode.
        num_recomputed: Number of the first blocks in this mode; None: all.
        tiles: Whether long rows are computed in tiles.
        feed_forward: Feed-forward modules of the blocks.
        compiled: Whether blocks run compiled.
    """

    def __init__(self, model: nn.Module, plan: ExecutionPlan | None = None) -> None:
        self._plan = plan or ExecutionPlan.for_model(model)
        self._name = type(model).__name__
        self.blocks = list(dict.fromkeys(recomputable_blocks(model)))  # some models repeat one
        self.compiled = False
        self._compiled_before = [block._compiled_call_impl for block in self.blocks]
        self._compiler_settings = ExitStack()
        self._marked: list[Any] = [
            m for m in model.modules() if hasattr(m, "gradient_checkpointing")
        ]
        self._marks_before = [
            (m.gradient_checkpointing, getattr(m, "_gradient_checkpointing_func", None))
            for m in self._marked
        ]
        recomputes = any(enabled for enabled, _ in self._marks_before)
        self.activations: Activations = "recompute" if recomputes else "keep"
        self.num_recomputed: int | None = None
        self.feed_forward: list[Any] = feed_forward_modules(model)
        self._numbers = {m: n for n, block in enumerate(self.blocks) for m in block.modules()}
        self._tiled_kinds: dict[Any, bool] = {}
        self._forwards_before = [m.__dict__.get("forward") for m in self.feed_forward]
        stream = getattr(model, STREAMED, None)
        self.are_streamed = stream is not None
        device = next(model.parameters(), torch.empty(0)).device
        self._recompute = _Recompute(self._plan, device, stream)

    @property
    def tiles(self) -> bool:
        return self._plan.tiles

    @property
    def num_kinds(self) -> int:
        """Number of different kinds of blocks; each kind is compiled separately."""
        kinds = {
            tuple((name, type(module)) for name, module in block.named_modules())
            for block in self.blocks
        }
        return max(len(kinds), 1)

    def activation_modes(self, requested: bool | Literal["auto"]) -> tuple[Activations, ...]:
        """Return the activation modes to try, fastest first."""
        return activation_modes(
            requested,
            on_gpu=self._plan.on_gpu,
            has_blocks=bool(self._marked),
            streamed=self.are_streamed,
            recomputes=self.activations != "keep",
            selective=self.can_tile and not self._plan.compile,
        )

    @property
    def can_tile(self) -> bool:
        """Whether feed-forward modules can be recomputed without their blocks, or in tiles."""
        # their backward pass needs the weights, which are no longer on the device if streamed
        return bool(self.feed_forward) and not (self.are_streamed or self._plan.is_sharded)

    def set_activations(
        self,
        activations: Activations,
        *,
        tiles: bool | None = None,
        num_recomputed: int | None = None,
    ) -> None:
        """Set the activation mode.

        Args:
            tiles: Whether long rows are computed in tiles; by default as before.
            num_recomputed: Number of the first blocks in this mode; None: all.

        Raises:
            PeftkitError: The mode needs blocks, and the model has none.
        """
        if activations != "keep" and not self._marked:
            raise PeftkitError(
                "train.gradient_checkpointing: true is not possible for this model",
                found=f"{self._name} has no blocks marked for it.",
                fix="Set it to auto or false; a smaller train.batch_size also saves memory.",
            )
        self.activations, self.num_recomputed = activations, num_recomputed
        self._plan = self._plan if tiles is None else replace(self._plan, tiles=tiles)
        self._apply()

    @contextmanager
    def keeping_all(self) -> Iterator[None]:
        """Disable activation checkpointing within the context."""
        self._set_recomputed(False)
        try:
            yield
        finally:
            self._set_recomputed(self.activations != "keep")

    def why_not_compiled(self) -> str:
        """Return why the blocks cannot be compiled; "" if there is no known reason."""
        if self.are_streamed:
            return "Their weights are streamed (base.placement) when a block is entered."
        if not self.blocks:
            return f"{self._name} has no blocks that transformers marks as such."
        return "" if self._plan.on_gpu else no_compiler()

    def compile(self, is_on: bool = True) -> None:
        """Switch between compiled and eager blocks."""
        self.compiled = is_on
        self._compiler_settings.close()
        self._recompute.compiled_call = None
        if is_on:
            self._configure_compiler()
            self._recompute.compiled_call = torch.compile(_call, backend=BACKEND, dynamic=True)
        self._apply()

    def _configure_compiler(self) -> None:
        from torch._dynamo import config  # slow to import, and only needed here
        from torch._inductor import config as inductor
        from torch.fx.experimental import _config as symbols

        enter = self._compiler_settings.enter_context
        # numbers of a config are equal in all blocks; without specialize_float the compiler would
        # trace each block twice
        enter(config.patch(recompile_limit=MAX_COMPILED_VERSIONS, specialize_float=True))
        # dropout draws the numbers of eager blocks
        enter(inductor.patch(fallback_random=True))
        # sizes that happen to be equal in the first batch are not assumed to be equal
        enter(symbols.patch(use_duck_shape=False))  # type: ignore[attr-defined]
        enter(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=COMPILER_WARNING)

    def eagerly(self) -> AbstractContextManager[object]:
        """Return a context in which blocks run eagerly, compiled or not."""
        return torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()

    def restore(self) -> None:
        """Undo all changes to the model."""
        self.compiled = False
        self._compiler_settings.close()
        self._set_feed_forward(False)
        for module, forward in zip(self.feed_forward, self._forwards_before, strict=True):
            if forward is not None:
                module.forward = forward
        for module, (enabled, function) in zip(self._marked, self._marks_before, strict=True):
            _mark(module, enabled, function)
        for block, compiled in zip(self.blocks, self._compiled_before, strict=True):
            block._compiled_call_impl = compiled

    def _apply(self) -> None:
        self._recompute.offloads = self.activations == "offload"
        self._set_recomputed(self.activations != "keep")
        compiles_blocks = self.compiled and self.activations == "keep"  # else the recomputed call
        for block in self.blocks:
            block._compiled_call_impl = None
            if compiles_blocks:
                block.compile(backend=BACKEND, dynamic=True)
        if not compiles_blocks:
            return
        # The lowest trained block runs the code of the blocks above it. Its input has no gradient:
        # separate code would double the compile time, and save a thousandth of a step.
        trained = (b for b in self.blocks if any(p.requires_grad for p in b.parameters()))
        if (lowest := next(trained, None)) is not None:
            compiled: Any = lowest._compiled_call_impl
            lowest._compiled_call_impl = functools.partial(_with_gradient, compiled)

    def _set_recomputed(self, is_on: bool) -> None:
        """Switch checkpointing of blocks and of their feed-forward modules on or off."""
        in_blocks = is_on and self.activations != "selective"
        self._recompute.kept = set(self.blocks[self._num_first :])
        for module, (_, function) in zip(self._marked, self._marks_before, strict=True):
            _mark(module, in_blocks, self._recompute if in_blocks else function)
        self._set_feed_forward(is_on and self.can_tile and not self.compiled)

    @property
    def _num_first(self) -> int:
        return len(self.blocks) if self.num_recomputed is None else self.num_recomputed

    def _set_feed_forward(self, is_on: bool) -> None:
        """Recompute the feed-forward modules of kept blocks, and tile those of recomputed ones."""
        is_selective = self.activations == "selective"
        for module in self.feed_forward:
            module.__dict__.pop("forward", None)
            is_first = self._numbers.get(module, 0) < self._num_first
            if is_on and is_first == is_selective:
                module.forward = functools.partial(_recomputed, self._recompute, module)
            elif is_on and is_first:
                module.forward = functools.partial(_in_tiles, self._plan, self._tiled_kinds, module)


def _mark(module: Any, enabled: bool, function: Callable[..., Any] | None) -> None:
    """Set transformers' mark for gradient checkpointing, and its function."""
    module.gradient_checkpointing = enabled
    if function is not None:
        module._gradient_checkpointing_func = function


class _Recompute:
    """transformers' checkpointing function: computes a block, and again in its backward pass.

    transformers calls it inside the block's hooks. It also recomputes feed-forward modules.

    Args:
        stream: Fetches the weights of streamed blocks for both passes.

    Attributes:
        offloads: Whether blocks' inputs are offloaded to host memory.
        kept: Blocks that are not recomputed.
        compiled_call: Computes a block with compiled code in both passes; None: eagerly.
    """

    def __init__(self, plan: ExecutionPlan, device: torch.device, stream: Any) -> None:
        self._plan, self._device, self._stream = plan, device, stream
        self.offloads = False
        self.kept: set[Any] = set()
        self.compiled_call: Callable[..., Any] | None = None
        self._offload: Callable[..., Any] | None = None
        self._draws: dict[tuple[Any, bool], bool] = {}

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        """Compute a block, and save the generators' state only if it draws random numbers.

        The first call in each mode observes whether a block draws (dropout).
        """
        block = _block_of(run)
        if block in self.kept:
            return run(*args)
        key = block, getattr(block, "training", True)
        if key in self._draws:
            return self._checkpoint(run, args, self._draws[key])
        before = self._generators()
        out = self._checkpoint(run, args, True)
        if torch.is_grad_enabled():
            self._draws[key] = not all(map(torch.equal, before, self._generators()))
        return out

    def _checkpoint(self, run: Callable[..., Any], args: tuple[Any, ...], draws: bool) -> Any:
        forward = run
        if self._stream is not None:
            forward = functools.partial(self._with_weights, run)
        elif self.compiled_call is not None:
            forward = functools.partial(self.compiled_call, run)
        if draws and self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("A recomputed block draws random numbers (dropout) a second time.")
        if draws and self._device.type == "mps":  # torch restores only the CPU and CUDA generators
            forward = functools.partial(_Replayed(self._device), forward)
        if self._plan.fused_kernels:
            forward = saving_results()(forward)
        if self.offloads:
            if self._offload is None:
                from peftkit.forward.offload import Offload

                self._offload = Offload()
            return self._offload(forward, *args, preserve_rng=draws)
        if self._plan.recomputing_keeps_unpacked:
            forward = recomputing()(forward)
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": draws}
        return checkpoint(forward, *args, **options)

    def _with_weights(self, run: Callable[..., Any], *args: Any) -> Any:
        with self._stream.around(_block_of(run)):
            return run(*args)

    def _generators(self) -> list[Tensor]:
        """Return the states of torch's generators as CPU tensors."""
        gpu = gpu_of(self._device)
        return [torch.get_rng_state(), *([] if gpu is None else [gpu.get_rng(self._device)])]


def _recomputed(recompute: _Recompute, module: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a feed-forward module, and again in its backward pass.

    An input with a recipe is computed again as well; its recipe's tensors are saved in any case.
    """
    run = functools.partial(type(module).forward, module)
    if args or kwargs or not isinstance(x, Tensor) or not torch.is_grad_enabled():
        return run(x, *args, **kwargs)
    if (recipe := recipe_of(x)) is None:
        return recompute(run, x)
    inputs = [x]

    def of_recipe(module: nn.Module, *tensors: Tensor) -> Any:
        if inputs:  # in the forward pass; checkpointing pairs what both passes save, by its order
            return type(module).forward(module, inputs.pop())
        with torch.no_grad():
            again = recipe.compute(*tensors)
        return type(module).forward(module, again.requires_grad_())

    return recompute(functools.partial(of_recipe, module), *recipe.tensors)


def _in_tiles(
    plan: ExecutionPlan,
    kinds: dict[Any, bool],
    module: nn.Module,
    x: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute a feed-forward module in tiles if the row is long.

    Args:
        kinds: Whether tiles are right, by kind of module; the first use of a kind decides.
    """
    run: Any = functools.partial(type(module).forward, module)
    is_other = args or kwargs or not isinstance(x, Tensor) or x.dim() != 3
    if is_other or not torch.is_grad_enabled() or (tokens := plan.tile(x.shape[1])) >= x.shape[1]:
        return run(x, *args, **kwargs)
    wrappers = [child for child in module.modules() if isinstance(child, FrozenWrapper)]
    trained = list(dict.fromkeys(p for wrapper in wrappers for p in wrapper.trained_parameters()))
    if not (trained or x.requires_grad):
        return run(x)
    if (kind := tuple(map(type, module.modules()))) not in kinds:
        kinds[kind] = is_fake(x) or _are_tiles_right(run, module, x, trained)
    if not kinds[kind]:
        return run(x)
    drops = (child for child in module.modules() if isinstance(child, nn.Dropout))
    draws = any(drop.training and drop.p > 0 for drop in drops)
    return tiled(run, x, trained, tokens, draws=draws)


def _are_tiles_right(run: Any, module: nn.Module, x: Tensor, trained: list[Any]) -> bool:
    with modes_kept(module):
        module.eval()
        problem = why_not_tiled(run, x, trained)
    if problem:
        _LOG.warning(
            "Feed-forward layers of the class %s are not computed in tiles: %s differs from the "
            "whole row's. Long rows need more memory.",
            type(module).__name__,
            problem,
        )
    return not problem


def input_bytes(args: tuple[object, ...], more: dict[str, object]) -> int:
    """Return the bytes of a block's hidden states, by the arguments of its call; 0 without any."""
    return next((x.nbytes for x in (*args, *more.values()) if isinstance(x, Tensor)), 0)


def _block_of(run: Callable[..., Any]) -> Any:
    """Return the block of a forward function, which transformers binds in one of two ways."""
    bound = getattr(run, "args", None) or (getattr(run, "__self__", None),)
    return bound[0]


def _with_gradient(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Call a block with hidden states that require a gradient, like the blocks above it."""
    if args and isinstance(args[0], Tensor) and not args[0].requires_grad:
        args = args[0].detach().requires_grad_(torch.is_grad_enabled()), *args[1:]
    return call(*args, **more)


class _Replayed:
    """Calls a block twice with the same random numbers of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._state = device, None

    def __call__(self, run: Callable[..., Any], *args: Any) -> Any:
        gpu: Any = gpu_of(self._device)
        before = gpu.get_rng(self._device)
        if self._state is None:
            self._state = before
            return run(*args)
        gpu.set_rng(self._state, self._device)
        try:
            return run(*args)
        finally:
            gpu.set_rng(before, self._device)


def _call(run: Callable[..., Any], *args: Any) -> Any:
    return run(*args)
