"""What torch.compile writes for a GPU of a model's blocks, on a machine that has none.

    python -m tests.cross_compile.written llama nf4 bfloat16 80 90

Dynamo and AOTAutograd take blocks apart on a CPU, in the layout of a GPU; the graphs they make are
then given to Inductor as if their tensors lay on one. It writes Triton kernels, which are kept
instead of being launched, compiled for cards (ptxas comes with the `triton` package), or, under
TRITON_INTERPRET=1, interpreted: then the numbers of the generated code are compared with those of
the graph. Attention is torch's own and stays a call; that of a GPU is another one.

Printed is one line of JSON.
"""

import contextlib
import copy
import json
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
import triton.backends
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import async_compile, compile_fx, config, scheduler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from transformers import LlamaForCausalLM
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource
from triton.runtime import driver

from peftkit.adapter import attach, prepared_for_training
from peftkit.execution.plan import ExecutionPlan
from peftkit.forward import blocks as blocks_module
from peftkit.forward.blocks import Blocks
from peftkit.kernels.gguf_blocks import TYPES
from peftkit.kernels.packed import PackedFormat
from peftkit.methods.lora import LoRA
from peftkit.quant.layers import Packing, QuantizedLinear, keep_copies
from peftkit.quant.quantize import quantize_model
from tests.cross_compile.machine_code import resources
from tests.helpers.families import ARCHITECTURES
from tests.helpers.gguf_files import config_of_a_small_llama, random_rows

CARD = torch.device("cuda", 0)
LENGTHS = (12, 20, 37)
FACTS: dict[str, Any] = {
    "name": "NVIDIA H200", "gcnArchName": "", "uuid": "", "major": 9, "minor": 0, "warp_size": 32,
    "total_memory": 141 * 10**9, "L2_cache_size": 50 << 20, "multi_processor_count": 132,
    "max_threads_per_block": 1024, "max_threads_per_multi_processor": 2048,
    "regs_per_multiprocessor": 65536, "shared_memory_per_block_optin": 232448,
}  # fmt: skip
"""What torch.cuda says of the card that Inductor writes for."""


@dataclass
class Graph:
    """A forward or backward pass of a block, and what it was first given."""

    module: GraphModule
    fakes: Sequence[Any]
    is_backward: bool
    given: list[Any] = field(default_factory=list)

    def compute(self, *args: Any) -> Any:
        """Compute it as it stands, on the CPU."""
        if not self.given:
            self.given = [x.clone() if isinstance(x, Tensor) else x for x in args]
        return self.module(*args)


def recorder(graphs: list[Graph]) -> Callable[..., Any]:
    """Return a backend of torch.compile that notes every graph and computes it as it stands."""

    def noted(is_backward: bool) -> Callable[..., Any]:
        def compiler(module: GraphModule, fakes: Sequence[Any]) -> Any:
            graphs.append(Graph(copy.deepcopy(module), list(fakes), is_backward))
            return make_boxed_func(graphs[-1].compute)

        return compiler

    return aot_autograd(  # type: ignore[no-any-return]
        fw_compiler=noted(False),
        bw_compiler=noted(True),
        decompositions=select_decomp_table,
        partition_fn=min_cut_rematerialization_partition,
    )


class Driver(DriverBase):
    """All that Triton asks of a driver while it compiles: for what."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return CARD

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0


class Kernel:
    """A kernel that Inductor wrote; `tuner` is Inductor's own, with the sizes that it would try."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.tuner: Any = async_compile._load_triton_kernel_from_source(name, source)

    def run(self, *args: Any, stream: Any = None, **_: Any) -> None:
        """Interpret it, on the CPU's tensors."""
        size = self.tuner.configs[0]
        given, grid = self.tuner._interpret_args_grid(args, size)
        self.tuner.fn[grid](*given, **size.kwargs)

    def used(self, capability: int) -> dict[str, int]:
        """Return what its machine code takes of a card: registers, and bytes that they spill to."""
        facts = self.tuner.device_props
        self.tuner.device_props = facts._replace(cc=capability, major=capability // 10)
        meta = self.tuner._create_compile_meta(self.tuner.configs[0])
        options = self.tuner._create_compile_options(self.tuner.configs[0], meta)
        self.tuner.device_props = facts
        source = ASTSource(self.tuner.fn, meta["signature"], meta["constants"], meta["configs"][0])
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        return resources(made)


@contextlib.contextmanager
def gpu() -> Iterator[list[Kernel]]:
    """Let Inductor find a GPU within the context; its kernels are noted."""
    kernels: list[Kernel] = []
    facts = types.SimpleNamespace(**FACTS)
    names = DeviceProperties._fields
    known = {n: value for n, value in FACTS.items() if n in names}
    properties = DeviceProperties(**known, type="cuda", index=0, cc=90)

    def kept(_: Any, name: str, source: str, device_str: str = "cuda") -> Kernel:
        kernels.append(Kernel(name, source))
        return kernels[-1]

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype)

    answers: dict[str, Any] = {"get_device_properties": facts, "get_device_capability": (9, 0)}
    answers |= dict.fromkeys(("is_available", "is_initialized"), True) | {"device_count": 1}
    answers |= dict.fromkeys(("current_device", "_exchange_device", "_maybe_exchange_device"), 0)
    answers |= dict.fromkeys(("set_rng_state", "synchronize", "set_device"))
    answers |= {"get_rng_state": torch.zeros(16, dtype=torch.uint8)}
    before = driver._active
    with contextlib.ExitStack() as stack:

        def patch(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))

        for name, answer in answers.items():
            patch(torch.cuda, name, lambda *_, answer=answer, **__: answer)
        patch(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)
        patch(torch._C._dynamo.guards, "_empty_strided_cuda", empty)
        patch(DeviceProperties, "create", lambda *_: properties)
        patch(async_compile.AsyncCompile, "triton", kept)
        patch(scheduler, "has_triton", lambda: True)
        patch(FakeTensorMode, "avoid_device_init", True)
        copy_ = Tensor.copy_  # of a device that this torch cannot guard
        patch(Tensor, "copy_", lambda t, *a: t if isinstance(t, FakeTensor) else copy_(t, *a))
        stack.enter_context(config.patch(compile_threads=1, fx_graph_cache=False))
        nvidia = triton.backends.Backend(triton.backends.backends["nvidia"].compiler, Driver)
        stack.enter_context(mock.patch.dict(triton.backends.backends, nvidia=nvidia))
        driver.set_active(Driver())
        stack.callback(setattr, driver, "_active", before)
        yield kernels


