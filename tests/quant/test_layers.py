"""Quantised weights: the bits, the layer, and the layers of bitsandbytes that become ours."""

import copy

import bitsandbytes
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from peftkit.errors import BaseError
from peftkit.kernels import checked
from peftkit.kernels import packed as packed_module
from peftkit.kernels.checked import CheckedProduct
from peftkit.model.places import linear_shape
from peftkit.quant.layers import QuantizedLinear, keep_copies, pack
from peftkit.quant.quantize import KINDS, quantize_model
from peftkit.quant.weights import adopt_bitsandbytes, weight_of

SHAPES = [(40, 64), (9, 41), (341, 9), (8, 96), (33, 32), (1, 5), (3, 130)]
FORMS = [("nf4", True), ("nf4", False), ("fp4", True), ("fp4", False), ("int8", True)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer(
    kind: str, *, shape: tuple[int, int] = (24, 40), bias: bool = True, double: bool = True
) -> tuple[nn.Linear, QuantizedLinear]:
    """Return a linear layer and its quantised form."""
    out_features, in_features = shape
    plain = nn.Linear(in_features, out_features, bias=bias)
    holder = nn.Sequential(copy.deepcopy(plain))
    quantize_model(holder, kind, double_quant=double)
    quantized = holder[0]
    assert isinstance(quantized, QuantizedLinear)
    return plain, quantized


def dequantized(quantized: QuantizedLinear) -> nn.Linear:
    """Return the plain layer that a quantised one stands for."""
    plain = nn.Linear(quantized.in_features, quantized.out_features, quantized.bias is not None)
    plain.to(quantized.packing.dtype)
    with torch.no_grad():
        plain.weight.copy_(quantized.weight)
        if quantized.bias is not None:
            plain.bias.copy_(quantized.bias)
    return plain.requires_grad_(False)


# ------------------------------------------------------------------- bits


@pytest.mark.parametrize(("kind", "double"), [form for form in FORMS if form[0] != "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_bitsandbytes(kind, double, dtype):
    tensor = torch.randn(24, 128).to(dtype)
    theirs = bitsandbytes.nn.Linear4bit(
        128, 24, bias=False, quant_type=kind, compress_statistics=double
    )
    theirs.load_state_dict({"weight": tensor.clone()})
    theirs = theirs.to("cpu")
    expected = bitsandbytes.functional.dequantize_4bit(
        theirs.weight.data, theirs.weight.quant_state
    )
    packed, packing = pack(tensor, kind, double_quant=double)
    assert torch.equal(packed.view(-1), theirs.weight.data.view(-1))
    assert torch.equal(packing(packed), expected.to(dtype))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpacked_is_code_times_absmax_in_every_shape(kind, shape):
    tensor = torch.randn(shape)
    packed, packing = pack(tensor, kind, double_quant=False)
    code = bitsandbytes.functional.get_4bit_type(kind, device="cpu")
    nibbles = torch.cat([packed >> 4, packed & 15], dim=1).view(-1).long()
    expected = code[nibbles].view(-1, 64) * packing.scales[0][:, None]
    assert torch.equal(packing(packed), expected.view(-1)[: tensor.numel()].view(shape))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "double"), [form for form in FORMS if form[0] != "int8"])
def test_without_a_gradient_a_gpu_reads_the_packed_weight(kind, double, dtype, bias, monkeypatch):
    _, quantized = layer(kind, shape=(40, 192), bias=bias, double=double)
    quantized.to(dtype)
    plain, x = dequantized(quantized), torch.randn(3, 5, 192).to(dtype)
    unpacked = []
    monkeypatch.setattr(packed_module, "_has_gemm", lambda x, form, dtype: True)  # its CPU form
    monkeypatch.setattr(checked, "GEMM", CheckedProduct())
    with torch.no_grad():
        quantized(x)  # the first product is compared with the one of the unpacked weight
        monkeypatch.setattr(packed_module, "unpack", lambda *args: unpacked.append(args))
        found = quantized(x)
    torch.testing.assert_close(found, plain(x))
    assert found.dtype == dtype
    assert not unpacked
    torch.testing.assert_close(quantized(x), plain(x))  # whose input needs none


@pytest.mark.parametrize("num_rows", [1, 5, 90])
def test_a_wrong_product_of_a_gpu_is_replaced(num_rows, monkeypatch, caplog):
    """As on gfx1100: garbage without an error."""
    _, quantized = layer("nf4", shape=(40, 192))
    plain, x = dequantized(quantized), torch.randn(num_rows, 192)
    gemm, calls = packed_module._gemm_4bit, []

    def wrong(*args):
        calls.append(args)
        return gemm(*args).flip(-1)

    monkeypatch.setattr(packed_module, "_has_gemm", lambda x, form, dtype: True)
    monkeypatch.setattr(packed_module, "_gemm_4bit", wrong)
    monkeypatch.setattr(checked, "GEMM", CheckedProduct())
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(quantized(x), plain(x))
    assert len(calls) == 1
    assert "Update bitsandbytes" in caplog.text
    assert checked.GEMM.fallback is not None


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_finite_differences(kind):
    _, quantized = layer(kind, shape=(3, 5))
    quantized.double()
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    quantized.bias.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x, bias: quantized(x), (x, quantized.bias))


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_packed_is_refused(kind):
    with pytest.raises(ValueError, match="NaN"):
        pack(torch.tensor([[1.0, float("inf")]]), kind)
    with pytest.raises(ValueError, match="float8"):
        pack(torch.ones(2, 2).to(torch.float8_e4m3fn), kind)


