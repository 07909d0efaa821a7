"""Tensors that say they are on cuda:N and compute on the CPU, with real values.

`CudaTensor` wraps a CPU tensor. `Kernels`, a dispatch mode, sees each operator before it runs: it
makes what is asked for on "cuda", refuses operators that mix devices as CUDA does, and notes what
makes the host wait for the device. To C++ the wrapper is a CPU tensor, so that autograd needs no
CUDA build.

A copy on another stream than the default one is not made at once, only when a stream or the host
waits for it: code that forgets to wait computes with garbage. The source of a copy from pinned
memory must stay as it is until the host next waits; `Card.wait` checks that.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from peftkit.kernels.fused import norm_gradient
from tests.simulated_gpu.graph_pools import GraphPools
from tests.simulated_gpu.pinned import PinnedHeap

COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
"""Operators whose result, or its shape, the host has to know."""
ASKED = {"_local_scalar_dense", "equal", "is_nonzero"}
"""Of these: those that give a number to the host."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
PRODUCTS = {"addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv"}
"""Operators of cuBLAS."""
COMPOSED = {
    str(Path(torch.__file__).parent / name)
    for name in ("autograd/graph.py", "nn/functional.py", "nn/utils/rnn.py")
}
"""Files of torch from which C++ is called that makes tensors of its own."""
PACKAGES = {
    name: f"{Path(str(find_spec(name).origin)).parent}{os.sep}"  # type: ignore[union-attr]
    for name in ("peftkit", "peftkit_server", "transformers", "accelerate")
}
"""Folders, which no other folder's name can be mistaken for."""
TESTS = f"{Path(__file__).parents[1]}{os.sep}"
OURS = tuple(str(Path(__file__).with_name(name)) for name in ("tensors.py", "simulation.py"))


@dataclass(frozen=True)
class Wait:
    """The host waited for the device: why, and the lines that led there, ours first."""

    why: str
    where: str

    def __str__(self) -> str:
        return f"{self.why} at {self.where}"


@dataclass
class Generator:
    """The card's generator, which is the CPU's.

    Attributes:
        is_capturing: Whether a graph's end must come before the next draw: a capture that breaks
            off never sets it back.
    """

    is_capturing: bool = False

    def get_state(self) -> Tensor:
        """Return the state, but not while a graph is recorded: its draws have no number yet."""
        if self.is_capturing:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during capture")
        return torch.get_rng_state()

    clone_state = get_state

    def set_state(self, state: Tensor) -> None:
        """Draw from here on."""
        self.get_state()
        torch.set_rng_state(state)

    def graphsafe_set_state(self, state: Tensor) -> None:
        """Put a state that no graph knows in place of this one."""
        self.is_capturing = False
        torch.set_rng_state(state)


