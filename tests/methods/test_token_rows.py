"""Rows of some tokens are trained; tokens that the base does not know are added and found again."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peftkit.adapter import attach
from peftkit.base.load import Base, load_base
from peftkit.base.new_tokens import add_tokens, restore_tokens, save_tokenizer, token_rows
from peftkit.errors import AdapterError, DataError, TargetError
from peftkit.events import Event
from peftkit.formats.exchange import export_adapter, import_adapter
from peftkit.formats.folders import CONFIG, TENSORS
from peftkit.formats.peft.load import load_adapter, read_adapter
from peftkit.methods.ia3 import IA3
from peftkit.methods.lora import LoRA
from peftkit.quant.layers import QuantizedLinear, pack
from tests.helpers.adapters import perturb
from tests.helpers.cell import saved, tiny_model, trained
from tests.helpers.kinds import outputs, words

pytestmark = pytest.mark.filterwarnings(
    # PEFT asks transformers by an old name
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
TOKENS = (40, 12, 33)


def test_only_these_tokens_change_and_their_rows_are_what_is_looked_up():
    model = tiny_model("gemma")
    embedding, ids = model.get_input_embeddings(), torch.tensor([[40, 41, 12], [0, 383, 33]])
    before = embedding(ids)
    trained(model, LoRA(rank=2, token_rows=TOKENS))
    rows = model.get_input_embeddings()
    after = rows(ids)
    assert torch.equal(after[0, 1], before[0, 1])
    assert torch.equal(after[1, :2], before[1, :2])
    scale = model.config.hidden_size**0.5
    torch.testing.assert_close(after[0, 0], scale * rows.rows[0])
    torch.testing.assert_close(after[0, 2], scale * rows.rows[1])
    torch.testing.assert_close(after[1, 2], scale * rows.rows[2])


def test_the_file_has_the_rows_once_in_the_order_of_the_tokens(tmp_path):
    adapter = trained(tiny_model("gpt2"), LoRA(rank=2, token_rows=TOKENS))
    saved(adapter, tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["trainable_token_indices"] == list(TOKENS)
    tensors = load_file(tmp_path / TENSORS)
    (name,) = (name for name in tensors if ".lora_" not in name)
    path = "transformer.wte"
    assert name == f"base_model.model.{path}.token_adapter.trainable_tokens_delta"
    assert torch.equal(tensors[name], adapter.modules[path].rows)


@pytest.mark.parametrize(
    ("family", "method", "message"),
    [
        ("llama", LoRA(token_rows=(384,)), r"the rows 384 of .*\n  It has rows 0 to 383"),
        ("llama", LoRA(token_rows=(7, 7)), "the rows 7 of"),
        ("llama", LoRA(token_rows={"norm": (7,)}), "neither an embedding nor a head"),
        ("llama", LoRA(token_rows={"embed_token": (7,)}), "Did you mean 'embed_tokens'"),
        ("t5", LoRA(token_rows={"embed_tokens": (7,)}), "matches 2 modules"),
        ("gpt2", LoRA(token_rows={"wte": (7,), "lm_head": (8,)}), "lm_head is tied to .*wte"),
        ("llama", LoRA(token_rows=(7,), train_fully=("embed_tokens",)), "is trained in full"),
        ("llama", LoRA(targets=("head",), token_rows={"lm_head": (7,)}), "cannot have both"),
        ("llama", IA3(token_rows=(7,)), "not for an adapter of type 'ia3'"),
        ("vit", LoRA(token_rows=(7,)), "vit|embedding"),
    ],
)
def test_what_is_no_row_is_refused_by_name(family, method, message):
    with pytest.raises(TargetError, match=message):
        attach(tiny_model(family), method)


# ------------------------------------------------------------------- tokens that are new


NEW = ("<think>", "</think>")


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any) -> Path:
    """The folder of an untied base."""
    tiny_model("llama").save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def opened(folder: Path) -> Base:
    return load_base(str(folder), dtype="fp32")


def test_new_tokens_begin_as_the_mean_and_are_one_token_each(folder):
    base = opened(folder)
    before = base.model.get_input_embeddings().weight.clone()
    ids = add_tokens(base, NEW)
    assert ids == (384, 385)
    assert base.tokenizer("a<think>b").input_ids[1:2] == [384]
    assert base.tokenizer.decode([384], skip_special_tokens=True) == "<think>"
    for table in (base.model.get_input_embeddings(), base.model.get_output_embeddings()):
        assert table.weight.shape[0] == base.model.config.vocab_size == 386
        torch.testing.assert_close(table.weight[384], table.weight[:384].mean(0))
    assert torch.equal(base.model.get_input_embeddings().weight[:384], before)
    assert token_rows(base.model, ids) == {"model.embed_tokens": ids, "lm_head": ids}
    assert not any(parameter.requires_grad for parameter in base.model.parameters())


@pytest.fixture
def more_tokens(folder: Path, tokenizer: Any) -> Path:
    """The folder of a base whose tokenizer has tokens without a row: 384 pads, 385 is <think>."""
    more = copy.deepcopy(tokenizer)
    more.add_special_tokens({"pad_token": "[PAD]"})
    more.add_tokens([*NEW[:1]])
    more.save_pretrained(folder)
    return folder


def test_a_pad_token_without_a_row_is_replaced_with_one_notice(more_tokens):
    events: list[Event] = []
    base = load_base(str(more_tokens), dtype="fp32", on_event=events.append)
    assert base.tokenizer.pad_token == base.tokenizer.eos_token
    text = "The pad token [PAD] has no row in the embedding (384 rows)"
    assert sum(text in str(event) for event in events) == 1


def test_a_token_of_the_tokenizer_without_a_row_can_be_trained(more_tokens, tmp_path):
    base = opened(more_tokens)
    ids = add_tokens(base, NEW[:1])
    assert ids == (385,)
    table = base.model.get_input_embeddings()
    torch.testing.assert_close(table.weight[385], table.weight[:384].mean(0))
    adapter = attach(base.model, LoRA(rank=2, token_rows=token_rows(base.model, ids)))
    perturb(adapter.parameters(), 0.1)
    inputs = {"input_ids": torch.cat([words(), torch.tensor([[385], [385]])], 1)}
    expected = outputs(base.model, inputs)
    out = saved(adapter, tmp_path / "adapter")
    save_tokenizer(base, out)
    again = opened(more_tokens)
    assert restore_tokens(again, out, read_adapter(out).method.token_rows) == (385,)
    load_adapter(again.model, out)
    assert torch.equal(outputs(again.model, inputs), expected)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_a_folder_restores_its_tokens(folder, tmp_path, quantize):
    base = load_base(str(folder), dtype="fp32", quantize=quantize)
    rows = token_rows(base.model, add_tokens(base, NEW))
    inputs = {"input_ids": torch.cat([words(), torch.tensor([[384], [385]])], 1)}
    adapter = attach(base.model, LoRA(rank=2, token_rows=rows))
    perturb(adapter.parameters(), 0.1)
    expected = outputs(base.model, inputs)
    out = saved(adapter, tmp_path / "adapter")
    save_tokenizer(base, out)
    again = load_base(str(folder), dtype="fp32", quantize=quantize)
    assert restore_tokens(again, out) == (384, 385)
    load_adapter(again.model, out)
    assert torch.equal(outputs(again.model, inputs), expected)
    text = "<think>so</think>"
    assert again.tokenizer(text).input_ids == base.tokenizer(text).input_ids
    assert restore_tokens(again, out) == ()


def test_a_missing_or_foreign_tokenizer_is_refused(folder, tmp_path):
    base = opened(folder)
    rows = token_rows(base.model, add_tokens(base, NEW))
    out = saved(attach(base.model, LoRA(rank=2, token_rows=rows)), tmp_path / "adapter")
    assert restore_tokens(opened(folder), out) == ()
    with pytest.raises(AdapterError, match="the rows 384, 385 of"):
        load_adapter(opened(folder).model, out)
    save_tokenizer(base, out)
    other = opened(folder)
    add_tokens(other, ["<other>"])
    with pytest.raises(
        AdapterError, match=r"ids 384, 385; with this base they would have\s+385, 386"
    ):
        restore_tokens(other, out)
    (out / "tokenizer.json").write_text("{}")
    with pytest.raises(AdapterError, match=r"cannot read .*tokenizer\.json"):
        restore_tokens(opened(folder), out)


@pytest.mark.parametrize("num_rows", [384, 411])  # a padded table has rows for the tokens already
def test_new_tokens_go_where_the_adapter_goes(folder, tmp_path, num_rows):
    model = tiny_model("llama")
    model.resize_token_embeddings(num_rows, mean_resizing=False)
    model.save_pretrained(folder)
    base = opened(folder)
    method = LoRA(rank=2, token_rows=token_rows(base.model, add_tokens(base, NEW)))
    out = saved(trained(base.model, method), tmp_path / "adapter")
    save_tokenizer(base, out)
    export_adapter(out, tmp_path / "same", to="peft")
    export_adapter(out, tmp_path / "halved", to="peft", dtype="bf16")
    import_adapter(out, tmp_path / "imported", base=str(folder))
    for name in ("same", "halved", "imported"):
        again = opened(folder)
        assert restore_tokens(again, tmp_path / name) == (384, 385)
        load_adapter(again.model, tmp_path / name)
    plain = saved(attach(tiny_model("llama"), LoRA(rank=2)), tmp_path / "plain")
    export_adapter(plain, tmp_path / "same", to="peft", force=True)
    assert restore_tokens(opened(folder), tmp_path / "same") == ()


@pytest.mark.parametrize("num_rows", [384, 411])
@pytest.mark.parametrize("embeddings", ["none", "int8"])
def test_quantised_tables_take_no_new_tokens(folder, num_rows, embeddings):
    model = tiny_model("llama")
    model.resize_token_embeddings(num_rows, mean_resizing=False)
    model.save_pretrained(folder)
    base = load_base(str(folder), dtype="fp32", quantize="int8", quantize_embeddings=embeddings)
    if embeddings == "none":  # a GGUF file can have one without the other
        head = base.model.lm_head
        base.model.lm_head = QuantizedLinear(*pack(head.weight, "int8"))
    with pytest.raises(TargetError, match="cannot add tokens") as refused:
        add_tokens(base, NEW)
    assert "GGUF" in str(refused.value)


def test_tokens_that_are_no_new_ones_are_refused(folder):
    base = opened(folder)
    for wrong in (["<s>"], ["<new>", "<new>"], [""], []):
        with pytest.raises(DataError, match="as new tokens"):
            add_tokens(base, wrong)
    assert len(base.tokenizer) == base.model.config.vocab_size == 384
