"""Adapters from elsewhere are told apart by content; what cannot be used is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from peftkit.errors import AdapterError
from peftkit.formats.exchange import export_adapter, import_adapter, recognise
from peftkit.formats.folders import NOTES, START
from peftkit.formats.open_adapter import open_adapter
from peftkit.formats.peft.folder import AdapterFolder, save_adapter
from peftkit.formats.peft.load import PREFIX, load_adapter, plain_name
from peftkit.formats.peft.low_rank import read_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.inference.bank import open_bank
from peftkit.merging.merge import merge
from peftkit.merging.quantized import merge_quantized
from peftkit.methods.base import Method
from peftkit.methods.ia3 import IA3
from peftkit.methods.lora import LoRA
from peftkit.methods.own_parameters import LNTuning
from peftkit.methods.prefix import PrefixTuning
from peftkit.methods.prompt import PromptTuning
from peftkit.methods.vera import VeRA
from tests.helpers.adapters import base_folder, logits, model_with_adapter
from tests.helpers.folders import change_json

TWO = torch.ones(2, 2)
METHODS: dict[str, Method] = {
    "ia3": IA3(),
    "vera": VeRA(rank=4, targets=("q", "v")),
    "ln_tuning": LNTuning(),
    "prompt_tuning": PromptTuning(num_virtual_tokens=3),
    "prefix_tuning": PrefixTuning(num_virtual_tokens=3),
}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lora_unet_down_blocks_0.lora_down.weight", "kohya"),
        ("lora_te1_text_model_layers_0.alpha", "kohya"),
        ("unet.down_blocks.0.attn1.to_q.lora_A.weight", "Diffusers"),
        ("transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight", "Diffusers"),
        ("base_model.model.model.layers.0.q_proj.hada_w1_a", "LoHa"),
        ("base_model.model.model.layers.0.q_proj.lokr_w2_a", "LoKr"),
        ("model.layers.0.q_proj.lora_down.weight", "LyCORIS"),
        (
            "base_model.model.model.layers.0.mlp.experts.lora_A.weight",
            "layout of the adapter's stacked experts",
        ),
        (
            "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight",
            "columns were swapped",
        ),
        ("model.layers.0.self_attn.q_proj.weight", "no LoRA tensors"),
    ],
)
def test_other_kinds_are_refused_by_name(name, message, tmp_path):
    save_file({name: TWO}, tmp_path / "x.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match=message):
        recognise(tmp_path)


def test_two_adapters_in_a_folder_are_not_chosen_between(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x.lora_a": TWO}, tmp_path / name)
    with pytest.raises(AdapterError, match=r"several: a\.safetensors, b"):
        recognise(tmp_path)


def test_without_a_config_there_is_no_scale(tmp_path):
    save_file({"q.lora_A.weight": TWO}, tmp_path / "x.safetensors")
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        recognise(tmp_path / "x.safetensors")


def test_the_content_says_the_kind_and_not_the_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    file = tmp_path / "adapter_model.safetensors"
    save_file({"model.layers.0.self_attn.q_proj.lora_a": TWO}, file)
    assert recognise(file).kind == "mlx"
    file.write_bytes(b"GGUF\3\0\0\0" + bytes(64))
    assert recognise(tmp_path).kind == "gguf"


P = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        (f"{P}.lora_A.weight", f"{P}.lora_A.weight"),
        (f"{P}.lora_A.default.weight", f"{P}.lora_A.weight"),
        (f"{P}.lora_B.my-style.weight", f"{P}.lora_B.weight"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", f"{P}.lora_A.weight"),
        (f"{P}.lora_magnitude_vector", f"{P}.lora_magnitude_vector"),
        (f"{P}.lora_magnitude_vector.default.weight", f"{P}.lora_magnitude_vector"),
        (f"{P}.lora_magnitude_vector.weight", f"{P}.lora_magnitude_vector"),
        (f"_orig_mod.{P}.lora_A.weight", f"{P}.lora_A.weight"),
    ],
)
def test_names_are_put_as_peft_saves_them(name, plain):
    assert PREFIX + plain_name(name) == plain


@pytest.mark.parametrize("style", ["as it is", "named", "bare", "pissa"])
def test_peft_folders_of_all_styles_compute_the_same(style, tmp_path):
    model, adapter = model_with_adapter("llama", LoRA(rank=3, alpha=5, targets=("q", "down")))
    expected = logits(model)
    source = save_adapter(adapter, tmp_path / "one")
    adapter.detach()
    if style != "as it is":
        (source / "peftkit.json").unlink()
        file = source / "adapter_model.safetensors"
        tensors = load_file(file)
        if style == "named":
            tensors = {n.replace(".weight", ".mine.weight"): t for n, t in tensors.items()}
        if style == "bare":
            tensors = {n.removeprefix("base_model.model."): t for n, t in tensors.items()}
        save_file(tensors, file)
    if style == "pissa":
        change_json(source / "adapter_config.json", init_lora_weights="pissa")
        with torch.no_grad():
            placed = load_adapter(model, source)
            expected = logits(model)
            placed.detach()
        model.save_pretrained(tmp_path / "base")
        tokenizer_of(tmp_path / "base")
        base = str(tmp_path / "base")
    else:
        base = base_folder("llama", tmp_path / "base")
    import_adapter(source, tmp_path / "two", base=base)
    read_low_rank(tmp_path / "two")
    load_adapter(model, tmp_path / "two")
    # PiSSA's start is a float32 SVD, taken once more; logits are of order one
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)


def tokenizer_of(folder: Path) -> None:
    from tests.helpers.families import tiny_tokenizer

    tiny_tokenizer().save_pretrained(folder)


def test_the_same_tensor_of_two_adapters_is_refused(tmp_path):
    _, adapter = model_with_adapter("llama", LoRA(rank=2, targets=("q",)))
    source = save_adapter(adapter, tmp_path / "one")
    (source / "peftkit.json").unlink()
    file = source / "adapter_model.safetensors"
    tensors = load_file(file)
    named = {n.replace(".weight", ".other.weight"): t.clone() for n, t in tensors.items()}
    save_file(tensors | named, file)
    base = base_folder("llama", tmp_path / "base")
    with pytest.raises(AdapterError, match="one tensor of two adapters"):
        import_adapter(source, tmp_path / "two", base=base)
    assert not (tmp_path / "two").exists()


def test_a_module_trained_in_full_is_imported_with_its_adapter(tmp_path):
    method = LoRA(rank=2, targets=("q",), train_fully=("lm_head",))
    model, adapter = model_with_adapter("llama", method)
    expected = logits(model)
    source = save_adapter(adapter, tmp_path / "one")
    adapter.detach()
    assert not torch.equal(logits(model), expected)
    (source / "peftkit.json").unlink()
    import_adapter(source, tmp_path / "two", base=base_folder("llama", tmp_path / "base"))
    load_adapter(model, tmp_path / "two")
    assert torch.equal(logits(model), expected)


def test_what_an_adapter_began_with_is_imported_with_it(tmp_path):
    _, adapter = model_with_adapter("llama", LoRA(rank=2, targets=("q",)))
    (tmp_path / "one").mkdir()
    AdapterFolder(adapter, Provenance(), start=adapter.state()).save(tmp_path / "one")
    import_adapter(tmp_path / "one", tmp_path / "two", base=base_folder("llama", tmp_path / "base"))
    assert (tmp_path / "two" / START).read_bytes() == (tmp_path / "one" / START).read_bytes()
    assert START in json.loads((tmp_path / "two" / "peftkit.json").read_text())["sha256"]


@pytest.mark.parametrize("by_peft", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_folders_of_other_methods_are_equal(name, by_peft, tmp_path):
    model, adapter = model_with_adapter("llama", METHODS[name])
    expected = logits(model)
    source = save_adapter(adapter, tmp_path / "one")
    adapter.detach()
    if by_peft:
        (source / "peftkit.json").unlink()
    base = base_folder("llama", tmp_path / "base")
    assert import_adapter(source, tmp_path / "two", base=base).source == "peft"
    load_adapter(model, tmp_path / "two")
    assert torch.equal(logits(model), expected)


def test_a_method_of_peft_that_is_not_read_is_named(tmp_path):
    save_file({"base_model.model.q_proj.oft_R.weight": TWO}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "OFT"}))
    base = base_folder("llama", tmp_path / "base")
    with pytest.raises(AdapterError, match=r"type 'OFT'(.|\n)*PREFIX_TUNING"):
        import_adapter(tmp_path, tmp_path / "two", base=base)


OF_ANOTHER_MACHINE = ("/srv/models/Tiny", r"C:\Users\ann\models\Tiny")
COMMANDS = {
    "use": lambda adapter, out: open_adapter(adapter),
    "serve": lambda adapter, out: open_bank({"a": adapter}),
    "merge": lambda adapter, out: merge(adapter, out),
    "merge-4-bit": lambda adapter, out: merge_quantized(adapter, out, "int4_32"),
    "merge-gguf": lambda adapter, out: merge(adapter, out / "m.gguf"),
    "export": lambda adapter, out: export_adapter(adapter, out / "m.gguf", to="gguf"),
    "import": lambda adapter, out: import_adapter(adapter, out),
}


@pytest.mark.parametrize("base", OF_ANOTHER_MACHINE)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_base_of_another_machine_is_refused_with_the_option_that_helps(command, base, tmp_path):
    _, adapter = model_with_adapter("llama", LoRA(rank=2))
    folder = save_adapter(adapter, tmp_path / "adapter", Provenance(base=base))
    for _ in range(2):  # with peftkit's notes, and without
        with pytest.raises(AdapterError) as refused:
            COMMANDS[command](folder, tmp_path / "out")
        for part in (str(folder), repr(base)[1:-1], "--base MODEL"):
            assert part in str(refused.value)
        (folder / NOTES).unlink(missing_ok=True)