@dataclass
class Card:
    """One simulated machine with GPUs, and what was seen of it."""

    name: str = "NVIDIA H200"
    memory: int = 150 * 10**9
    capability: tuple[int, int] = (9, 0)
    count: int = 1
    allocated: int = 0
    peak: int = 0
    reserved: int = 0
    retries: int = 0
    launches: int = 0
    recorded_streams: int = 0
    waits: list[Wait] = field(default_factory=list)
    operators: Counter[str] = field(default_factory=Counter)
    pinned: PinnedHeap = field(default_factory=PinnedHeap)
    has_segments: bool = True
    """Whether its driver maps expandable segments; WSL2, vGPU and Jetson do not."""
    is_wsl: bool = False
    arch_list: tuple[str, ...] = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
    full_says: str | None = None
    """The message of a RuntimeError of a full card; None: torch's OutOfMemoryError."""
    allocator: str | None = None
    """Settings of torch's allocator; None: the environment's."""
    has_float64: bool = True
    """Apple's cards have none."""
    broken: frozenset[str] = frozenset()
    """Operators of kernels/fused.py whose Triton kernels raise."""
    default_stream: Any = None
    graph: Any = None
    """The one that is recorded now."""
    generator: Generator = field(default_factory=Generator)
    capture_stream: Any = None
    """torch.cuda.graph's default one: of the process, on the card that recorded first."""
    pools: GraphPools = field(default_factory=GraphPools)
    host_tasks: list[Callable[[], None]] = field(default_factory=list)
    """What is done when the host next waits."""
    workspace: int = 512
    """Bytes of cuBLAS for a stream with products, which torch 2.11 never frees: 32 MiB, H100."""
    _workspaces: dict[Any, torch.UntypedStorage] = field(default_factory=dict)
    _known: dict[int, Any] = field(default_factory=dict)
    _chosen: threading.local = field(default_factory=threading.local)

    @property
    def stream(self) -> Any:
        """The current one of this thread."""
        return getattr(self._chosen, "stream", self.default_stream)

    @stream.setter
    def stream(self, stream: Any) -> None:
        self._chosen.stream = stream

    @property
    def current(self) -> int:
        """The number of this thread's card: the first one for a new thread."""
        return getattr(self._chosen, "current", 0)

    @current.setter
    def current(self, number: int) -> None:
        self._chosen.current = number

    def set_allocator(self, settings: str) -> None:
        """Change the settings of torch's allocator."""
        self.allocator = settings

    def _refuse_segments(self) -> None:
        """Raise what an allocation raises without expandable segments, if they are enabled."""
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        found = next(filter(None, (self.allocator, *(os.environ.get(name) for name in names))), "")
        if (self.is_wsl or not self.has_segments) and "expandable_segments:True" in found:
            raise torch.AcceleratorError("CUDA driver error: operation not supported")

    def reset(self) -> None:
        """Begin to count anew."""
        self.launches, self.recorded_streams, self.peak = 0, 0, self.allocated
        self.waits.clear()
        self.operators.clear()

    def wait(self, why: str) -> None:
        """Note that the host waits for all that was launched."""
        if self.graph is not None:
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing: {why}"
            )
        self.waits.append(Wait(why, _where()))
        self.settle()

    def settle(self) -> None:
        """Do what had been put off until now."""
        if self.stream is not None:
            self.stream.drain_all()
        tasks, self.host_tasks = self.host_tasks, []
        for task in tasks:
            task()

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count memory until it is given back; raise OutOfMemoryError beyond what the card has."""
        key, size = id(storage), -(-storage.nbytes() // 512) * 512  # as CUDA's allocator rounds
        if not size or key in self._known:
            return
        self._refuse_segments()
        if self.reserved + size > self.memory > self.allocated + size:
            self.retries, self.reserved = self.retries + 1, self.allocated  # given back first
        if self.allocated + size > self.memory:
            if self.full_says is not None:
                raise RuntimeError(self.full_says)
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")

        def gone() -> None:
            self._known.pop(key, None)
            self.allocated -= size

        self._known[key] = weakref.finalize(storage, gone)
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)

    def multiply(self) -> None:
        """Allocate cuBLAS' workspace of the current stream, at its first product."""
        stream = self.stream and self.stream.recorded_on
        if stream is not None and stream not in self._workspaces:
            self._workspaces[stream] = torch.UntypedStorage(self.workspace)
            self.note(self._workspaces[stream])


def _where() -> str:
    """Return the innermost lines of our package and of the libraries around it, as file:line."""
    found: dict[str, str] = {}
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        for package, folder in {**PACKAGES, "tests": TESTS}.items():
            if name.startswith(folder) and package not in found and name not in OURS:
                file = name.removeprefix(folder).replace(os.sep, "/")
                found[package] = f"{package}/{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    order = [found[package] for package in PACKAGES if package in found]
    return ", in ".join(order) or found.get("tests", "elsewhere")


CARD = Card()
"""The card of the simulation that is on; `simulation.simulated` puts another in its place."""


