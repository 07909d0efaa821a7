"""Norms, gated activations and rotary embeddings, by one kernel for each direction.

- RMSNorm, torch's own kernel: y = x w / sqrt(mean(x^2) + eps), in float32. Written out in torch it
  is eight kernels, which move seven times as much and save x in float32. A CPU, for which torch
  writes it out, computes some rows at a time.
- Gated activations y = f(g) u, of which g and u alone are saved. Written out, f(g) is saved as
  well; the forward pass moves five arrays of the size of g and the backward pass nine, where here
  it is three and five.
- Rotary embeddings y = x cos + rotate_half(x) sin (Su et al., 2021, arXiv:2104.09864), of which no
  x is saved. Written out, the forward pass moves eleven arrays of the size of x and the backward
  pass more, where here it is two.

LoRA layers save their input for the gradient of A. The results of norms and gated activations have
a `Recipe` instead, by which the backward pass computes them again: with adapters on all layers, an
8B saves 3.1 instead of 4.5 MB a token.

In 16 bits torch rounds in between; a kernel rounds once. Where a Triton kernel does not run torch
computes the last two: as exact, with as little saved, not faster.

Shapes: n values of a row; B rows, H heads, T tokens, D head size; `...` is any leading shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from peftkit.events import Fallback
from peftkit.execution.out_of_memory import is_out_of_memory, one_line
from peftkit.kernels.device import is_before_ampere

NUM_COMPARED = 1 << 20
"""Numbers of a kernel's first result that are compared with torch's."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
"""f, by name."""


def _compare(found: Any, expected: Any) -> None:
    """Raise ArithmeticError if results differ from torch's by more than rounding."""
    from peftkit.kernels.checked import TOLERANCE, relative_difference  # a leaf

    if isinstance(expected, Tensor):
        found, expected = [found], [expected]
    for one, wanted in zip(found, expected, strict=True):
        off = relative_difference(one.flatten()[: wanted.numel()], wanted.flatten())
        if not off <= TOLERANCE and wanted.isfinite().all():
            raise ArithmeticError(f"It computes other numbers than torch: {off:.0%} off.")


class Launcher:
    """Launches Triton kernels, each of which is tried once for a device, a dtype and a kind.

    The first launch compiles: the kernel, for which the card may lack the dtype, and a helper in C,
    for which the machine may lack a compiler. Its result is compared with torch's, since a
    compiler may also be wrong. What failed then is not launched again.

    Args:
        kernels: An object that has them; None without Triton.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._problems: dict[tuple[str, torch.dtype, torch.device], str] = {}
        self._unreported: list[str] = []

    def launch(
        self, name: str, x: Tensor, *args: object, expected: Callable[[], Any] | None = None
    ) -> Any:
        """Return the result of a kernel's function for x and more; None if torch has to compute.

        Args:
            expected: Computes the results by torch, or the first numbers of each.
        """
        if self._kernels is None or not x.is_cuda:
            return None
        words = [name, *(arg for arg in args if isinstance(arg, str))]  # compiled for each kind
        key = " ".join(words), x.dtype, x.device
        problem = self._problems.get(key)
        is_compared = problem is None and expected is not None
        if problem or (is_compared and torch.cuda.is_current_stream_capturing()):
            return None
        run = getattr(self._kernels, name)
        try:
            with torch.cuda.device(x.device):  # Triton launches on the thread's current card
                result = run(x, *args)
                if is_compared and expected is not None:
                    _compare(result, expected())
        except Exception as error:
            if problem is not None or is_out_of_memory(error):
                raise
            self._problems[key] = one_line(error)
            self._unreported.append(f"{key[0]} ({str(x.dtype).removeprefix('torch.')})")
            return None
        self._problems[key] = ""
        return result

    @property
    def missing(self) -> Fallback | None:
        """The fallback of a GPU without Triton's kernels, if there are none to launch."""
        if self._kernels is not None:
            return None
        return Fallback(
            path="Triton's kernels are not used",
            cause="Triton is not installed, or has no kernels for this torch.",
            cost="torch computes the same by several kernels, with more memory traffic.",
            fix="Install it: pip install triton",
        )

    def report(self) -> str:
        """Return what failed since the last report and how to mend it, in words; "" if nothing."""
        if not self._unreported:
            return ""
        names, self._unreported = ", ".join(self._unreported), []
        problem, fix = self._first_problem()
        return (
            f"Triton kernels do not run here: {names}. torch computes the same, slower. "
            f"{problem} {fix}"
        )

    def fallback(self, path: str, cost: str) -> Fallback | None:
        """Return the fallback to a path, if a kernel failed."""
        problem, fix = self._first_problem()
        return Fallback(path=path, cause=problem, cost=cost, fix=fix) if problem else None

    def _first_problem(self) -> tuple[str, str]:
        """Return what failed first and how to mend it; two empty strings if nothing failed."""
        failed = ((key, problem) for key, problem in self._problems.items() if problem)
        (_, dtype, device), problem = next(failed, (("", torch.float32, torch.device("cpu")), ""))
        if not problem:
            return "", ""
        if dtype == torch.bfloat16 and is_before_ampere(device):
            return problem, "This card has no bfloat16: base.dtype: fp16 is faster."
        return problem, (
            "Triton needs a C compiler and Python's headers; on Debian and Ubuntu: "
            "apt-get install gcc python3-dev"
        )


