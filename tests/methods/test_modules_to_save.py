"""Modules that are trained whole beside a method."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peftkit.adapter import attach
from peftkit.errors import AdapterError, TargetError
from peftkit.formats.exchange import export_adapter
from peftkit.formats.folders import CONFIG, NOTES, TENSORS
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.low_rank import read_low_rank
from peftkit.merging.combine import combine
from peftkit.methods.base import AdapterModule
from peftkit.methods.lora import LoRA
from peftkit.methods.modules_to_save import named_modules
from peftkit.quant.quantize import quantize_model
from tests.helpers.cell import saved, tiny_model, trained
from tests.helpers.folders import change_tensors

pytestmark = pytest.mark.filterwarnings(
    # PEFT asks transformers by an old name
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    # PEFT knows no sizes of norms, and does not need them; and says that heads were tied
    "ignore:Unsupported layer type .*Norm'>' encountered:UserWarning",
    "ignore:Model has `tie_word_embeddings=True`:UserWarning",
    "ignore:Model with `tie_word_embeddings=True`:UserWarning",
)


def test_targets_inside_are_trained_whole_and_not_adapted():
    adapter = attach(tiny_model("llama"), LoRA(rank=2, train_fully=("layers.1", "layers.0.mlp")))
    assert all(path.startswith("model.layers.0.self_attn") for path in adapter.method_modules)
    assert len(adapter.method_modules) == 4
    with pytest.raises(TargetError, match="no modules to adapt with lora"):
        attach(tiny_model("llama"), LoRA(rank=2, train_fully=("layers",)))


def test_parts_and_whole_paths_are_names_and_the_outermost_counts():
    model = tiny_model("llama")
    assert named_modules(model, ["model.norm"]) == ["model.norm"]
    assert named_modules(model, ["layers.1.mlp", "layers.1"]) == ["model.layers.1"]
    with pytest.raises(TargetError, match=r"'lm_haed' .*\n?.*Did you mean 'lm_head'"):
        named_modules(model, ["lm_head", "lm_haed"])
    with pytest.raises(TargetError, match="no module is called 'orm'"):
        named_modules(model, ["orm"])


def test_what_cannot_be_trained_is_refused_by_name():
    model = tiny_model("llama")
    with pytest.raises(
        TargetError, match=r"train model\.rotary_emb in full\n  it has no parameters"
    ):
        attach(model, LoRA(rank=2, train_fully=("rotary_emb",)))
    quantize_model(model, "nf4", compute_dtype=torch.float32)
    with pytest.raises(TargetError, match=r"layers\.0\.mlp in full\n  .*packed is quantised"):
        attach(model, LoRA(rank=2, train_fully=("layers.0.mlp",)))
    assert not any(isinstance(module, AdapterModule) for module in model.modules())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter with a head beside it."""
    adapter = trained(tiny_model("llama"), LoRA(rank=2, targets=("q",), train_fully=("lm_head",)))
    return saved(adapter, tmp_path / "adapter")


def test_the_config_names_the_module_as_peft_does(folder):
    assert json.loads((folder / CONFIG).read_text())["modules_to_save"] == ["lm_head"]
    assert "base_model.model.lm_head.weight" in load_file(folder / TENSORS)


def test_a_file_without_the_modules_it_names_is_refused(folder):
    (folder / NOTES).unlink()
    change_tensors(folder / TENSORS, lambda own: own.pop("base_model.model.lm_head.weight"))
    with pytest.raises(AdapterError, match="no tensors for the module 'lm_head'"):
        load_adapter(tiny_model("llama"), folder)


def test_servers_combinations_and_banks_refuse_it_by_name(folder, tmp_path):
    with pytest.raises(AdapterError, match="modules_to_save"):
        export_adapter(folder, tmp_path / "served", to="peft", serving=True)
    with pytest.raises(AdapterError, match="modules_to_save"):
        combine([(folder, 1.0)], "linear", tmp_path / "sum")
    with pytest.raises(AdapterError, match="modules_to_save"):  # as banks and compare read it
        read_low_rank(folder)