class CudaTensor(torch.Tensor):
    """A tensor on a card that is not there."""

    values: Tensor
    number: int

    @staticmethod
    def __new__(cls, values: Tensor, number: int = 0) -> CudaTensor:
        assert not isinstance(values, CudaTensor)
        made: CudaTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            requires_grad=False,
        )
        made.values, made.number = values.detach(), number
        CARD.note(values.untyped_storage())
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with Kernels():  # C++ has called it past the modes
            return func(*args, **(kwargs or {}))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.number)

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        assert isinstance(other, CudaTensor)
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.values, self.number = other.values, other.number

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CudaTensor({self.values!r}, device='cuda:{self.number}')"

    def __deepcopy__(self, memo: dict[int, Any]) -> CudaTensor:
        copied = CudaTensor(self.values.clone(), self.number).requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True  # type: ignore[attr-defined]
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a CUDA tensor was pickled")

    def get_device(self) -> int:
        return self.number

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def is_shared(self) -> bool:
        return False

    def is_pinned(self, *_: Any) -> bool:
        return False

    def pin_memory(self, *_: Any) -> Tensor:
        raise RuntimeError(
            "cannot pin 'torch.cuda.FloatTensor': only dense CPU tensors can be pinned"
        )

    def record_stream(self, stream: Any) -> None:
        CARD.recorded_streams += 1

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy  # type: ignore[assignment]

    def tolist(self) -> Any:
        CARD.wait("tolist()")
        return _read(self.values)

    def new_tensor(self, data: Any, **how: Any) -> Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **how})

    def cpu(self, *_: Any) -> Tensor:
        return self.to("cpu")


def _read(values: Tensor) -> Any:
    """Return a tensor's numbers; of one without data ones, which say yes to every question."""
    if not isinstance(values, FakeTensor):
        return values.tolist()
    if values.dim():
        return [_read(part) for part in values]
    return True if values.dtype == torch.bool else 1.0 if values.is_floating_point() else 1


class _Move(torch.autograd.Function):
    """A copy from or to a card, and of the gradient back."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, place: torch.device, non_blocking: bool) -> Tensor:
        ctx.back = source.device
        CARD.launches += 1
        values = source.values if isinstance(source, CudaTensor) else source
        target = torch.empty_like(values)
        if place.type != "cuda":
            _copy_to_host(target, values, False)  # the new tensor's memory is not pinned
            return target
        if isinstance(source, CudaTensor):
            target.copy_(values)
        else:
            _copy_to_card(target, values, non_blocking)
        return CudaTensor(target, place.index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad.to(ctx.back), None, None


PLAIN_TO = torch.Tensor.to


def moved(tensor: Tensor, *args: Any, copy: bool = False, **how: Any) -> Tensor:
    """Take the place of Tensor.to."""
    if args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    if "other" in how:
        other = how.pop("other")
        args = (other.device, other.dtype, *args)
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **how)  # type: ignore[attr-defined]
    place = tensor.device if device is None else _device(device)
    if "cuda" not in (place.type, tensor.device.type):
        return PLAIN_TO(tensor, *args, copy=copy, **how)
    kept = tensor if dtype in (None, tensor.dtype) else PLAIN_TO(tensor, dtype)
    if layout is not None:
        kept = PLAIN_TO(kept, memory_format=layout)
    if place == tensor.device:
        return kept.clone() if copy and kept is tensor else kept
    return _Move.apply(kept, place, non_blocking)  # type: ignore[no-any-return]


def to_card(tensor: Tensor, device: Any = None, non_blocking: bool = False) -> Tensor:
    """Take the place of Tensor.cuda."""
    return moved(tensor, _device("cuda" if device is None else device), non_blocking=non_blocking)


def _device(device: Any) -> torch.device:
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type != "cuda":
        return place
    number = CARD.current if place.index is None else place.index
    if number >= CARD.count:
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return torch.device("cuda", number)


def is_pinned(tensor: Tensor) -> bool:
    """Return whether a CPU tensor lies in pinned memory."""
    return id(tensor.untyped_storage()) in CARD.pinned.blocks


def pin(tensor: Tensor) -> Tensor:
    """Let a CPU tensor's memory count as pinned."""
    CARD.pinned.add(tensor.untyped_storage())
    return tensor


def _copy_to_host(target: Tensor, values: Tensor, non_blocking: bool) -> None:
    """Copy from the card; what does not wait arrives when somebody waits for it."""
    if not non_blocking:
        CARD.wait("a copy to the CPU that blocks")
        target.copy_(values)
        return
    _spoil(target)
    _later(lambda: target.copy_(values))


