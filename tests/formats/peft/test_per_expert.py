"""LoRAs of single experts, of transformers 4, and of PEFT's stacks: imported they compute alike."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from peftkit.adapter import attach
from peftkit.errors import AdapterError
from peftkit.formats.peft.folder import load_adapter, save_adapter
from peftkit.methods.lora import LoRA
from peftkit.transform.exchange import import_adapter
from tests.families import ARCHITECTURES
from tests.formats.test_mlx import logits

RANK, EXPERTS = 3, 4
LEAVES = {  # family -> name of the block in transformers 4, and of gate, up, down in an expert
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
Q = "model.layers.1.self_attn.q_proj"


def old_adapter(
    family: str, layers: tuple[int, ...] = (0, 1), kinds: tuple[int, ...] = (0, 1, 2)
) -> tuple[nn.Module, nn.Module, dict[str, Tensor], float]:
    """Return a base, one with the update in its weights, PEFT's old tensors, and the scaling."""
    base = ARCHITECTURES[family]().eval()
    expected, scaling = copy.deepcopy(base), 5 / RANK
    block, leaves = LEAVES[family]
    tensors: dict[str, Tensor] = {}

    def pair(name: str, weight: Tensor) -> None:
        a, b = torch.randn(RANK, weight.shape[1]) / 10, torch.randn(weight.shape[0], RANK) / 2
        weight += scaling * b @ a
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b

    with torch.no_grad():
        for layer in layers:
            experts: Any = expected.get_submodule(f"model.layers.{layer}.mlp.experts")
            half = experts.gate_up_proj.shape[1] // 2
            for expert in range(EXPERTS):
                fused = experts.gate_up_proj[expert]
                weights = fused[:half], fused[half:], experts.down_proj[expert]
                for kind in kinds:
                    name = f"model.layers.{layer}.{block}.experts.{expert}.{leaves[kind]}"
                    pair(name, weights[kind])
        pair(Q, expected.get_submodule(Q).weight)
    return base, expected, tensors, scaling


def write(folder: Path, family: str, tensors: dict[str, Tensor], **more: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 5,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", *LEAVES[family][1]],
        **more,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def base_of(model: Any, folder: Path) -> str:
    model.config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", LEAVES)
@pytest.mark.parametrize(
    ("layers", "kinds"), [((0, 1), (0, 1, 2)), ((1,), (0, 1, 2)), ((0, 1), (1,)), ((0, 1), (0, 2))]
)
@pytest.mark.parametrize("rslora", [False, True])
def test_pairs_of_single_experts_compute_in_a_stack_as_in_the_weights(
    family: str, layers: tuple[int, ...], kinds: tuple[int, ...], rslora: bool, tmp_path: Path
) -> None:
    base, expected, tensors, _ = old_adapter(family, layers, kinds)
    scale: dict[str, Any] = {"lora_alpha": 5 / math.sqrt(RANK), "use_rslora": True}
    source = write(tmp_path / "old", family, tensors, **(scale if rslora else {}))
    before = logits(base)
    import_adapter(source, tmp_path / "new", base=base_of(base, tmp_path / "base"))
    load_adapter(base, tmp_path / "new")
    assert (logits(base) - before).abs().max() > 0.01
    torch.testing.assert_close(logits(base), logits(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", LEAVES)
def test_every_missing_expert_is_listed(family: str, tmp_path: Path) -> None:
    base, _, tensors, _ = old_adapter(family)
    for name in list(tensors):
        if ".0." in name and ".experts.2." in name and name.endswith("lora_B.weight"):
            del tensors[name]
    source = write(tmp_path / "old", family, tensors)
    with pytest.raises(AdapterError) as caught:
        import_adapter(source, tmp_path / "new", base=base_of(base, tmp_path / "base"))
    for role in ("expert_gate", "expert_up", "expert_down"):
        where = f"{role} of expert 2 in model.layers.0.mlp.experts"
        assert f"missing: lora_B of {where}" in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_experts_of_other_ranks_or_bases_are_refused(tmp_path: Path) -> None:
    base, _, tensors, _ = old_adapter("mixtral")
    folder = base_of(base, tmp_path / "base")
    source = write(tmp_path / "a", "mixtral", tensors, rank_pattern={r"experts.1.w2": 2})
    with pytest.raises(AdapterError, match=r"expert_down of expert 1 .* has rank 2"):
        import_adapter(source, tmp_path / "new", base=folder)
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.3.w1.lora_A.weight"
    source = write(tmp_path / "b", "mixtral", tensors | {name: torch.ones(2, 32)})
    with pytest.raises(AdapterError, match="misshapen: expert_gate of expert 3"):
        import_adapter(source, tmp_path / "new", base=folder)
    ninth = {name.replace("experts.3", "experts.9"): torch.ones(RANK, 32)}
    source = write(tmp_path / "c", "mixtral", tensors | ninth)
    with pytest.raises(AdapterError, match="has no expert 9, of 4"):
        import_adapter(source, tmp_path / "new", base=folder)
    dense = base_of(ARCHITECTURES["llama"](), tmp_path / "dense")
    with pytest.raises(AdapterError, match="the base has no such linear layer"):
        import_adapter(write(tmp_path / "d", "mixtral", tensors), tmp_path / "new", base=dense)
    for more in ({"use_dora": True}, {"init_lora_weights": "olora"}):
        source = write(tmp_path / next(iter(more)), "mixtral", tensors, **more)
        with pytest.raises(AdapterError, match="cannot stack the experts"):
            import_adapter(source, tmp_path / "new", base=folder)
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
