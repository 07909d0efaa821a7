"""The tensors of tiny base models, and folders of quantized ones."""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from peftkit.base.purpose import Purpose
from tests.helpers.families import ARCHITECTURES
from tests.helpers.folders import change_json

CLASSES = (
    *("CausalLM", "Seq2SeqLM", "MaskedLM", "SequenceClassification", "TokenClassification"),
    *("ImageClassification", "ImageTextToText", "SpeechSeq2Seq"),
)


def purpose_of(config: Any) -> Purpose | None:
    """Return a purpose whose class loads this config back as what was saved."""
    for name in CLASSES:
        mapping = getattr(transformers, f"AutoModelFor{name}")._model_mapping
        if type(config) in mapping and config.architectures[0] == mapping[type(config)].__name__:
            return Purpose(name, f"AutoModelFor{name}")
    return None


def state_of(model: nn.Module) -> dict[str, Any]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same_state(found: nn.Module, expected: nn.Module) -> None:
    """Compare all tensors, their dtypes too."""
    left, right = state_of(found), state_of(expected)
    assert left.keys() == right.keys()
    for name, tensor in right.items():
        assert left[name].dtype == tensor.dtype, name
        assert torch.equal(left[name], tensor), name


def mark_quantized(folder: Path, **settings: Any) -> None:
    change_json(folder / "config.json", quantization_config=settings)


def write_changed(folder: Path, family: str, replace: Any) -> None:
    """Write a tiny model's folder with other tensors in place of some of its own."""
    torch.manual_seed(0)
    ARCHITECTURES[family]().bfloat16().save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, value in safetensors.torch.load_file(path).items():
        tensors |= replace(name, value) or {name: value}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def in_mxfp4(folder: Path) -> None:
    def replace(name: str, value: Tensor) -> dict[str, Tensor] | None:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return None
        count, width, out = value.shape  # (experts, in, out), packed along in
        blocks = torch.randint(0, 256, (count, out, width // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, (count, out, width // 32), dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    write_changed(folder, "gpt_oss", replace)
    mark_quantized(folder, quant_method="mxfp4")
