"""`simulated`: a context in which torch finds a GPU, and what is put on it computes on the CPU."""

from __future__ import annotations

import platform
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

# these look at torch.cuda once, when they are imported, and must find it as it is
import bitsandbytes  # noqa: F401
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import _disable_current_modes

from peftkit.execution import gpu_support, graphs
from peftkit.kernels import checked, fused, packed_product
from peftkit.kernels import device as device_kinds
from peftkit.train import loop, metrics
from tests.simulated_gpu import tensors
from tests.simulated_gpu.products import ProductKernels
from tests.simulated_gpu.real import REAL, real_card
from tests.simulated_gpu.tensors import Card, CudaTensor, Kernels

STREAMS: list[Stream] = []
ALLOCATOR = "_accelerator_setAllocatorSettings"
WSL_RELEASE = "5.15.167.4-microsoft-standard-WSL2"
ONE_AT_A_TIME = threading.RLock()
_device_constructors()  # torch lists its functions once, and must find them as they are


class Stream:
    """Holds the copies that were launched on it until somebody waits for them.

    Attributes:
        recorded_on: The stream that a graph is recorded on, while this one takes its place.
    """

    def __init__(
        self,
        device: Any = None,
        is_default: bool = False,
        recorded_on: Stream | None = None,
        **_: Any,
    ) -> None:
        self.device, self.is_default = device, is_default
        self.recorded_on = recorded_on or self
        self._tasks: list[Callable[[], Any]] = []
        self._before: list[Any] = []
        STREAMS.append(self)

    def queue(self, task: Callable[[], Any]) -> None:
        """Launch a copy."""
        with ONE_AT_A_TIME:
            self._tasks.append(task)

    def drain(self) -> None:
        """Make all copies that were launched."""
        with ONE_AT_A_TIME:  # who waits meanwhile waits for these too
            while self._tasks:
                self._tasks.pop(0)()

    def drain_all(self) -> None:
        """Make all copies of all streams."""
        for stream in STREAMS:
            stream.drain()

    def wait_stream(self, other: Stream) -> None:
        """What comes next on this stream comes after what the other was given so far."""
        other.drain()

    def wait_event(self, event: Event) -> None:
        """What comes next comes after the event."""
        event.finish()

    def record_event(self, event: Event | None = None) -> Event:
        """Mark how far this stream is."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Let the host wait for all of it."""
        tensors.CARD.wait("Stream.synchronize()")

    def __enter__(self) -> Stream:
        self._before.append(tensors.CARD.stream)
        tensors.CARD.stream = self
        return self

    def __exit__(self, *_: Any) -> None:
        tensors.CARD.stream = self._before.pop()


class Event:
    """A mark in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark how far a stream is."""
        self._stream = stream or tensors.CARD.stream

    def finish(self) -> None:
        """Make what was launched before."""
        if self._stream is not None:
            self._stream.drain()

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait for it."""
        self.finish()

    def synchronize(self) -> None:
        """Let the host wait for it."""
        tensors.CARD.wait("Event.synchronize()")

    def query(self) -> bool:
        """Whether the device has come there."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds: of no meaning here."""
        return 1.0


