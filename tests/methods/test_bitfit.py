"""BitFit: biases alone are trained; PEFT takes its file for a LoRA that does nothing else."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file

from peftkit.adapter import attach
from peftkit.errors import AdapterError, TargetError
from peftkit.formats.folders import CONFIG, TENSORS
from peftkit.formats.peft.load import load_adapter
from peftkit.methods.own_parameters import BitFit
from tests.helpers.cell import perturb_trained, saved, tiny_model, trained
from tests.helpers.kinds import outputs

pytestmark = pytest.mark.filterwarnings(
    # PEFT asks transformers by an old name
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    # and notes that a layer with a bias cannot be switched off
    "ignore:Careful, disabling adapter layers with bias:UserWarning",
)


def test_targets_without_a_bias_and_parts_of_a_fused_layer_are_refused():
    with pytest.raises(TargetError, match=r"there is no bias .*\n  targets: o; 6 layers"):
        attach(tiny_model("qwen2"), BitFit(targets=("o",)))
    with pytest.raises(TargetError, match=r"'q' is one role of this fused layer"):
        attach(tiny_model("gpt2"), BitFit(targets=("q",)))
    with pytest.raises(TargetError, match="no linear layer matches target 'norm_7'"):
        attach(tiny_model("gpt2"), BitFit(targets=("norm_7",)))


def test_the_file_is_an_empty_lora_and_the_biases(tmp_path):
    saved(trained(tiny_model("qwen2"), BitFit()), tmp_path)
    fields = json.loads((tmp_path / CONFIG).read_text())
    first = "model.layers.0.self_attn.q_proj"
    assert (fields["peft_type"], fields["r"], fields["bias"]) == ("LORA", 1, "all")
    assert fields["target_modules"] == [first]
    tensors = load_file(tmp_path / TENSORS)
    lora = {name: tensors.pop(name) for name in list(tensors) if ".lora_" in name}
    assert sorted(lora) == [f"base_model.model.{first}.lora_{half}.weight" for half in "AB"]
    assert not any(tensor.any() for tensor in lora.values())
    assert f"base_model.model.{first}.base_layer.bias" in tensors
    assert len(tensors) == 6


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_their_lora_that_trains_biases_alone_is_read(bias, tmp_path):
    config = peft.LoraConfig(r=1, target_modules=["q_proj", "k_proj"], bias=bias)
    theirs = peft.get_peft_model(tiny_model("qwen2"), config).eval()
    for name, parameter in theirs.named_parameters():
        if ".lora_" in name:
            parameter.requires_grad_(False)
    perturb_trained(theirs)
    theirs.save_pretrained(tmp_path)
    model = tiny_model("qwen2")
    adapter = load_adapter(model, tmp_path)
    assert isinstance(adapter.method, BitFit)
    assert len(adapter.modules) == (6 if bias == "all" else 4)
    expected = outputs(theirs.base_model.model)
    torch.testing.assert_close(outputs(model), expected, atol=2e-6, rtol=0)


def test_biases_beside_a_lora_that_does_something_are_refused_by_name(tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], bias="all")
    theirs = peft.get_peft_model(tiny_model("qwen2"), config)
    perturb_trained(theirs)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match=r"features that peftkit does not read\n  bias: all"):
        load_adapter(tiny_model("qwen2"), tmp_path)
