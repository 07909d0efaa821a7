"""PEFT's LoRAs of stacked experts: imported they compute alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peftkit.adapter import attach
from peftkit.errors import AdapterError
from peftkit.formats.exchange import import_adapter
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.methods.lora import LoRA
from tests.helpers.adapters import logits, perturb
from tests.helpers.families import ARCHITECTURES
from tests.helpers.folders import change_json

RANK = 3


def base_of(model: Any, folder: Path) -> str:
    model.config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "notes", "targets"),
    [
        ("mixtral", True, ("experts", "q")),
        ("qwen3_moe", False, ("expert_up", "q")),
        ("gpt_oss", False, ("expert_down",)),
    ],
)
def test_peft_stacks_load(family, notes, targets, tmp_path):
    model = ARCHITECTURES[family]().eval()
    adapter = attach(model, LoRA(rank=RANK, alpha=5, targets=targets))
    perturb(adapter.parameters())
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
def test_stacks_of_an_unknown_layout_stay_refused(version, tmp_path):
    model = ARCHITECTURES["mixtral"]()
    adapter = attach(model, LoRA(rank=2, targets=("experts",)))
    source = save_adapter(adapter, tmp_path / "one")
    adapter.detach()
    (source / "peftkit.json").unlink()
    change_json(source / "adapter_config.json", peft_version=version)
    with pytest.raises(AdapterError, match="layout of the adapter's stacked experts"):
        load_adapter(model, source)
    with pytest.raises(AdapterError, match="layout of the adapter's stacked experts"):
        import_adapter(source, tmp_path / "two", base=base_of(model, tmp_path / "base"))