class Graph:
    """Operators that were recorded, to be run again on the same tensors by one launch."""

    def __init__(self) -> None:
        self._recorded: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Any, Any]] = {}

    def keep(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep what an operator is about to overwrite."""
        given = dict(zip((one.name for one in func._schema.arguments), args, strict=False))
        for one in func._schema.arguments:
            if one.alias_info is not None and one.alias_info.is_write:
                for tensor in tensors._tensors({**given, **kwargs}.get(one.name)):
                    plain = tensor.values if isinstance(tensor, CudaTensor) else tensor
                    storage = plain.untyped_storage()
                    self._before.setdefault(storage.data_ptr(), (storage, storage.clone()))

    def restore(self) -> None:
        """What is recorded has not run: all that it overwrites is as before."""
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before = {}

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record an operator."""
        place = {"device": torch.device("cpu")} if kwargs.get("device") is not None else {}
        values = [
            tensors._each(part, lambda t: t.values if isinstance(t, CudaTensor) else t)
            for part in (args, {**kwargs, **place}, out)
        ]
        self._recorded.append((func, *values))

    def spoil(self) -> None:
        """What is recorded has not run: results are garbage until it is replayed."""
        for _, args, kwargs, out in self._recorded:
            known = {t.untyped_storage().data_ptr() for t in tensors._tensors((args, kwargs))}
            for made in tensors._tensors(out):
                if made.untyped_storage().data_ptr() not in known:
                    tensors._spoil(made)

    def replay(self) -> None:
        """Run all again."""
        tensors.CARD.launches += 1
        with _disable_current_modes():
            for func, args, kwargs, out in self._recorded:
                again = tensors.called(func, args, kwargs)
                pairs = zip(tensors._tensors(out), tensors._tensors(again), strict=True)
                for made, new in pairs:
                    if made.data_ptr() != new.data_ptr():
                        made.copy_(new)


class Recording:
    """torch.cuda.graph: records what is launched; whatever makes the host wait is an error.

    As torch's, one that breaks off ends in an error of its own, the thread stays on the stream that
    was recorded, and the generator refuses to draw until another state takes its place. A pool
    whose last graph is gone is refused: with expandable segments torch keeps it, and asserts that
    a graph uses it. Without a stream all processes' recordings share the one of the card that
    recorded first.
    """

    def __init__(
        self, graph: Graph, pool: Any = None, stream: Stream | None = None, **_: Any
    ) -> None:
        self._graph, self._before, self._pool = graph, None, pool
        card = tensors.CARD
        if stream is None:
            card.capture_stream = card.capture_stream or Stream(card.current, is_default=True)
        self._stream: Stream = stream or card.capture_stream

    def __enter__(self) -> None:
        card = tensors.CARD
        card.wait("torch.cuda.graph()")
        if torch.device("cuda", card.current) != tensors._device(self._stream.device):
            raise RuntimeError("CUDA error: the stream that is captured is of another device")
        card.pools.begin(self._graph, self._pool)
        here = Stream(is_default=True, recorded_on=self._stream)
        self._before, card.stream = card.stream, here
        self._random = torch.get_rng_state()  # nothing is drawn until a replay
        card.generator.is_capturing = True
        card.graph = self._graph

    def __exit__(self, kind: Any, *_: Any) -> None:
        card, card.graph = tensors.CARD, None
        torch.set_rng_state(self._random)
        self._graph.restore()
        if kind is not None:
            raise torch.AcceleratorError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        card.generator.is_capturing = False
        card.stream = self._before
        self._graph.spoil()


class CurrentCard:
    """torch.cuda.device: another card is this thread's current one within the context."""

    def __init__(self, device: Any) -> None:
        number = device if isinstance(device, int | None) else torch.device(device).index
        self._number = -1 if number is None else number
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(tensors.CARD.current)
        if self._number >= 0:
            tensors.CARD.current = self._number

    def __exit__(self, *_: Any) -> None:
        tensors.CARD.current = self._before.pop()


def _answers(card: Card) -> dict[str, Any]:
    """What torch.cuda says."""
    facts = types.SimpleNamespace(
        name=card.name,
        total_memory=card.memory,
        major=card.capability[0],
        minor=card.capability[1],
        multi_processor_count=132,
        warp_size=32,
        gcnArchName="",
    )

    def set_device(device: Any) -> None:
        if not isinstance(device, int) and torch.device(device).index is None:
            raise ValueError(f"Expected a torch.device with a specified index, but got: {device}")
        card.current = tensors._device(device).index

    def cap(fraction: float, device: Any = None) -> None:
        card.memory = int(fraction * facts.total_memory)

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def allocated(device: Any = None) -> int:
        return card.allocated

    def peak(device: Any = None) -> int:
        return card.peak

    def release() -> None:
        card.reserved = card.allocated

    def forget_peak(device: Any = None) -> None:
        card.peak = card.allocated

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": nothing,
        "_lazy_init": nothing,
        "device_count": lambda: card.count,
        "current_device": lambda: card.current,
        "set_device": set_device,
        "get_device_name": lambda device=None: card.name,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_properties": lambda device=None: facts,
        "is_bf16_supported": lambda *_, **__: card.capability >= (8, 0),
        "synchronize": lambda device=None: card.wait("torch.cuda.synchronize()"),
        "empty_cache": release,
        "ipc_collect": nothing,
        "mem_get_info": lambda device=None: (max(card.memory - card.reserved, 0), card.memory),
        "memory_allocated": allocated,
        "memory_reserved": lambda device=None: card.reserved,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": forget_peak,
        "memory_stats": lambda *_, **__: {"num_alloc_retries": card.retries},
        "set_per_process_memory_fraction": cap,
        "host_memory_stats": lambda: {"allocated_bytes.current": card.pinned.held},
        "get_arch_list": lambda: list(card.arch_list),
        "get_rng_state": lambda device=None: card.generator.get_state(),
        "set_rng_state": lambda state, device=None: card.generator.set_state(state),
        "default_generators": [card.generator] * card.count,
        "manual_seed": nothing,
        "manual_seed_all": nothing,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda device=None: card.stream,
        "default_stream": lambda device=None: card.stream,
        "stream": lambda stream: nullcontext() if stream is None else stream,
        "device": CurrentCard,
        "is_current_stream_capturing": lambda: card.graph is not None,
        "CUDAGraph": Graph,
        "graph": Recording,
        "graph_pool_handle": card.pools.handle,
    }


