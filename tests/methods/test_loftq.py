"""LoftQ: what is lost by quantising comes back as far as the rank allows."""

import copy

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from peftkit.adapter import attach
from peftkit.errors import AdapterError, TargetError
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.methods.data_init import loftq_starts
from peftkit.methods.lora import LoRA
from peftkit.quant.quantize import quantize_model
from peftkit.quant.weights import weight_of
from tests.helpers.families import ARCHITECTURES, FAMILIES
from tests.helpers.kinds import outputs

LOFTQ = LoRA(rank=5, alpha=15, init="loftq", targets=("q", "v", "down"))


def pair(family: str, kind: str = "nf4") -> tuple[nn.Module, nn.Module]:
    """Return a model and the same quantised."""
    original = FAMILIES[family]().eval()
    model = copy.deepcopy(original)
    quantize_model(model, kind, compute_dtype=torch.float32)
    return original, model


@pytest.mark.parametrize(("family", "kind"), [("llama", "fp4"), ("gpt2", "nf4"), ("phi3", "int8")])
def test_it_starts_as_the_best_of_its_rank_for_what_was_lost(family, kind):
    original, model = pair(family, kind)
    adapter = attach(model, LOFTQ, starts=loftq_starts(model, LOFTQ, original))
    for path, module in adapter.modules.items():
        weight, quantized = (weight_of(m).float() for m in (original.get_submodule(path), module))
        left = weight - module.merged_weight(quantized)
        parts = module.site.rows.values() if module.site.rows else [torch.arange(len(weight))]
        for rows in parts:  # in gpt2 and phi3 q and v are rows of one layer
            tail = torch.linalg.svdvals(weight[rows] - quantized[rows])[5:]
            # Eckart and Young: no matrix of rank 5 leaves less
            torch.testing.assert_close(left[rows].norm(), tail.norm(), atol=1e-5, rtol=1e-4)
        others = torch.ones(len(weight), dtype=torch.bool)
        others[torch.cat(list(parts))] = False
        assert torch.equal(left[others], (weight - quantized)[others])


def test_without_its_start_and_over_weights_that_lost_nothing_it_is_refused(tmp_path):
    original, model = pair("llama")
    with pytest.raises(AdapterError, match=r"Compute them with loftq_starts\(\.\.\.\)"):
        attach(model, LOFTQ)
    with pytest.raises(TargetError, match="The weight equals the original"):
        loftq_starts(original, LOFTQ, copy.deepcopy(original))
    save_adapter(attach(model, LOFTQ, starts=loftq_starts(model, LOFTQ, original)), tmp_path)
    with pytest.raises(AdapterError, match="this layer is not quantised"):
        load_adapter(original, tmp_path)
    model = ARCHITECTURES["mixtral"]()
    with pytest.raises(TargetError, match=r"stacked experts .* supports neither"):
        loftq_starts(model, LoRA(rank=2, init="loftq"), model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_computes_the_same_over_bitsandbytes_own_nf4(tmp_path):
    # rows of 64 and more: its products are wrong where a block is longer than a row
    wide = LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    original = LlamaForCausalLM(wide).eval()
    original.save_pretrained(tmp_path / "base")
    model = copy.deepcopy(original)
    quantize_model(model, "nf4", double_quant=True, compute_dtype=torch.float32)
    adapter = attach(model, LOFTQ, starts=loftq_starts(model, LOFTQ, original))
    save_adapter(adapter, tmp_path)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    # in evaluation it would repack the weights for a kernel of less precision
    theirs = peft.PeftModel.from_pretrained(packed, tmp_path).train()
    # float32 sums in another order
    torch.testing.assert_close(outputs(theirs), outputs(model), atol=1e-5, rtol=0)
    adapter.detach()
    load_adapter(model, tmp_path)  # without the original
    torch.testing.assert_close(outputs(model), outputs(theirs), atol=1e-5, rtol=0)
