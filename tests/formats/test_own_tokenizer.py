"""The chat template and the end token in an adapter's folder replace the base's."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.base.new_tokens import notify_split_tokens
from peftkit.data.generation import default_style, prompt_ids, stop_ids
from peftkit.events import Notice
from peftkit.formats.exchange import export_adapter, import_adapter
from peftkit.formats.folders import NOTES
from peftkit.formats.open_adapter import continue_adapter, open_adapter
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.inference.bank import AdapterBank
from peftkit.merging.merge import merge
from peftkit.methods.lora import LoRA
from tests.helpers.adapters import perturb
from tests.helpers.cell import tiny_model

OWN = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TEMPLATES = {"base's": None, "own": OWN, "none in the base": OWN}
GRID = list(product(TEMPLATES, (False, True)))
HELLO = [{"role": "user", "content": "Hello"}]


class Folders:
    """A base, and an adapter of another tool with a tokenizer, which transformers reads."""

    def __init__(self, root: Path, tokenizer: Any, template: str, has_eos: bool) -> None:
        self.base, self.adapter = root / "base", root / "adapter"
        tiny_model("llama").save_pretrained(self.base)
        tokenizer.save_pretrained(self.base)
        own = AutoTokenizer.from_pretrained(self.base)
        if template == "none in the base":
            (self.base / "chat_template.jinja").unlink()
        if TEMPLATES[template]:
            own.chat_template = TEMPLATES[template]
        self.eos = "<s>" if has_eos else tokenizer.eos_token
        own.eos_token = self.eos
        adapter = attach(tiny_model("llama"), LoRA(rank=2))
        perturb(adapter.parameters(), 0.1)
        origin = Provenance(base=str(self.base), task_type="CAUSAL_LM")
        save_adapter(adapter, self.adapter, origin)
        (self.adapter / NOTES).unlink()
        own.save_pretrained(self.adapter)
        self.tokenizer = AutoTokenizer.from_pretrained(self.adapter)
        self.differs = has_eos or template != "base's"
        text = self.tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
        self.prompt = self.tokenizer(text, add_special_tokens=False).input_ids

    def check(self, tokenizer: Any, style: Any) -> None:
        assert prompt_ids(tokenizer, "Hello", style) == self.prompt
        assert self.tokenizer.eos_token_id in stop_ids(tokenizer, style)


@pytest.fixture
def folders(tmp_path: Path, tokenizer: Any, template: str, has_eos: bool) -> Folders:
    return Folders(tmp_path, tokenizer, template, has_eos)


@pytest.mark.parametrize(("template", "has_eos"), GRID)
def test_prompts_and_stops_are_those_of_the_folder(folders):
    events: list[Any] = []
    opened = open_adapter(folders.adapter, on_event=events.append)
    folders.check(opened.base.tokenizer, opened.style)
    notices = [e.text for e in events if isinstance(e, Notice) and str(folders.adapter) in e.text]
    assert len(notices) == folders.differs
    assert opened.base.tokenizer.eos_token == folders.eos


@pytest.mark.parametrize(("template", "has_eos"), GRID)
def test_a_bank_prompts_each_adapter_with_its_own(folders):
    bank = AdapterBank(load_base(str(folders.base)), {"a": folders.adapter})
    tokenizer, style = bank.base.tokenizer, bank.style("a")
    assert prompt_ids(tokenizer, "Hello", style) == folders.prompt
    if folders.tokenizer.chat_template == OWN:  # it renders the end token; ChatML has another one
        assert folders.tokenizer.eos_token_id in stop_ids(tokenizer, style)
    assert bank.style(None) == default_style(bank.base.tokenizer)
    events: list[Any] = []
    notify_split_tokens({"a": folders.adapter}, bank.base.tokenizer, events.append)
    assert len(events) == folders.differs


@pytest.mark.parametrize(("template", "has_eos"), GRID)
def test_merged_and_exported_folders_have_them(folders, tmp_path):
    merge(folders.adapter, tmp_path / "merged", verify=False)
    export_adapter(folders.adapter, tmp_path / "peft", to="peft")
    export_adapter(folders.adapter, tmp_path / "served", to="peft", serving=True)
    import_adapter(folders.adapter, tmp_path / "imported")
    for name in ("merged", "peft", "served", "imported"):
        written = AutoTokenizer.from_pretrained(tmp_path / name)
        assert written.chat_template == folders.tokenizer.chat_template
        assert written.eos_token == folders.eos
    generation = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    if folders.eos == "<s>":
        assert generation["eos_token_id"][0] == folders.tokenizer.eos_token_id
    opened = open_adapter(tmp_path / "imported")
    folders.check(opened.base.tokenizer, opened.style)


@pytest.mark.parametrize(("template", "has_eos"), GRID)
def test_a_continued_adapter_is_trained_and_saved_with_them(folders):
    base = load_base(str(folders.base))
    continued = continue_adapter(base, LoRA(start_from=str(folders.adapter)), "none")
    folders.check(base.tokenizer, default_style(base.tokenizer))
    assert continued.has_tokens == folders.differs


def test_a_merge_keeps_the_bits_of_the_weights_and_only_changes_the_format(tmp_path, tokenizer):
    folders = Folders(tmp_path, tokenizer, "own", True)
    merge(folders.adapter, tmp_path / "merged")
    loaded = load_base(str(tmp_path / "merged"), dtype="fp32").model
    embedding = tiny_model("llama").get_input_embeddings().weight
    assert torch.equal(loaded.get_input_embeddings().weight, embedding)