# ------------------------------------------------------------------- the layer


@pytest.mark.parametrize(("kind", "double"), FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lead", [(), (7,), (2, 3), (2, 0)], ids=str)
def test_layer_is_the_dequantised_linear(kind, double, shape, lead):
    _, quantized = layer(kind, shape=shape, double=double)
    plain = dequantized(quantized)
    x, y = (torch.randn(*lead, shape[1], requires_grad=True) for _ in range(2))
    y.data.copy_(x.data)
    found, expected = quantized(x), plain(y)
    assert torch.equal(found, expected)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-6, atol=1e-6)  # order of the sums


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_weights_size_is_saved_for_backward(kind):
    _, quantized = layer(kind, shape=(64, 256))
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(3, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = quantized(x)
    own = {parameter.data_ptr() for parameter in quantized.parameters()}
    assert saved
    assert all(tensor.data_ptr() in own for tensor in saved)
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [False, True])
def test_autocast_computes_in_its_dtype_with_gradients_in_the_input_s(kind, kept):
    _, quantized = layer(kind)
    holder = nn.Sequential(quantized)
    if kept:
        keep_copies(holder)
    x = torch.randn(4, 40, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = holder(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), quantized(x), rtol=0.05, atol=0.05)  # bf16's 8 bits
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # torch of its own tracing
@pytest.mark.parametrize(("kind", "double"), FORMS)
def test_compiled_layer_computes_the_same_without_a_graph_break(kind, double):
    _, quantized = layer(kind, double=double)
    compiled = torch.compile(quantized, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 40, requires_grad=True)
    (expected,) = torch.autograd.grad(quantized(x).sin().sum(), x)
    (found,) = torch.autograd.grad(compiled(x).sin().sum(), x)
    assert torch.equal(found, expected)


class OwnConv1D(Conv1D):
    """As a model with code of its own may have it."""


class ScaledConv1D(Conv1D):
    """One that does more than multiply."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_layer_that_does_more_than_multiply_keeps_doing_it_over_a_packed_weight():
    plain = ScaledConv1D(24, 40)
    holder = nn.Sequential(copy.deepcopy(plain))
    quantize_model(holder, "int8")
    assert weight_of(holder[0]).shape == (24, 40)
    x = torch.randn(5, 40)
    torch.testing.assert_close(holder(x), plain(x), atol=4e-3, rtol=0)  # half a step of int8


@pytest.mark.parametrize("kind", [Conv1D, OwnConv1D])
def test_conv1d_becomes_a_linear_the_right_way_round(kind):
    plain = kind(24, 40)
    holder = nn.Sequential(copy.deepcopy(plain))
    quantize_model(holder, "int8")
    assert linear_shape(holder[0]) == (40, 24)
    assert weight_of(plain).shape == weight_of(holder[0]).shape == (24, 40)
    x = torch.randn(5, 40)
    torch.testing.assert_close(holder(x), plain(x), atol=2e-3, rtol=0)  # half a step of int8


# ------------------------------------------------------------------- bitsandbytes' own layers


def bitsandbytes_layer(kind: str, double: bool = True) -> nn.Module:
    if kind == "int8":
        theirs = bitsandbytes.nn.Linear8bitLt(64, 32, has_fp16_weights=False)
    else:
        theirs = bitsandbytes.nn.Linear4bit(
            64, 32, quant_type=kind, compress_statistics=double, compute_dtype=torch.float32
        )
    theirs.load_state_dict(nn.Linear(64, 32).state_dict())
    return theirs.to("cpu")


@pytest.mark.parametrize(("kind", "double"), FORMS)
def test_layer_of_bitsandbytes_is_taken_over_with_its_data(kind, double):
    theirs = bitsandbytes_layer(kind, double)
    model = nn.Sequential(theirs, nn.ReLU())
    data = theirs.weight.data.data_ptr()
    weight = weight_of(theirs).float()
    assert adopt_bitsandbytes(model, torch.float32) == 1
    ours = model[0]
    assert isinstance(ours, QuantizedLinear)
    assert ours.kind == kind
    assert ours.packed.data_ptr() == data
    torch.testing.assert_close(ours.weight, weight, rtol=1e-3, atol=1e-3)  # int8: scale in fp16
    x = torch.randn(5, 64)
    torch.testing.assert_close(
        ours(x), functional.linear(x, ours.weight, theirs.bias), rtol=1e-6, atol=1e-6
    )
    assert adopt_bitsandbytes(model) == 0


def test_layer_that_bitsandbytes_has_repacked_is_refused():
    theirs = bitsandbytes_layer("nf4")
    theirs.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(BaseError, match="repacked"):
        adopt_bitsandbytes(nn.Sequential(theirs))
    with pytest.raises(BaseError, match="repacked"):
        weight_of(theirs)
