"""LoRA on stacks of experts: the same by every way that transformers multiplies by them."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from peftkit.adapter import attach
from peftkit.errors import TargetError
from peftkit.kernels.stacked import AdaptedStack, NoProductError
from peftkit.merging.fold import merge_into
from peftkit.methods.dora import DoRA
from peftkit.methods.ia3 import IA3
from peftkit.methods.lora import LoRA
from peftkit.methods.vera import VeRA
from tests.helpers import cell
from tests.helpers.families import ARCHITECTURES
from tests.helpers.hybrids import FURTHER
from tests.helpers.kinds import inputs, outputs

MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "olmoe", "granitemoe")
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
EXPERTS = LoRA(rank=3, alpha=6, targets=("experts",))


@pytest.mark.parametrize(
    ("family", "implementation"),
    [(family, IMPLEMENTATIONS[number % 3]) for number, family in enumerate(MIXTURES)],
)
def test_every_implementation_computes_base_and_update(family, implementation):
    model = ARCHITECTURES[family]().eval()
    model.set_experts_implementation(implementation)
    before = outputs(model)
    adapter = attach(model, EXPERTS)
    assert torch.equal(outputs(model), before)
    losses = cell.losses(adapter, inputs(model))
    assert losses == sorted(losses, reverse=True)
    trained = outputs(model)
    merge_into(adapter)  # by an einsum-free formula of its own, over all experts at once
    torch.testing.assert_close(outputs(model), trained, atol=2e-5, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_those_of_the_weight_with_its_update(implementation):
    model = ARCHITECTURES["mixtral"]().eval()
    model.set_experts_implementation(implementation)
    layer = attach(model, EXPERTS).modules["model.layers.0.mlp.experts"]
    stack = layer.parts()["down_proj"]
    with torch.no_grad():
        stack.lora_B.normal_(std=0.1)
    x, index = torch.randn(6, 32), torch.tensor([[0, 1], [2, 3], [0, 2], [1, 0], [0, 3], [3, 1]])
    routing = torch.rand(6, 2)
    layer(x, index, routing).square().sum().backward()
    # the reference: a dense weight that is a function of A and B
    a, b = (p.detach().clone().requires_grad_() for p in (stack.lora_A, stack.lora_B))
    dense = {"down_proj": layer.base.down_proj + stack.scaling * b @ a}
    out = torch.func.functional_call(layer.base, dense, (x, index, routing))
    out.square().sum().backward()
    torch.testing.assert_close(stack.lora_A.grad, a.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(stack.lora_B.grad, b.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch.compile's own
@pytest.mark.parametrize(
    ("family", "implementation"), [("mixtral", "batched_mm"), ("gpt_oss", "grouped_mm")]
)
@pytest.mark.slow
def test_a_compiled_block_of_experts_is_one_graph(family, implementation):
    torch.manual_seed(0)
    model = ARCHITECTURES[family]().train()
    del model.model.layers[1:]
    model.set_experts_implementation(implementation)
    adapter = attach(model, EXPERTS)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(std=0.1)
    ids, gradients_of_both = torch.arange(36).view(3, 12), []
    for compiled in (False, True):
        if compiled:
            torch.compiler.reset()
            model.model.layers[0].compile(backend="aot_eager", fullgraph=True)
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients_of_both.append([parameter.grad for parameter in adapter.parameters()])
    for eager, fast in zip(*gradients_of_both, strict=True):
        torch.testing.assert_close(fast, eager, atol=1e-5, rtol=1e-4)  # sums in another order
    torch.compiler.reset()


class _Largest(TorchDispatchMode):
    """Counts new tensors of some sizes."""

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self.sizes, self.found = sizes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.found += out.numel() in self.sizes
        return out


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_no_update_of_a_whole_stack_is_ever_formed(implementation):
    model = ARCHITECTURES["mixtral"]().eval()
    model.set_experts_implementation(implementation)
    layer = attach(model, EXPERTS).modules["model.layers.0.mlp.experts"]
    sizes = {layer.base.gate_up_proj.numel(), layer.base.down_proj.numel()}
    assert sizes == {4 * 128 * 32, 4 * 32 * 64}
    x = torch.randn(5, 32, requires_grad=True)
    with _Largest(sizes) as forward:
        out = layer(x, torch.tensor([[0, 1], [2, 3], [0, 2], [1, 0], [3, 1]]), torch.rand(5, 2))
        out.sum().backward()
    assert forward.found == 0


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (DoRA(targets=("experts",)), "dora does not support stacked expert parameters"),
        (IA3(targets=("expert_down",)), "ia3 does not support stacked expert parameters"),
        (VeRA(targets=("experts",)), "vera does not support stacked expert parameters"),
        (LoRA(rank=2, dropout=0.1), "supports neither dropout nor this init"),
        (LoRA(rank=2, init="pissa"), "supports neither dropout nor this init"),
        (LoRA(rank=33, targets=("experts",)), "rank 33 is larger than the matrix of .*gate_up"),
        (LoRA(rank=2, targets=("router",)), "cannot sit on .*gate.weight"),
    ],
    ids=str,
)
def test_what_has_no_form_for_experts_is_refused(method, message):
    model = ARCHITECTURES["mixtral"]()
    with pytest.raises(TargetError, match=message):
        attach(model, method)
    assert not any("lora" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("name", ["llama4", "phimoe"])
def test_routers_that_return_a_tuple_are_refused(name):
    model = FURTHER[name]()
    with pytest.raises(TargetError, match=r"lora cannot sit on model\..*\.router\.weight"):
        attach(model, LoRA(rank=2, targets=("q", "router")))
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_a_role_of_a_fused_stack_adapts_only_its_rows():
    for family, rows in (("mixtral", slice(64, 128)), ("gpt_oss", slice(1, None, 2))):
        model = ARCHITECTURES[family]().eval()
        adapter = attach(model, LoRA(rank=2, targets=("expert_up",)))
        cell.losses(adapter, inputs(model))
        module = next(iter(adapter.modules.values()))
        weight = module.weights(module.base)["gate_up_proj"].float()
        moved = (module.merged_weight(weight, "gate_up_proj") - weight).abs().amax(2)  # (E, out)
        others = torch.ones(moved.shape[1], dtype=torch.bool)
        others[rows] = False
        assert (moved[:, rows] > 0).all()
        assert (moved[:, others] == 0).all()


def test_a_use_that_is_no_product_is_refused_by_name():
    weight, a, b = torch.randn(4, 6, 5), torch.randn(4, 2, 5), torch.randn(4, 6, 2)
    stack = AdaptedStack(weight, a, b, flipped=False)
    with pytest.raises(NoProductError, match=r"torch\.add"):
        torch.add(torch.randn(6, 5), stack)
    with pytest.raises(NoProductError, match=r"transpose\(0, 1\)"):
        stack.transpose(0, 1)
