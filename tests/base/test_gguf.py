"""GGUF files, tensor by tensor: the very weights that transformers' own loader makes of them."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from peftkit.base.build import build, cast
from peftkit.base.gguf_file import parsed_once
from peftkit.base.locate import Location
from peftkit.base.pack import fingerprint
from peftkit.base.pretrained import quiet
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.request import request_of
from peftkit.quant.layers import packed_tensors
from peftkit.quant.quantize import quantize_model, stores_transposed
from peftkit.settings import BaseConfig
from tests.helpers.bases import state_of
from tests.helpers.gguf_files import FAMILIES, SEQ2SEQ, write_random

gguf = pytest.importorskip("gguf", reason="GGUF files need: pip install gguf")

CPU = torch.device("cpu")


FAST = ("llama", "gpt2", "qwen3moe", "lfm2")


def by_transformers(where: Location, auto_class: str) -> Any:
    with quiet():
        model = getattr(transformers, auto_class).from_pretrained(
            where.source,
            gguf_file=where.gguf,
            dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    return model.requires_grad_(False).eval()


def same(found: nn.Module, expected: nn.Module) -> None:
    left, right = state_of(found), state_of(expected)
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert left[name].dtype == tensor.dtype, name
        assert torch.equal(left[name], tensor), name


def assert_same_values(model: nn.Module, expected: nn.Module) -> None:
    """Compare every weight, blocks dequantised, with that of a dense model."""
    packed = {path: packing(data) for path, data, packing in packed_tensors(model)}
    dense = dict(model.named_parameters(remove_duplicate=False))
    for name, value in expected.named_parameters():
        path = name.removesuffix(".weight")
        own = packed.get(path, packed.get(name, dense.get(name)))
        assert own is not None, name
        owner = expected.get_submodule(name.rpartition(".")[0])
        turned = stores_transposed(owner, "weight") and path in packed
        assert torch.equal(own.t() if turned else own, value), name


@pytest.mark.parametrize(
    "architecture", [a if a in FAST else pytest.param(a, marks=pytest.mark.slow) for a in FAMILIES]
)
def test_every_architecture_loads_as_by_transformers(architecture, tmp_path):
    purpose = SEQ2SEQ if architecture == "t5" else CAUSAL_LM
    where = write_random(tmp_path, architecture, purpose.auto_class)
    with parsed_once(where):
        expected = by_transformers(where, purpose.auto_class)
        identity = fingerprint(expected)
        for settings in (
            BaseConfig(model="x", dtype="fp32"),
            BaseConfig(model="x", quantize="nf4", dtype="bf16"),
        ):
            request = request_of(settings, purpose, where, CPU)
            built = build(request)
            cast(expected, request.dtype)
            assert built.fingerprint == identity
            if settings.quantize == "none":
                has_blocks = any(packed_tensors(built.model))
                assert has_blocks == (architecture != "lfm2")
                assert_same_values(built.model, expected)
                continue
            quantize_model(expected, settings.quantize)
            same(built.model, expected)
