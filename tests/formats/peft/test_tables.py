"""PEFT saves tables of tokens with an adapter; every command computes with them as PEFT does."""

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from peftkit.base.load import load_base
from peftkit.errors import AdapterError
from peftkit.formats.exchange import import_adapter
from peftkit.formats.folders import CONFIG, TENSORS
from peftkit.formats.open_adapter import continue_adapter, open_adapter
from peftkit.formats.peft.folder import save_adapter
from peftkit.inference.bank import AdapterBank
from peftkit.merging.merge import merge
from peftkit.methods.lora import LoRA
from tests.helpers.adapters import perturb
from tests.helpers.folders import change_tensors

pytestmark = [
    # PEFT uses an old name of transformers, and reports that it saves tables, and tied ones
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*ensure_weight_tying:UserWarning"),
]
TOLERANCE = 1e-5
"""float32 sums in another order: trained rows of a head are added to its output."""
IDS = [1, 300, 40, 383, 9, 77, 100]
NEW = ("<ask>", "</ask>")

SIZES = {"unchanged": (384, 384), "new": (384, 386), "padded": (384, 448), "shrunk": (448, 386)}
"""Rows of the base, and of the resized base that the adapter was trained on."""
BOTH = {"embed_tokens": [383, 7], "lm_head": [383, 7]}
KINDS: dict[str, dict[str, Any]] = {
    "full": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "full-tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "rows": {"trainable_token_indices": BOTH},
    "lora": {},
    "lora-on-head": {"target_modules": ["q_proj", "lm_head"]},
}
GRID = list(product(KINDS, SIZES, (False, True)))


