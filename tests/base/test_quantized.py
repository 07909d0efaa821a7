"""Checkpoints that are quantised already: bits kept, dequantised alone, or refused by name."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor

from peftkit.base.build import build
from peftkit.base.load import load_base
from peftkit.base.locate import Location
from peftkit.base.pretrained import quiet
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.request import request_of
from peftkit.quant.quantize import quantize_model
from peftkit.settings import BaseConfig
from tests.helpers.bases import assert_same_state, in_mxfp4, mark_quantized, write_changed
from tests.helpers.families import tiny_tokenizer

CPU = torch.device("cpu")


def in_fp8(folder: Path) -> None:
    def replace(name: str, value: Tensor) -> dict[str, Tensor] | None:
        if "_proj" not in name:
            return None
        scales = torch.rand(value.shape[0] // 16, value.shape[1] // 16) + 0.5
        return {name: value.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}

    write_changed(folder, "llama", replace)
    mark_quantized(
        folder, quant_method="fp8", weight_block_size=[16, 16], activation_scheme="dynamic"
    )


@pytest.mark.parametrize("write", [in_fp8, in_mxfp4])
def test_repacked_weights_match_dequantised_ones_of_transformers(write, tmp_path):
    write(tmp_path)
    where = Location(str(tmp_path), str(tmp_path))
    settings = BaseConfig(model="x", quantize="nf4", dtype="bf16")
    built = build(request_of(settings, CAUSAL_LM, where, CPU))
    with quiet():
        expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    quantize_model(expected, "nf4")
    assert_same_state(built.model, expected)
    assert not built.model.is_quantized


@pytest.mark.parametrize(
    ("kind", "nested", "storage"), [("nf4", True, "bfloat16"), ("fp4", False, "uint8")]
)
def test_bits_of_bitsandbytes_are_taken_over(kind, nested, storage, model_folder, tmp_path):
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_quant_storage=storage,
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        model_folder, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )
    theirs.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    base = load_base(str(tmp_path), dtype="fp32", device="cpu")
    files = safetensors.torch.load_file(tmp_path / "model.safetensors")
    packed = [name.removesuffix(".absmax") for name in files if name.endswith(".weight.absmax")]
    assert len(packed) == 14
    for name in packed:
        module = base.model.get_submodule(name.removesuffix(".weight"))
        assert torch.equal(module.packed, files[name].view(torch.uint8).view(-1, 1))
        assert torch.equal(module.packing.scales[0], files[f"{name}.absmax"])
        assert len(module.packing.scales) == (4 if nested else 1)
        if nested:
            assert torch.equal(module.packing.scales[1], files[f"{name}.nested_absmax"])
            assert torch.equal(module.packing.scales[2], files[f"{name}.nested_quant_map"])
