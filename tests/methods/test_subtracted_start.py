"""PiSSA and OLoRA: what is taken out of a weight, quickly, and exactly for files of PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from peftkit.formats.peft.folder import load_adapter
from peftkit.kernels import svd
from peftkit.merging.merge import merge
from peftkit.methods.lora_linear import of_weight
from tests.families import FAMILIES
from tests.kinds import outputs

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def decaying(rows: int, columns: int) -> Tensor:
    """Return a matrix whose singular values fall off slowly, as those of trained weights do."""
    u, _ = torch.linalg.qr(torch.randn(rows, min(rows, columns)))
    v, _ = torch.linalg.qr(torch.randn(columns, min(rows, columns)))
    values = 1 / torch.arange(1, min(rows, columns) + 1).sqrt()
    return u * values @ v.t()


def test_pissa_decomposes_no_large_weight_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = decaying(520, 400)
    a, b = of_weight("pissa", weight, 8, 2.0, exact=True)
    left_out = (weight - 2.0 * b @ a).norm()
    whole = torch.linalg.svd

    def small_only(matrix: Tensor, **kwargs: Any) -> Any:
        assert min(matrix.shape) < 100, "a whole weight"
        return whole(matrix, **kwargs)

    monkeypatch.setattr(torch.linalg, "svd", small_only)
    a, b = of_weight("pissa", weight, 8, 2.0)
    assert (a.shape, b.shape) == ((8, 400), (520, 8))
    assert (weight - 2.0 * b @ a).norm() <= 1.001 * left_out  # of the best there is


def test_olora_needs_only_the_first_columns() -> None:
    weight = torch.randn(41, 60)
    exact = of_weight("olora", weight, 5, 1.0, exact=True)
    for part, expected in zip(of_weight("olora", weight, 5, 1.0), exact, strict=True):
        torch.testing.assert_close(part, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_a_start_that_pefts_file_leaves_out_is_made_as_peft_makes_it(
    init: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
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