class Saved:
    """An adapter of PEFT over a base folder, and PEFT's logits."""

    def __init__(self, root: Path, tokenizer: Any, kind: str, size: str, tied: bool) -> None:
        torch.manual_seed(0)
        num_rows, self.num_rows = SIZES[size]
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        config = LlamaConfig(vocab_size=num_rows, **sizes, **heads, tie_word_embeddings=tied)
        LlamaForCausalLM(config).save_pretrained(root / "base")
        tokenizer.save_pretrained(root / "base")
        self.base, self.folder = str(root / "base"), root / "adapter"
        model = self.resized()
        fields = {"target_modules": ["q_proj", "v_proj"], **KINDS[kind]}
        model = peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, **fields)
        )
        perturb([p for p in model.parameters() if p.requires_grad], 0.1, seed=1)
        model.save_pretrained(self.folder)
        if size in ("new", "shrunk"):
            longer = type(tokenizer).from_pretrained(root / "base")
            longer.add_tokens(list(NEW), special_tokens=True)
            longer.save_pretrained(self.folder)
        # with a target, PEFT saves the frozen table of this target only
        self.last = 383 if kind == "lora-on-head" else self.num_rows - 1
        self.logits = self.logits_of(model)

    def resized(self) -> Any:
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        if model.config.vocab_size != self.num_rows:
            model.resize_token_embeddings(self.num_rows)
        return model

    def logits_of(self, model: Any) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model.eval()(torch.tensor([[*IDS, self.last]])).logits
        return logits

    def check(self, model: Any) -> None:
        torch.testing.assert_close(self.logits_of(model), self.logits, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[..., Saved]:
    """Adapters of PEFT, each saved once: do not write into their folders."""

    @cache
    def build(kind: str, size: str, tied: bool) -> Saved:
        return Saved(tmp_path_factory.mktemp("theirs"), tokenizer, kind, size, tied)

    return build


@pytest.mark.parametrize(("kind", "size", "tied"), GRID)
def test_the_tables_are_those_of_the_file(kind, size, tied, tmp_path, saved):
    theirs = saved(kind, size, tied)
    opened = open_adapter(theirs.folder, dtype="fp32")
    theirs.check(opened.base.model)
    save_adapter(opened.adapter, tmp_path / "again", opened.file.provenance)
    theirs.check(open_adapter(tmp_path / "again", dtype="fp32").base.model)
    theirs.check(peft.PeftModel.from_pretrained(theirs.resized(), tmp_path / "again"))


@pytest.mark.parametrize(("kind", "size", "tied"), GRID)
def test_the_merged_model_has_these_tables(kind, size, tied, tmp_path, saved):
    theirs = saved(kind, size, tied)
    notices: list[str] = []
    merge(theirs.folder, tmp_path / "m", verify=False, on_event=lambda e: notices.append(str(e)))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    theirs.check(merged)
    differ = tied and kind in ("full", "embedding", "lora-on-head")
    assert any("tie_word_embeddings: false" in notice for notice in notices) == differ
    assert merged.config.tie_word_embeddings == (tied and not differ)


@pytest.mark.parametrize("kind", KINDS)
def test_imported_and_continued_adapters_have_these_tables(kind, tmp_path, saved):
    theirs = saved(kind, "new", True)
    import_adapter(theirs.folder, tmp_path / "imported")
    for folder in (theirs.folder, tmp_path / "imported"):
        base = load_base(theirs.base, dtype="fp32")
        continued = continue_adapter(base, LoRA(start_from=str(folder)), "none")
        theirs.check(base.model)
        trained = {name for name, p in base.model.named_parameters() if p.requires_grad}
        assert trained == {name for name in trained if ".base." not in name}
        assert continued.has_tokens


def test_one_copy_of_tied_tables_is_trained(tmp_path, saved):
    theirs = saved("full-tied", "new", True)
    opened = open_adapter(theirs.folder, dtype="fp32")
    tables = [opened.adapter.modules[path] for path in ("model.embed_tokens", "lm_head")]
    assert tables[0].trained[0] is tables[1].trained[0]
    save_adapter(opened.adapter, tmp_path / "again")
    assert json.loads((tmp_path / "again" / CONFIG).read_text())["ensure_weight_tying"] is True


def test_tables_of_the_published_base_are_not_stored_again(tmp_path, saved):
    theirs = saved("lora-on-head", "unchanged", False)
    assert any("base_layer" in name for name in load_file(theirs.folder / TENSORS))
    opened = open_adapter(theirs.folder, dtype="fp32")
    save_adapter(opened.adapter, tmp_path / "again")
    assert not any("base_layer" in name for name in load_file(tmp_path / "again" / TENSORS))


@pytest.mark.parametrize("tied", [False, True])
def test_a_bank_takes_lora_on_the_head_and_refuses_other_tables(tied, saved):
    theirs = saved("lora-on-head", "unchanged", tied)
    bank = AdapterBank(load_base(theirs.base, dtype="fp32"), {"a": theirs.folder})
    with bank.use("a"):
        theirs.check(bank.base.model)
    other = saved("lora", "new", tied)
    with pytest.raises(AdapterError, match=r"not only a LoRA\n.*weight of its base"):
        bank.add("b", other.folder)


def test_lora_on_embeddings_is_refused_by_name(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setitem(KINDS, "lora-on-embedding", {"target_modules": ["q_proj", "embed_tokens"]})
    theirs = Saved(tmp_path, tokenizer, "lora-on-embedding", "unchanged", tied=False)
    with pytest.raises(AdapterError, match="LoRA on embeddings is not supported"):
        open_adapter(theirs.folder, dtype="fp32")


def test_tables_of_several_shapes_are_refused(tmp_path, tokenizer):
    theirs = Saved(tmp_path, tokenizer, "lora", "new", tied=False)
    name = "base_model.model.lm_head.weight"
    change_tensors(theirs.folder / TENSORS, lambda own: own.update({name: own[name][:-1].clone()}))
    with pytest.raises(AdapterError, match=r"misshapen: .* is \(38[56], 16\), not"):
        open_adapter(theirs.folder, dtype="fp32")
