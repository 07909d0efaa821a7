"""Quantisers in torch against the package gguf, and what they do to small updates."""

import pytest
import torch

from peftkit.kernels.fake_quantize import FORMATS, RANGES, fake_quantized, gguf_rows, gptq, packed

gguf = pytest.importorskip("gguf", reason="GGUF files need: pip install gguf")


def hostile(rows: int = 41, columns: int = 576) -> torch.Tensor:
    """Return random rows with zero, constant, outlier, tied and tiny blocks."""
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.05
    w[3, :64] = 0
    w[4, :32] = 0.25
    w[5, 7] = 40.0
    w[6, :32] = torch.tensor([1.0, -1.0]).repeat(16)  # two values of largest magnitude
    w[7, :32] = torch.arange(32) / 2  # many values half-way between codes
    w[8] *= 1e-7  # scales below float16's smallest
    w[9, :32] = -0.0
    return w


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_bytes_and_values_equal_those_of_the_package_gguf(kind):
    w = hostile()
    number = gguf.GGMLQuantizationType[kind.upper()]
    theirs = gguf.quants.quantize(w.numpy(), number)
    assert torch.equal(gguf_rows(w, kind), torch.from_numpy(theirs))
    values = torch.from_numpy(gguf.quants.dequantize(theirs, number).copy())
    assert torch.equal(fake_quantized(w, kind), values)


@pytest.mark.parametrize("kind", FORMATS)
def test_values_do_not_depend_on_chunks(kind, monkeypatch):
    w = hostile()
    whole = fake_quantized(w, kind)
    monkeypatch.setattr("peftkit.kernels.fake_quantize.CHUNK", 1000)
    assert torch.equal(fake_quantized(w.view(1, *w.shape), kind)[0], whole)


@pytest.mark.parametrize("group", [32, 128])
def test_int4_is_the_nearest_multiple_of_its_scale(group):
    w = torch.randn(5, 3 * group, generator=torch.Generator().manual_seed(0))
    values = fake_quantized(w, f"int4_{group}").view(-1, group)
    blocks = w.view(-1, group)
    scale = (blocks.abs().amax(1, keepdim=True) / 7).bfloat16().float()
    assert ((values / scale).round() - values / scale).abs().max() < 1e-3
    assert (values - blocks).abs().max() <= 0.5 * scale.max() * 1.02  # codes end at 7 of 7.03


def test_a_row_may_end_with_a_part_of_a_group():
    w = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        fake_quantized(w, "int4_128")[:, :128], fake_quantized(w[:, :128], "int4_128")
    )


@pytest.mark.parametrize("kind", RANGES)
def test_gptq_keeps_the_outputs_better_than_rounding(kind):
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(41, 256, generator=generator) * 0.05
    mixed = torch.randn(256, 256, generator=generator) * 0.1
    x = torch.randn(500, 256, generator=generator) @ mixed
    coded = gptq(w, x.t() @ x, kind)
    values = coded.values.view(w.shape)
    plain, ours = ((x @ (v - w).t()).norm() for v in (fake_quantized(w, kind), values))
    assert ours < 0.8 * plain  # 0.66 and 0.67 in q4_0 and q4_1
    # the codes fit the format: packing and reading them gives the same values
    if kind in ("q4_0", "q4_1"):
        number = gguf.GGMLQuantizationType[kind.upper()]
        rows = packed(coded, kind).view(41, -1).numpy()
        read = torch.from_numpy(gguf.quants.dequantize(rows, number).copy())
        assert torch.equal(read, values)
    else:
        assert coded.codes.min() >= -8
        assert coded.codes.max() <= 7
    # without correlation between inputs, the rule is plain rounding of nearby grids
    assert (gptq(w, torch.eye(256), kind).values.view(w.shape) - w).norm() < 1.1 * (
        fake_quantized(w, kind) - w
    ).norm()