def _launcher() -> Launcher:
    try:
        from peftkit.kernels import triton_attention, triton_kernels
    except ImportError:  # no Triton: Windows, Macs, torch for CPUs
        return Launcher(None)
    kernels = SimpleNamespace(**{**vars(triton_kernels), **vars(triton_attention)})
    return Launcher(kernels if torch.version.cuda is not None else None)


TRITON = _launcher()
"""The launcher of this process."""


class Recipe(NamedTuple):
    """How to compute a tensor again, to the bit, from tensors that its own node saves.

    Attributes:
        version: torch's count of changes in place of the tensor, when it was computed.
    """

    compute: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    version: int


_SAVES_RESULTS = ContextVar("saves_results", default=False)
_OBSERVER: ContextVar[Callable[[Tensor], None] | None] = ContextVar("observer", default=None)


@contextmanager
def saving_results() -> Iterator[None]:
    """Make and use no recipes within the context, which a recomputed module runs in.

    It holds the results for its own backward pass only, whose peak comes when they are freed.
    """
    token = _SAVES_RESULTS.set(True)
    try:
        yield
    finally:
        _SAVES_RESULTS.reset(token)


@contextmanager
def observing_recipes(observe: Callable[[Tensor], None]) -> Iterator[None]:
    """Call a function with each tensor that is not saved because of its recipe."""
    token = _OBSERVER.set(observe)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def with_recipe(x: Any, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return x after adding its recipe, if x has a backward pass."""
    if x.requires_grad and not _SAVES_RESULTS.get():
        x.recipe = Recipe(compute, tensors, x._version)
    return cast(Tensor, x)


def recipe_of(x: Tensor) -> Recipe | None:
    """Return the recipe of a tensor to save; None if it has none or was changed in place."""
    recipe: Recipe | None = getattr(x, "recipe", None)
    if recipe is None or recipe.version != x._version or _SAVES_RESULTS.get():
        return None
    if (observe := _OBSERVER.get()) is not None:
        observe(x)
    return recipe


class RMSNorm(torch.autograd.Function):
    """y (..., n) of x (..., n) and a frozen weight (n,) of x's dtype, with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return y; the weight is frozen."""
        out, scale = _scaled(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of x; the scales (..., 1) are in float32."""
        x, weight, scale = ctx.saved_tensors
        grad_x = (norm_gradient if _is_in_parts(x) else _norm_gradient)(grad, x, weight, scale)
        return grad_x, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x by a frozen weight, with its recipe."""
    out = RMSNorm.apply(x, weight, eps)
    return with_recipe(out, lambda x, weight: _scaled(x, weight, eps)[0], x, weight)


PART = 1 << 17
"""Values of a norm that a CPU computes at a time: its caches hold the float32 arrays in between. Of
4096 x 2048 values in bf16 both directions take 22 instead of 217 ms of one core."""


def _is_in_parts(x: Tensor) -> bool:
    """Tell whether a norm is computed part by part: a compiler fuses its operations itself."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def _scaled(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return (norm if _is_in_parts(x) else _norm)(x, weight, eps)


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y and the scales 1 / sqrt(mean(x^2) + eps)."""
    out, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
    return out, scale


def _norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return dx = scale (w dy - n mean(n w dy)), where n = x scale."""
    if x.device.type == "cuda":
        grad_x: Tensor = torch.ops.aten._fused_rms_norm_backward(
            grad, x, weight.shape, scale, weight, [True, False]
        )[0]
        return grad_x
    normal, back = x.float() * scale, grad.float() * weight.float()
    return (scale * (back - normal * (normal * back).mean(-1, keepdim=True))).to(x.dtype)


def _parts(*arrays: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of arrays (..., n) and (..., 1); the first has n values a row."""
    rows = max(1, PART // arrays[0].shape[-1])
    return zip(*(x.reshape(-1, x.shape[-1]).split(rows) for x in arrays), strict=True)


class Gated(torch.autograd.Function):
    """f(g) u of two tensors of one shape and dtype, with both gradients."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.name = name
        return gated(gate, up, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_gate, grad_up = gated_backward(grads[0], *ctx.saved_tensors, ctx.name)
        return grad_gate, grad_up, None


def gated_product(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Return f(g) u, with its recipe."""
    return with_recipe(Gated.apply(gate, up, name), partial(gated, name=name), gate, up)


# a namespace of their own: a plan counts each of these as the one kernel that it is on a GPU


@torch.library.custom_op("peftkit_kernels::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return y and the scales, computed on a CPU."""
    parts = [_norm(part, weight, eps) for (part,) in _parts(x)]
    out, scale = (torch.cat(each) for each in zip(*parts, strict=True))
    return out.view(x.shape), scale.view(*x.shape[:-1], 1)


@norm.register_fake
def _like_normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1, dtype=wide)


@torch.library.custom_op("peftkit_kernels::norm_gradient", mutates_args=())
def norm_gradient(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of x, computed on a CPU."""
    parts = [_norm_gradient(g, part, weight, s) for part, g, s in _parts(x, grad, scale)]
    return torch.cat(parts).view(x.shape)


@norm_gradient.register_fake
def _like_normal(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("peftkit_kernels::gated", mutates_args=())
def gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    """Return f(g) u."""
    arrays = gate.contiguous(), up.contiguous()
    expected = partial(_of_first_numbers, _gated, arrays, name)
    product = TRITON.launch("gated", *arrays, name, expected=expected)
    return _gated(gate, up, name) if product is None else product


def _of_first_numbers(compute: Callable[..., Any], arrays: Sequence[Tensor], name: str) -> Any:
    return compute(*(array.flatten()[:NUM_COMPARED] for array in arrays), name)


def _gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    return ACTIVATIONS[name](gate) * up


@torch.library.custom_op("peftkit_kernels::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Return the gradients of g and u."""
    arrays = grad.contiguous(), gate.contiguous(), up.contiguous()
    expected = partial(_of_first_numbers, _gated_gradients, arrays, name)
    if (grads := TRITON.launch("gated_backward", *arrays, name, expected=expected)) is not None:
        return grads
    return _gated_gradients(grad, gate, up, name)


def _gated_gradients(grad: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    if name == "silu":
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    else:
        how = "tanh" if name == "gelu_tanh" else "none"
        grad_gate = torch.ops.aten.gelu_backward(grad * up, gate, approximate=how)
    return grad_gate, grad * ACTIVATIONS[name](gate)


@gated.register_fake
def _like_product(gate: Tensor, up: Tensor, name: str) -> Tensor:
    return torch.empty_like(gate)


@gated_backward.register_fake
def _like_gradients(grad: Tensor, gate: Tensor, up: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate), torch.empty_like(up)


class Rotary(torch.autograd.Function):
    """Queries or keys (B, H, T, D), rotated by the cosines and sines (B or 1, T, D) of places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return rotated(grads[0], *ctx.saved_tensors, back=True), None, None


@torch.library.custom_op("peftkit_kernels::rotated", mutates_args=())
def rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Return x rotated, as a new array in the layout of x; `back`: the gradient of that."""
    out = torch.empty_like(x)
    if x.stride(-1) == out.stride(-1) == 1:
        arrays = x, cos.contiguous(), sin.contiguous(), out
        expected = partial(_rotated, x, cos, sin, back)
        if (result := TRITON.launch("rotate", *arrays, back, expected=expected)) is not None:
            return result
    return out.copy_(_rotated(x, cos, sin, back))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    (c1, c2), (s1, s2) = (part[:, None].to(wide).chunk(2, -1) for part in (cos, sin))
    first, second = x.to(wide).chunk(2, -1)
    if back:
        halves = first * c1 + second * s2, second * c2 - first * s1
    else:
        halves = first * c1 - second * s1, second * c2 + first * s2
    return torch.cat(halves, -1)


@rotated.register_fake
def _like_rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    return torch.empty_like(x)