def _copy_to_card(target: Tensor, source: Tensor, non_blocking: bool) -> None:
    """Copy to the card; memory that is not pinned makes the host wait."""
    if source.dim() == 0 or source.numel() == 0:  # a number is an argument of a kernel
        target.copy_(source)
        return
    if not non_blocking:
        CARD.wait("a copy to the GPU that blocks")
    elif not is_pinned(source):
        CARD.wait("a copy to the GPU out of memory that is not pinned")
    if CARD.stream is not None and not CARD.stream.is_default:
        _spoil(target)
        CARD.stream.queue(lambda: target.copy_(source))
        return
    if non_blocking and is_pinned(source):
        _watch(source)
    target.copy_(source)


def _spoil(target: Tensor) -> None:
    """Fill what a copy has yet to arrive in: nobody may read it."""
    if target.is_floating_point():
        target.fill_(float("nan"))
    elif target.dtype == torch.uint8:
        target.fill_(255)  # NaN in all floats


def _later(task: Callable[[], Any]) -> None:
    """Do it when somebody waits for the current stream."""
    if CARD.stream is not None and not CARD.stream.is_default:
        CARD.stream.queue(task)
    else:
        CARD.host_tasks.append(lambda: (task(), None)[1])


def _watch(source: Tensor) -> None:
    """Check, when the host next waits, that nobody wrote over what a copy was reading."""
    if isinstance(source, FakeTensor):
        return
    before, where = source.clone(), _where()

    def check() -> None:
        same = torch.equal(before.view(torch.uint8), source.view(torch.uint8))
        assert same, f"pinned memory was overwritten while it was copied from, at {where}"

    if source.numel() <= 1 << 16 and source.is_contiguous():
        CARD.host_tasks.append(check)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    values = x.float()
    scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * scale * weight.float()).to(x.dtype), scale


def _rms_norm_back(
    grad: Tensor, x: Tensor, shape: Any, scale: Tensor, weight: Tensor, mask: Any
) -> tuple[Tensor, Tensor | None]:
    assert list(mask) == [True, False], "of a frozen weight no gradient is wanted"
    return norm_gradient(grad, x, weight, scale), None


KERNELS_OF_CUDA = torch.library.Library("aten", "IMPL")
"""Operators that torch has for CUDA alone, or as one kernel there alone."""
KERNELS_OF_CUDA.impl("_fused_rms_norm", _rms_norm, "CPU")
KERNELS_OF_CUDA.impl("_fused_rms_norm_backward", _rms_norm_back, "CPU")


class Kernels(TorchDispatchMode):
    """Runs each operator on the CPU, as the card would have it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the guard would cost more than the rest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(_tensors((args, kwargs)))
        ours = [tensor for tensor in tensors if isinstance(tensor, CudaTensor)]
        place = kwargs.get("device")
        place = None if place is None else torch.device(place)
        if kwargs.get("pin_memory"):
            return pin(func(*args, **{**kwargs, "pin_memory": False}))
        if place is not None and place.type == "cpu" and _made_by_cpp():
            place = torch.device("cuda", CARD.current)
        if ours and func is torch.ops.aten._to_copy.default:  # C++ takes it to be on the CPU
            kwargs, place = {**kwargs, "device": None}, None  # `moved` takes care of the others
        if not ours and (place is None or place.type != "cuda"):
            return func(*args, **kwargs)
        name = func._overloadpacket.__name__
        inside = func.namespace == "peftkit" or name in CARD.broken
        if inside and (made := _inside_of(f"{func.namespace}::{name}")) is not None:
            with self, torch.no_grad():
                return made(*args, **kwargs)
        if name in COPIES and (copied := self._copied(func, name, args, kwargs, place)) is not None:
            return copied
        _refuse_mixing(func, name, args, tensors, ours, place)
        self._note_waits(name, args, kwargs, ours)
        if name in ASKED and isinstance(args[0].values, FakeTensor):
            return True if name != "_local_scalar_dense" else _read(args[0].values)
        if CARD.graph is not None:
            CARD.graph.keep(func, args, kwargs)
        elif CARD.generator.is_capturing and torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        out = _run(func, name, args, kwargs, ours, place)
        if not CARD.has_float64 and any(t.dtype == torch.float64 for t in _tensors(out)):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype. Please use float32")
        if CARD.graph is not None:
            CARD.graph.note(func, args, kwargs, out)
        self.launched(func, name, args, kwargs, out)
        return out

    def launched(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Hear of an operator that ran on the card; for whoever counts."""

    def _copied(
        self, func: Any, name: str, args: Any, kwargs: Any, place: torch.device | None
    ) -> Any:
        """Copy between devices; None where the operator stays on one."""
        if name == "_to_copy":
            source = args[0]
            if place is None or place.type == "cpu" or isinstance(source, CudaTensor):
                return None  # a CudaTensor is moved by its own `to`
            target = torch.empty_like(source, dtype=kwargs.get("dtype"))
            _copy_to_card(target, source, bool(kwargs.get("non_blocking")))
            CARD.launches += 1
            return CudaTensor(target, _device(place).index)
        if name == "copy_":
            target, source = args[:2]
            if isinstance(target, CudaTensor) == isinstance(source, CudaTensor):
                return None
            non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
            if isinstance(target, CudaTensor):
                _copy_to_card(target.values, source, non_blocking)
            else:
                _copy_to_host(target, source.values, non_blocking and is_pinned(target))
            CARD.launches += 1
            return target
        return None

    def _note_waits(self, name: str, args: Any, kwargs: Any, ours: list[Any]) -> None:
        if name in WAITING and ours:
            CARD.wait(f"{name}()")
        elif name in INDEXED and isinstance(args[0], CudaTensor):
            indices = [index for index in args[1] if isinstance(index, Tensor)]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                CARD.wait(f"{name}() with a mask")
            elif any(not isinstance(index, CudaTensor) for index in indices):
                CARD.wait(f"{name}() with an index on the CPU")
        elif name == "repeat_interleave" and kwargs.get("output_size") is None:
            CARD.wait("repeat_interleave() without output_size")