def _grouped_by_device(group: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own grouping, of wrappers that C++ takes to be on the CPU."""

    def grouped(lists: Any, *args: Any, **kwargs: Any) -> Any:
        found = group(lists, *args, **kwargs)
        named = {}
        for (device, dtype), (parts, indices) in found.items():
            first = next((t for part in parts for t in part if t is not None), None)
            place = first.device if isinstance(first, CudaTensor) else device
            assert all(t is None or t.device == place for t in parts[0]), "on several devices"
            named[place, dtype] = (parts, indices)
        return named

    return grouped


def _in_simulation(run: Callable[..., None]) -> Callable[..., None]:
    """Thread.run, for modes are a thread's own."""

    def work(thread: threading.Thread) -> None:
        with Kernels():
            run(thread)

    return work


def _made_on_cpu_first(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.tensor, which asks C++ for the device; as on a real card, its copy blocks."""

    def made(data: Any, *args: Any, device: Any = None, **how: Any) -> Tensor:
        if device is None and isinstance(data, CudaTensor):
            device = data.device
        within = _default_device() if device is None else torch.device(device)
        if within.type != "cuda":
            return make(data, *args, device=device, **how)
        device = within
        if isinstance(data, CudaTensor):
            return data.to(device, how.get("dtype"))
        if how.pop("pin_memory", False):
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return make(data, *args, device="cpu", **how).to(device)

    return made


def _default_device() -> torch.device:
    """Return what `with torch.device(...)` has set."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return torch.device("cpu")


class BrokenKernels:
    """Triton kernels on a machine without a C compiler.

    Attributes:
        launched: The kernels that were tried.
    """

    def __init__(self) -> None:
        self.launched: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def launch(*args: Any) -> None:
            self.launched.append(name)
            raise RuntimeError("Failed to find C compiler. Please specify via CC")

        return launch


class _Autocast(torch.autocast):
    """Autocast on the card is autocast on the CPU, of the same dtypes."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)


def _of_the_cpu(ask: Callable[..., Any]) -> Callable[..., Any]:
    """What autocast is asked of the card, which here is that of the CPU."""
    return lambda kind="cuda": ask("cpu" if kind == "cuda" else kind)


@contextmanager
def simulated(card: Card | None = None, kernels: Callable[[], Kernels] = Kernels) -> Iterator[Card]:
    """Let there be a GPU.

    Within FakeTensorMode tensors have shapes alone.

    Args:
        card: What it says it is; an H200 by default.
        kernels: Makes the mode that runs operators: one that counts, perhaps.
    """
    if REAL:
        if card is not None or kernels is not Kernels:  # tensors without data break a real card
            pytest.skip("only a simulation is another card, or counts kernels")
        with real_card() as here:
            yield here  # type: ignore[misc]
        return
    card = card or Card()
    STREAMS.clear()
    card.default_stream = Stream(is_default=True)
    with ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(tensors, "CARD", card))
        without = device_kinds.WITHOUT_FLOAT64 + ("cuda",) * (not card.has_float64)
        stack.enter_context(patch(device_kinds, "WITHOUT_FLOAT64", without))
        stack.enter_context(patch(gpu_support, "SEGMENTS", gpu_support.Segments()))
        timed = device_kinds.ASSUMED_LAUNCH_SECONDS  # plans do not depend on this machine's load
        stack.enter_context(patch(device_kinds, "measured_launch_seconds", lambda: timed))
        stack.enter_context(patch(graphs, "_capture_streams", []))
        stack.enter_context(patch(checked, "GEMM", checked.CheckedProduct()))
        stack.enter_context(patch(packed_product, "CHECKED", checked.CheckedProduct()))
        own = BrokenKernels() if "multiply" in card.broken else ProductKernels()
        stack.enter_context(patch(packed_product, "LAUNCHER", fused.Launcher(own)))
        if card.is_wsl:
            stack.enter_context(patch(platform, "release", lambda: WSL_RELEASE))
        stack.enter_context(patch(torch._C, ALLOCATOR, card.set_allocator))
        launcher = fused.Launcher(BrokenKernels() if card.broken else None)
        stack.enter_context(patch(fused, "TRITON", launcher))
        stack.enter_context(patch(loop, "TRITON", launcher))
        stack.enter_context(patch(metrics, "TRITON", fused.Launcher(card)))  # as if installed
        for name, answer in _answers(card).items():
            stack.enter_context(patch(torch.cuda, name, answer))
        # in builds for CUDA, torch 2.15's optimizers otherwise look for a driver
        no_accelerator = patch(torch.accelerator, "current_accelerator", lambda *_, **__: None)
        stack.enter_context(no_accelerator)
        stack.enter_context(patch(torch.Tensor, "is_pinned", lambda t, *_: tensors.is_pinned(t)))
        stack.enter_context(
            patch(torch.Tensor, "pin_memory", lambda t, *_: tensors.pin(t.detach().clone()))
        )
        stack.enter_context(patch(torch.Tensor, "to", tensors.moved))
        stack.enter_context(patch(torch.Tensor, "cuda", tensors.to_card))
        group = "_group_tensors_by_device_and_dtype"
        stack.enter_context(patch(torch._C, group, _grouped_by_device(getattr(torch._C, group))))
        stack.enter_context(patch(torch, "autocast", _Autocast))
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            stack.enter_context(patch(torch, name, _of_the_cpu(getattr(torch, name))))
        for name in ("tensor", "as_tensor"):
            stack.enter_context(patch(torch, name, _made_on_cpu_first(getattr(torch, name))))
        join, barrier = dist.init_process_group, dist.barrier
        stack.enter_context(
            patch(dist, "init_process_group", lambda *_, timeout=None, **__: join("gloo"))
        )

        def wait_for_all(*_: Any, device_ids: Any = None, **__: Any) -> None:
            assert all(number < card.count for number in device_ids or ()), "no such card"
            barrier()

        stack.enter_context(patch(dist, "barrier", wait_for_all))
        stack.enter_context(patch(threading.Thread, "run", _in_simulation(threading.Thread.run)))
        # parameters keep who they are when a module is moved, as on a real card
        swap = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with kernels():
                yield card
                card.settle()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swap)


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor's values, without a wait of the card."""
    if REAL:
        return tensor.detach().cpu()
    return tensor.values if isinstance(tensor, CudaTensor) else tensor
