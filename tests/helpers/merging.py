"""Base and adapter folders to merge."""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from peftkit.adapter import Adapter, attach
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.base import Method
from peftkit.methods.dora import DoRA
from peftkit.methods.ia3 import IA3
from peftkit.methods.lora import LoRA
from peftkit.methods.own_parameters import LNTuning
from peftkit.methods.vera import VeRA
from peftkit.quant.quantize import quantize_model
from tests.helpers import adapters
from tests.helpers.adapters import perturb
from tests.helpers.families import FAMILIES

METHODS: dict[str, Method] = {
    "lora": LoRA(rank=4, alpha=8),
    "rslora": LoRA(rank=4, alpha=8, rslora=True),
    "patterns": LoRA(rank=4, alpha=8, rank_pattern={"o": 2}, alpha_pattern={"v": 5}),
    "pissa": LoRA(rank=4, alpha=8, init="pissa"),
    "dora": DoRA(rank=4, alpha=8),
    "ia3": IA3(),
    "vera": VeRA(rank=8, targets=("q", "v")),
    "ln-tuning": LNTuning(),
}


def logits(model: nn.Module) -> Tensor:
    return adapters.logits(model).float()


def attach_perturbed(model: nn.Module, method: Method, size: float = 0.05) -> Adapter:
    """Attach a method and move its tensors, as training would."""
    adapter = attach(model, method)
    perturb(adapter.parameters(), size, seed=7)
    return adapter


class Saver:
    """Makes base folders and adapter folders on them; keeps the logits of both together."""

    def __init__(self, root: Path, tokenizer: PreTrainedTokenizerFast) -> None:
        self.root, self.tokenizer = root, tokenizer
        self.base, self.adapter, self.out = root / "base", root / "adapter", root / "out"
        self.logits: Tensor

    def __call__(
        self,
        family: str = "llama",
        method: Method = METHODS["lora"],
        *,
        dtype: torch.dtype = torch.float32,
        shard: str = "50GB",
        size: float = 0.05,
        quantize: str = "none",
        tie: bool = False,
        fingerprint: str | None = None,
        spare_rows: int = 0,
    ) -> None:
        torch.manual_seed(0)
        model = FAMILIES[family]().eval().to(dtype)
        if spare_rows:
            model.resize_token_embeddings(len(self.tokenizer) + spare_rows)
        if tie:
            model.config.tie_word_embeddings = True
            model.tie_weights()
        model.save_pretrained(self.base, max_shard_size=shard)
        self.tokenizer.save_pretrained(self.base)
        if quantize != "none":
            quantize_model(model, quantize)
        adapter = attach_perturbed(model, method, size)
        loading = {"dtype": "fp32", "quantize": quantize, "double_quant": True}
        provenance = Provenance(base=str(self.base), fingerprint=fingerprint, loading=loading)
        save_adapter(adapter, self.adapter, provenance)
        self.logits = logits(model.float())

    def merged(self) -> nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.out).eval()
