"""Whole models in 4 and 8 bits, and the audit that says what really is."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from peftkit import attach
from peftkit.errors import BaseError
from peftkit.model.places import is_linear
from peftkit.quant.audit import audit
from peftkit.quant.layers import QuantizedLinear, packed_tensors
from peftkit.quant.quantize import KINDS, quantize_model
from tests.helpers import grid
from tests.helpers.families import ARCHITECTURES
from tests.helpers.kinds import outputs

MODELS = (
    *("llama", "gpt2", "t5", "bert_cls", "vit", "falcon_new", "idefics"),
    *("mixtral", "gpt_oss", "deepseek_v3"),
)
STACKED = MODELS[-3:]


@pytest.fixture(params=MODELS)
def family(request: pytest.FixtureRequest) -> tuple[str, nn.Module]:
    torch.manual_seed(0)
    return request.param, ARCHITECTURES[request.param]().eval()


def reference_of(model: nn.Module, quantized: nn.Module) -> nn.Module:
    """Return the plain model with each weight replaced by what the quantised one reads."""
    reference = copy.deepcopy(model)
    parameters = dict(reference.named_parameters())
    for path, packed, packing in packed_tensors(quantized):
        target, value = parameters.get(path), packing(packed)  # a stack of experts, or ...
        if target is None:  # ... a layer
            target = parameters[f"{path}.weight"]
            conv = type(reference.get_submodule(path)).__name__ == "Conv1D"
            value = value.t() if conv else value
        with torch.no_grad():
            target.copy_(value)
    return reference


def test_quantised_model_computes_with_the_dequantised_weights(family):
    name, model = family
    kind = KINDS[MODELS.index(name) % 3]
    quantized = copy.deepcopy(model)
    quantize_model(quantized, kind)
    found, expected = outputs(quantized), outputs(reference_of(model, quantized))
    assert not torch.equal(found, outputs(model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # Conv1D sums otherwise


def test_audit_says_what_every_parameter_is(family):
    _, model = family
    plain = audit(model)
    assert plain.num_parameters == sum(p.numel() for p in model.parameters())
    assert plain.num_bytes == 4 * plain.num_parameters
    assert plain.quantized_as == "none"
    quantize_model(model, "nf4")
    found = audit(model)
    assert found.num_parameters == plain.num_parameters
    assert found.quantized_as == "nf4"
    assert found.num_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    kept = {row.why for row in found.rows if row.kind == "linear layers" and not row.is_quantized}
    assert kept <= {"the output layer", "a head", "a router", "tied to an embedding"}
    table = found.table()
    assert all(len(row) == len(table.columns) for row in table.rows)


@pytest.mark.parametrize(
    "method", ["lora", "dora", "ia3", "vera", "ln_tuning", "houlsby", "prefix_tuning", "token_rows"]
)
def test_an_adapter_is_no_part_of_the_audit(method):
    model = ARCHITECTURES["llama"]()
    before = audit(model)
    attach(model, grid.COLUMNS[method])
    after = audit(model)
    assert (after.num_parameters, after.num_bytes) == (before.num_parameters, before.num_bytes)


def test_every_linear_and_stack_is_quantised_but_heads_routers_and_tied_ones(family):
    name, model = family
    quantize_model(model, "nf4")
    left = {
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if is_linear(module) and not isinstance(module, QuantizedLinear)
    }
    assert left == {
        "vit": {"classifier"},
        "bert_cls": {"classifier"},
        "bert": {"decoder"},
        "idefics": {"lm_head", "additional_fc"},
        "qwen2_moe": {"lm_head", "shared_expert_gate"},
    }.get(name, {"lm_head"})
    stacks = [path for path, _, packing in packed_tensors(model) if len(packing.form.shape) == 3]
    assert bool(stacks) == (name in STACKED)


def test_subclass_that_is_a_plain_linear_becomes_one_and_another_keeps_its_class():
    class Spelt(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T + self.bias

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, super().forward(x)

    model = nn.ModuleList([Spelt(16, 8), Doubled(16, 8), Pair(16, 8)])
    plain = copy.deepcopy(model)
    quantize_model(model, "int8")
    found = audit(model)
    assert isinstance(model[0], QuantizedLinear)
    assert isinstance(model[1], Doubled)
    assert isinstance(model[2], Pair)
    assert parametrize.is_parametrized(model[1], "weight")
    assert {row.stored for row in found.rows} == {"int8", "float32"}
    x = torch.randn(3, 16)
    for quantized, original in zip(model, plain, strict=True):
        expected, out = original(x), quantized(x)
        if isinstance(out, tuple):
            expected, out = expected[1], out[1]
        torch.testing.assert_close(out, expected, atol=0.02, rtol=0)  # int8 steps
    with pytest.raises(BaseError, match="in int8 already"):
        quantize_model(model, "nf4")


def test_layer_in_two_places_is_quantised_in_both():
    shared = nn.Linear(16, 16)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    quantize_model(model, "nf4")
    assert model[0] is model[2]
    assert isinstance(model[0], QuantizedLinear)


def test_weights_that_cannot_be_quantised_are_one_error_that_names_all():
    model = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("good", "bad", "small")})
    model["bad"].weight.data[0, 0] = float("nan")
    model["small"].weight.data = model["small"].weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(BaseError) as error:
        quantize_model(model, "nf4")
    assert "bad.weight of Linear: it holds NaN" in str(error.value)
    assert "small.weight of Linear: its dtype is torch.float8_e4m3fn" in str(error.value)
    assert "good" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "kind", "words"),
    [
        (nn.Sequential(nn.LayerNorm(8)), "nf4", "no linear layers"),
        (nn.Linear(8, 8), "nf4", "it is the whole model"),
        (nn.Sequential(nn.Linear(8, 8)), "nf5", "nf4, fp4, int8"),
    ],
    ids=["no linears", "a bare layer", "unknown kind"],
)
def test_what_makes_no_sense_is_refused(model, kind, words):
    with pytest.raises(BaseError, match=words):
        quantize_model(model, kind)


# ------------------------------------------------------------------- kept copies
