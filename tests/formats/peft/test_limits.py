"""What PEFT does by itself and its files do not say, and what it refuses."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertConfig,
    BertForTokenClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedModel,
)

from peftkit.adapter import attach
from peftkit.errors import AdapterError
from peftkit.formats.open_adapter import task_of
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter, read_adapter
from peftkit.formats.peft.low_rank import read_low_rank
from peftkit.formats.peft.targets import refused_by_peft
from peftkit.methods.lora import LoRA
from peftkit.methods.table import method_from_peft
from tests.helpers.families import FAMILIES
from tests.helpers.hybrids import FURTHER
from tests.helpers.kinds import outputs, words

SIZES = {"vocab_size": 384, "pad_token_id": 0}


def gpt2() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(**SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=64, num_labels=6)
    return GPT2ForSequenceClassification(config).eval()


def bert() -> PreTrainedModel:
    torch.manual_seed(0)
    config = BertConfig(
        **SIZES,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=5,
    )
    return BertForTokenClassification(config).eval()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize(
    ("build", "kind", "target", "labels"),
    [(gpt2, "SEQ_CLS", "c_attn", 6), (bert, "TOKEN_CLS", "query", 5)],
)
def test_an_added_head(build, kind, target, labels, tmp_path):
    theirs = peft.get_peft_model(
        build(), peft.LoraConfig(task_type=kind, r=8, target_modules=[target])
    ).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(str(tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["modules_to_save"] = None  # as older PEFT wrote it
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    again = peft.PeftModel.from_pretrained(build(), str(tmp_path)).eval()
    expected = again(input_ids=words()).logits
    model = build()
    load_adapter(model, tmp_path)
    assert torch.equal(model(input_ids=words()).logits, expected)
    assert len(task_of(read_adapter(tmp_path)).labels) == labels  # type: ignore[attr-defined]
    with pytest.raises(AdapterError, match="modules_to_save"):  # not: get the adapter again
        read_low_rank(tmp_path)


def test_a_name_with_a_foreign_prefix_is_refused_where_it_is_read(tmp_path):
    save_adapter(attach(FAMILIES["llama"](), LoRA(rank=2, targets=("q",))), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file({f"foo.bar.{name}": tensor for name, tensor in load_file(file).items()}, file)
    (tmp_path / "peftkit.json").unlink()
    with pytest.raises(AdapterError, match=r"foo\.bar\.base_model"):
        read_low_rank(tmp_path)


@pytest.mark.parametrize(("name", "refused"), [("mamba", True), ("llama4", True), ("jamba", False)])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_what_peft_refuses_is_said(name, refused, tmp_path):
    model = FURTHER[name]().eval()
    adapter = attach(model, LoRA(rank=2))
    assert bool(refused_by_peft(adapter)) == refused
    save_adapter(adapter, tmp_path)
    bare: nn.Module = FURTHER[name]().eval()
    if not refused:
        theirs = peft.PeftModel.from_pretrained(bare, str(tmp_path)).eval()
        assert outputs(theirs).shape == outputs(model).shape
        return
    with pytest.raises((ValueError, RuntimeError), match=r"incompatible|size mismatch"):
        peft.PeftModel.from_pretrained(bare, str(tmp_path))


@pytest.mark.parametrize("start", ["pissa_niter_16", "corda"])
def test_a_start_that_cannot_be_made_again_is_refused(start):
    with pytest.raises(AdapterError, match=f"init_lora_weights: '{start}'"):
        method_from_peft({"peft_type": "LORA", "r": 4, "init_lora_weights": start})