def written(graph: Graph) -> Callable[[list[Any]], Any]:
    """Return the code that Inductor writes of a graph for a GPU; within `gpu`."""
    module, mode = copy.deepcopy(graph.module), detect_fake_mode(graph.fakes)
    assert mode is not None
    with mode:
        given = [x.to(CARD) if isinstance(x, FakeTensor) else x for x in graph.fakes]
    for node in module.graph.nodes:
        places = {n: CARD for n, value in node.kwargs.items() if isinstance(value, torch.device)}
        node.kwargs = {**node.kwargs, **places}
    module.recompile()
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*given)
    with tracing(TracingContext(mode)), V.set_fake_mode(mode):
        made: Any = compile_fx.compile_fx_inner(module, given, is_backward=graph.is_backward)
    return made  # type: ignore[no-any-return]


def compiled_steps(family: str, kind: str, dtype: torch.dtype) -> tuple[list[Graph], float]:
    """Take the gradients of rows of several lengths with compiled blocks.

    Returns:
        The graphs, and how far the gradients are from those of blocks as they are.
    """
    graphs: list[Graph] = []
    torch.manual_seed(0)
    model: Any = _in_blocks(kind) if kind in TYPES else ARCHITECTURES[family]()
    model = model.to(dtype).train()
    del model.model.layers[1:]
    if kind not in TYPES and kind != "none":
        quantize_model(model, kind)
        keep_copies(model, 0)
    adapter = attach(model, LoRA(rank=3))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(std=0.1)

    def gradients(length: int) -> list[Tensor]:
        ids = torch.arange(2 * length).remainder(53).view(2, length) + 5
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad for p in adapter.parameters() if p.grad is not None]

    with (
        mock.patch.object(blocks_module, "BACKEND", recorder(graphs)),
        prepared_for_training(model, ExecutionPlan(device="cuda")),
    ):
        expected = [gradient for length in LENGTHS for gradient in gradients(length)]
        counters.clear()
        blocks = Blocks(model)
        blocks.compile()
        found = [gradient for length in LENGTHS for gradient in gradients(length)]
        blocks.restore()
    pairs = zip(found, expected, strict=True)
    wrong = torch.stack([(a - b).float().norm() for a, b in pairs]).norm()
    return graphs, float(wrong / torch.stack([b.float().norm() for b in expected]).norm())


def _in_blocks(kind: str) -> Any:
    """Return a small Llama whose linear layers are blocks of a GGUF file."""
    model = LlamaForCausalLM(config_of_a_small_llama())
    for path, layer in [*model.model.named_modules()]:
        if isinstance(layer, torch.nn.Linear):
            shape = layer.weight.shape
            packing = Packing(PackedFormat(kind, shape, TYPES[kind].values), torch.float32, ())
            rows = torch.from_numpy(random_rows(kind, *shape))
            model.model.set_submodule(path, QuantizedLinear(rows, packing))
    return model


def main(family: str, kind: str, dtype: str, *cards: str) -> None:
    """Print what was written, and what it takes of cards; or how far its numbers are off."""
    graphs, error = compiled_steps(family, kind, getattr(torch, dtype))
    told: dict[str, Any] = {"error": error, "breaks": len(counters["graph_break"])}
    told["graphs"] = [graph.is_backward for graph in graphs]
    told["kernels"], told["used"], told["off"] = [], [], []
    with gpu() as kernels:
        for graph in graphs:
            before = len(kernels)
            code = written(graph)
            told["kernels"].append(len(kernels) - before)
            if triton.knobs.runtime.interpret:
                told["off"].append(_difference(graph, code))
        for card in cards:
            told["used"] += [kernel.used(int(card)) for kernel in kernels]
    print(json.dumps(told))


def _difference(graph: Graph, code: Callable[[list[Any]], Any]) -> float:
    """Return how far what the code computes is from what the graph does, of its largest number."""
    from tests.cross_compile import interpreter  # noqa: F401

    expected = graph.module(*graph.given)
    found = code(list(graph.given))
    pairs = [
        (a, b) for a, b in zip(found, expected, strict=True) if isinstance(b, Tensor) and b.numel()
    ]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-6)) for a, b in pairs)


if __name__ == "__main__":
    main(*sys.argv[1:])
