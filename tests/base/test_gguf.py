"""GGUF files, tensor by tensor: the very weights that transformers' own loader makes of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftkit.base.build import build, cast
from peftkit.base.gguf_file import parsed_once
from peftkit.base.pack import fingerprint
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.request import request_of
from peftkit.quant.layers import packed_tensors
from peftkit.quant.quantize import quantize_model, stores_transposed
from peftkit.settings import BaseConfig
from tests.helpers.bases import assert_same_state
from tests.helpers.families import VOCAB
from tests.helpers.gguf_files import FAMILIES, SEQ2SEQ, dense_model, write_random

gguf = pytest.importorskip("gguf", reason="GGUF files need: pip install gguf")

CPU = torch.device("cpu")


FAST = ("llama", "gpt2", "qwen3moe", "lfm2", "t5")


def logits_of(architecture: str, model: Any) -> Tensor:
    ids = torch.randint(1, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    more = {"decoder_input_ids": ids} if architecture == "t5" else {}
    return model(input_ids=ids, **more).logits


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
def test_every_architecture_loads_and_computes_as_by_transformers(architecture, tmp_path):
    purpose = SEQ2SEQ if architecture == "t5" else CAUSAL_LM
    where = write_random(tmp_path, architecture, purpose.auto_class)
    with parsed_once(where):
        expected = dense_model(where.gguf_path, purpose.auto_class)
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
                with torch.no_grad():
                    found, known = (logits_of(architecture, m) for m in (built.model, expected))
                torch.testing.assert_close(found, known, atol=1e-5, rtol=1e-5)
                has_blocks = any(packed_tensors(built.model))
                assert has_blocks == (architecture != "lfm2")
                assert_same_values(built.model, expected)
                continue
            quantize_model(expected, settings.quantize)
            assert_same_state(built.model, expected)
