"""PEFT's LoRAs of stacked experts: imported they compute alike; those of single experts do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peftkit.adapter import attach
from peftkit.errors import AdapterError
from peftkit.formats.exchange import import_adapter
from peftkit.formats.peft.folder import load_adapter, save_adapter
from peftkit.methods.lora import LoRA
from tests.families import ARCHITECTURES
from tests.formats.test_mlx import logits

RANK = 3


def base_of(model: Any, folder: Path) -> str:
    model.config.save_pretrained(folder)
    return str(folder)


def test_pairs_of_single_experts_are_refused_by_name(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.mlp.experts.1.gate_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.ones(2, 32),
        f"{name}.lora_B.weight": torch.ones(4, 2),
    }
    (tmp_path / "old").mkdir()
    save_file(tensors, tmp_path / "old" / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["gate_proj"]}
    (tmp_path / "old" / "adapter_config.json").write_text(json.dumps(fields))
    base = base_of(ARCHITECTURES["qwen3_moe"](), tmp_path / "base")
    with pytest.raises(AdapterError, match="single experts, as transformers 4 had them"):
        import_adapter(tmp_path / "old", tmp_path / "new", base=base)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("notes", [True, False])
@pytest.mark.parametrize("targets", [("experts", "q"), ("expert_up", "q"), ("expert_down",)])
def test_stacks_of_todays_peft_are_imported(
    family: str, notes: bool, targets: tuple[str, ...], tmp_path: Path
) -> None:
    model = ARCHITECTURES[family]().eval()
    adapter = attach(model, LoRA(rank=RANK, alpha=5, targets=targets))
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    expected = logits(model)
    source = save_adapter(adapter, tmp_path / "one")
    adapter.detach()
    if not notes:
        (source / "peftkit.json").unlink()
    import_adapter(source, tmp_path / "two", base=base_of(model, tmp_path / "base"))
    one, two = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    load_adapter(model, tmp_path / "two")
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("version", [None, "0.17.1", "0.18.0"])
def test_stacks_of_an_unknown_layout_stay_refused(version: str | None, tmp_path: Path) -> None:
    model = ARCHITECTURES["mixtral"]()
    source = save_adapter(attach(model, LoRA(rank=2, targets=("experts",))), tmp_path / "one")
    (source / "peftkit.json").unlink()
    path = source / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"peft_version": version}))
    with pytest.raises(AdapterError, match="cannot tell the layout"):
        import_adapter(source, tmp_path / "two", base=base_of(model, tmp_path / "base"))
