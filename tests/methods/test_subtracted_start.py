"""PiSSA and OLoRA: what is taken out of a weight, quickly, and exactly for files of PEFT."""

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from peftkit.formats.peft.load import load_adapter
from peftkit.kernels import svd
from peftkit.merging.merge import merge
from tests.helpers.families import FAMILIES
from tests.helpers.kinds import outputs

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.mark.covers("peftkit")
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_start_that_pefts_file_leaves_out_is_made_as_peft_makes_it(
    init, tmp_path, tokenizer, monkeypatch
):
    monkeypatch.setattr(svd, "EXACT_SIDE", 0)  # as if these layers were large
    monkeypatch.setattr(svd, "OVERSAMPLING", 0)
    monkeypatch.setattr(svd, "POWER_ITERATIONS", 0)
    FAMILIES["llama"]().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base: nn.Module = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=init,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(tmp_path / "base"),
    )
    theirs = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter += 0.05 * torch.randn_like(parameter)
    expected = outputs(theirs)
    theirs.save_pretrained(str(tmp_path / "adapter"))
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    load_adapter(ours, tmp_path / "adapter")
    torch.testing.assert_close(outputs(ours), expected, atol=1e-4, rtol=0)
    merge(tmp_path / "adapter", tmp_path / "merged", base=str(tmp_path / "base"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(outputs(merged), expected, atol=1e-4, rtol=0)
