"""A model's blocks: what is kept of them for the backward pass, and whether they are compiled.

Blocks are the layers that transformers marks for gradient checkpointing; it is done through that
mark, and on the blocks themselves: transformers' own switch also makes the embeddings' output
require a gradient, which costs the backward pass of all that lies below the lowest adapter.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from peftkit.errors import PeftkitError
from peftkit.execution.plan import Activations, ExecutionPlan, device_of, plan_of
from peftkit.execution.strategies import activation_modes
from peftkit.kernels.device import gpu_of
from peftkit.kernels.packed import recomputing
from peftkit.kernels.tiled import tiled
from peftkit.model.blocks import STREAMED, feed_forward_modules, recomputable_blocks
from peftkit.model.places import FrozenWrapper
from peftkit.train.memory.offload import Offload

BACKEND = "inductor"
"""Of torch.compile."""

MAX_FORMS = 64
"""Of one block: requires a gradient or not, one row or several, short or long, ... All of a model's
kinds of blocks count together; beyond torch's own limit of 8 they would run eagerly, unnoticed."""

OF_THE_COMPILER = r"The \.grad attribute of a Tensor that is not a leaf"
"""A warning that torch.compile causes itself, about code that nobody wrote."""


class Blocks:
    """The blocks of one model; `restore` leaves them as they were found.

    Args:
        plan: By default what suits the device that the model is on.

    Attributes:
        blocks: The innermost ones, in the order of the model.
        activations: What is kept.
        compiled: Whether they run compiled.
    """

    def __init__(self, model: nn.Module, plan: ExecutionPlan | None = None) -> None:
        self._plan = plan or plan_of(model)
        self._device = device_of(model)
        self.blocks = list(dict.fromkeys(recomputable_blocks(model)))  # some models repeat one
        self.compiled = False
        self._marked: list[Any] = [
            m for m in model.modules() if hasattr(m, "gradient_checkpointing")
        ]
        self._before = [
            (m.gradient_checkpointing, getattr(m, "_gradient_checkpointing_func", None))
            for m in self._marked
        ]
        self._compiled_before = [block._compiled_call_impl for block in self.blocks]
        found = any(enabled for enabled, _ in self._before)
        self.activations: Activations = "recompute" if found else "keep"
        self._name = type(model).__name__
        self._stream = getattr(model, STREAMED, None)
        self.are_streamed = self._stream is not None
        self._offload = Offload()
        self._feed_forward: list[Any] = feed_forward_modules(model)
        self._draws: dict[tuple[Any, bool], bool] = {}
        self._call: Callable[..., Any] = _call
        self._while_compiled = ExitStack()

    @property
    def num_kinds(self) -> int:
        """How many different blocks there are: each is compiled by itself."""
        kinds = {
            tuple((name, type(module)) for name, module in block.named_modules())
            for block in self.blocks
        }
        return max(len(kinds), 1)

    def ways(self, wish: bool | Literal["auto"]) -> tuple[Activations, ...]:
        """Return what may be kept, the fastest first; see `activation_modes`."""
        return activation_modes(
            wish,
            on_gpu=self._plan.on_gpu,
            has_blocks=bool(self._marked),
            streamed=self.are_streamed,
            recomputes=self.activations != "keep",
        )

    def set_activations(self, activations: Activations) -> None:
        """Set what is kept of the activations from now on.

        Raises:
            PeftkitError: Not all are to be kept, and the model has no blocks.
        """
        if activations != "keep" and not self._marked:
            raise PeftkitError(
                "train.gradient_checkpointing: true is not possible here",
                found=f"{self._name} has no blocks marked for it.",
                fix="Set it to auto or false; a smaller train.batch_size also saves memory.",
            )
        self.activations = activations
        self._apply()

    @contextmanager
    def keeping_all(self) -> Iterator[None]:
        """Keep all activations within this context."""
        before = [(m.gradient_checkpointing, None) for m in self._marked]
        self._mark([(False, None)] * len(self._marked))
        self._set_tiled(False)
        try:
            yield
        finally:
            self._mark(before)
            self._set_tiled(self._tiled)

    def compile(self, wanted: bool = True) -> None:
        """Run the blocks compiled from here on, or no longer."""
        self.compiled = wanted
        if wanted:
            from torch._dynamo import config  # slow to import, and only needed here
            from torch.fx.experimental import _config as symbols

            # numbers of a config are the same in all blocks; to find that it needs them as they
            # are, the compiler would trace each block twice
            patch = config.patch(recompile_limit=MAX_FORMS, specialize_float=True)
            self._while_compiled.enter_context(patch)
            # sizes that are equal in the first batch, by chance, are not taken to be the same
            apart = symbols.patch(use_duck_shape=False)  # type: ignore[attr-defined]
            self._while_compiled.enter_context(apart)
            self._while_compiled.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=OF_THE_COMPILER)
            self._call = torch.compile(_call, backend=BACKEND, dynamic=True)
        self._apply()

    def eagerly(self) -> AbstractContextManager[object]:
        """Return a context in which blocks run as they are written, compiled or not."""
        return torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()

    def restore(self) -> None:
        """Leave the model as it was found."""
        self.compiled = False
        self._while_compiled.close()
        self._mark(self._before)
        self._set_tiled(False)
        for block, compiled in zip(self.blocks, self._compiled_before, strict=True):
            block._compiled_call_impl = compiled

    def _apply(self) -> None:
        function = self._offloaded if self.activations == "offload" else self._recomputed
        if self.activations == "keep":
            self._mark([(False, before) for _, before in self._before])
        else:
            self._mark([(True, function)] * len(self._marked))
        self._set_tiled(self._tiled)
        itself = self.compiled and self.activations == "keep"  # else what is computed twice is
        for block in self.blocks:
            block._compiled_call_impl = None
            if itself:
                block.compile(backend=BACKEND, dynamic=True)
        if itself:
            self._learn_alike()

    def _set_tiled(self, wanted: bool) -> None:
        """Compute feed-forward layers in tiles from here on, or as they are written."""
        for module in self._feed_forward:
            module.__dict__.pop("forward", None)
            if wanted:
                module.forward = functools.partial(_in_tiles, self._plan, module)

    @property
    def _tiled(self) -> bool:
        """Whether feed-forward layers go tile by tile: a tile's backward pass needs the weights."""
        elsewhere = self.are_streamed or self._plan.is_sharded
        return self.activations != "keep" and not (self.compiled or elsewhere)

    def _learn_alike(self) -> None:
        """Let the lowest block that learns run the code of those above it.

        Otherwise it gets its own, for an input without gradient, which takes as long to compile as
        that of all the others; what it saves in each step is a thousandth of it.
        """
        learning = (b for b in self.blocks if any(p.requires_grad for p in b.parameters()))
        if (lowest := next(learning, None)) is not None:
            compiled: Any = lowest._compiled_call_impl
            lowest._compiled_call_impl = functools.partial(_with_gradient, compiled)

    def _mark(self, values: list[tuple[bool, Any]]) -> None:
        for module, (enabled, function) in zip(self._marked, values, strict=True):
            module.gradient_checkpointing = enabled
            if function is not None:
                module._gradient_checkpointing_func = function

    def _recomputed(self, run: Callable[..., Any], *args: Any) -> Any:
        inner = self._inner(run)
        if self._plan.recomputing_keeps_unpacked:
            inner = recomputing()(inner)
        again = functools.partial(checkpoint, use_reentrant=False)
        return self._with_rng(run, lambda kept: again(inner, *args, preserve_rng_state=kept))

    def _offloaded(self, run: Callable[..., Any], *args: Any) -> Any:
        inner = self._inner(run)
        return self._with_rng(run, lambda kept: self._offload(inner, *args, preserve_rng=kept))

    def _with_rng(self, run: Callable[..., Any], call: Callable[[bool], Any]) -> Any:
        """Call a block, which keeps the generators' state only if it draws random numbers.

        The first time it is watched: a block has dropout or not.
        """
        key = _drawing(run)
        if key in self._draws:
            return call(self._draws[key])
        before = self._generators()
        out = call(True)
        if torch.is_grad_enabled():
            self._draws[key] = not all(map(torch.equal, before, self._generators()))
        return out

    def _generators(self) -> list[Tensor]:
        """Return the state of torch's own generators, which lives on the CPU for a GPU too."""
        gpu = gpu_of(self._device)
        return [torch.get_rng_state(), *([] if gpu is None else [gpu.get_rng(self._device)])]

    def _inner(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is computed twice; with MPS's random numbers, of which torch keeps no state.

        torch's checkpoint sets back the generators of the CPU and of CUDA alone.
        """
        inner = self._computed(run)
        if self._device.type != "mps" or not self._draws.get(_drawing(run), True):
            return inner
        return functools.partial(_Replayed(self._device), inner)

    def _computed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return what computes a block: compiled inside of what computes it again.

        transformers keeps a block's hooks outside: streamed weights are fetched for both times.
        """
        if self._stream is not None:
            return functools.partial(self._with_weights, run)
        return functools.partial(self._call, run) if self.compiled else run

    def _with_weights(self, run: Callable[..., Any], *args: Any) -> Any:
        assert self._stream is not None
        with self._stream.around(_block_of(run)):
            return run(*args)


def _in_tiles(plan: ExecutionPlan, module: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a module, in tiles where a row is long."""
    run: Any = functools.partial(type(module).forward, module)
    plain = args or kwargs or not isinstance(x, Tensor) or x.dim() != 3
    if plain or not torch.is_grad_enabled() or (tokens := plan.tile(x.shape[1])) >= x.shape[1]:
        return run(x, *args, **kwargs)
    wrappers = [part for part in module.modules() if isinstance(part, FrozenWrapper)]
    trained = list(dict.fromkeys(p for wrapper in wrappers for p in wrapper.trained_parameters()))
    if not (trained or x.requires_grad):
        return run(x)
    drops = (part for part in module.modules() if isinstance(part, nn.Dropout))
    draws = any(part.training and part.p > 0 for part in drops)
    return tiled(run, x, trained, tokens, draws=draws)


def _block_of(run: Callable[..., Any]) -> Any:
    """Return the block whose forward pass this is: transformers passes it in one of two ways."""
    bound = getattr(run, "args", None) or (getattr(run, "__self__", None),)
    return bound[0]


def _with_gradient(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Call a block with hidden states that have a gradient, as those of the blocks above have."""
    if args and isinstance(args[0], Tensor) and not args[0].requires_grad:
        args = args[0].detach().requires_grad_(torch.is_grad_enabled()), *args[1:]
    return call(*args, **more)


def _drawing(run: Callable[..., Any]) -> tuple[Any, bool]:
    """Return what decides whether a block draws random numbers: it, and whether it trains."""
    block = _block_of(run)
    return block, getattr(block, "training", True)


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