def _made_by_cpp() -> bool:
    """Tell whether C++ makes a tensor beside another that it takes to be on the CPU."""
    return sys._getframe(2).f_code.co_filename in COMPOSED


def _inside_of(name: str) -> Callable[..., Any] | None:
    """Return what an operator of ours is written as, so that its inside is seen too."""
    definition = torch._library.custom_ops.OPDEFS.get(name)
    return None if definition is None else definition._init_fn


def _refuse_mixing(
    func: Any, name: str, args: Any, tensors: list[Tensor], ours: list[Any], place: Any
) -> None:
    foreign = [t for t in tensors if not isinstance(t, CudaTensor) and t.dim() > 0]
    if name in INDEXED and isinstance(args[0], CudaTensor):
        foreign = [t for t in foreign if t.is_floating_point()]  # an index may be on the CPU
    if func.namespace == "c10d":
        return
    devices = {str(tensor.device) for tensor in ours}
    if (ours and foreign) or len(devices) > 1:
        found = ", ".join(sorted(devices | {"cpu"} if foreign else devices))
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{found}! ({func} at {_where()})"
        )


def _run(func: Any, name: str, args: Any, kwargs: Any, ours: list[Any], place: Any) -> Any:
    number = ours[0].number if ours else CARD.current
    if place is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
        if place.type == "cuda":
            number = _device(place).index
    originals = {id(tensor.values): tensor for tensor in ours}
    inner = _each((args, kwargs), lambda t: t.values if isinstance(t, CudaTensor) else t)
    out = called(func, *inner)
    CARD.launches += 1
    CARD.operators[name] += 1
    if name in PRODUCTS:
        CARD.multiply()
    if place is not None and place.type == "cpu":
        return out
    return _each(out, lambda t: originals[id(t)] if id(t) in originals else CudaTensor(t, number))


def called(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator on the CPU, which counts floats alone; attention's memory is as a card's."""
    if func is torch.ops.aten.histc.default and not args[0].is_floating_point():
        return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    out = func(*args, **kwargs)
    if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        values, *rest = out  # (B, H, T, D); cuDNN and flash write (B, T, H, D)
        return values.transpose(1, 2).contiguous().transpose(1, 2), *rest
    return out


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operator's arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _each(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return arguments or results with their tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_each(item, change) for item in value])
    if isinstance(value, dict):
        return {name: _each(item, change) for name, item in value.items()}
    return value
