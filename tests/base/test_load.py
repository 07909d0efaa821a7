"""The base: found where it was said to be, loaded whole, and the same whatever it is loaded as."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from peftkit.base import build
from peftkit.base.load import load_base
from peftkit.base.skeleton import skeleton
from peftkit.errors import BaseError
from peftkit.events import Event, Notice, Progress, Stage
from tests.helpers.adapters import logits
from tests.helpers.families import ARCHITECTURES, tiny_tokenizer
from tests.helpers.folders import change_json, change_tensors


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    """A copy of the tiny model's folder that a test may spoil."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def edit_config(folder: Path, **changes: Any) -> None:
    change_json(folder / "config.json", **changes)


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    change_tensors(folder / "model.safetensors", change)


# ------------------------------------------------------------------- loading


def test_folder_loads_frozen_in_eval_mode_and_unchanged(model_folder, capfd):
    seen: list[Event] = []
    base = load_base(str(model_folder), dtype="fp32", on_event=seen.append)
    plain = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    capfd.readouterr()
    assert torch.equal(logits(base.model), logits(plain))
    assert not base.model.training
    assert not any(p.requires_grad for p in base.model.parameters())
    assert base.device == torch.device("cpu")
    assert base.audit.quantized_as == "none"
    table = base.audit.table()
    assert "parameters, float32, 32.00 bits each" in table.summary
    assert "not quantised because" not in table.columns  # nobody asked
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert base.tokenizer.pad_token == "<pad>"
    assert seen[0] == Stage(f"Loading the base {model_folder}")
    loaded = [event.done for event in seen[1:] if isinstance(event, Progress)]
    size = sum(p.nbytes for p in base.model.parameters())
    assert loaded == sorted(loaded)
    assert loaded[-1] == size
    assert len(loaded) == len(seen) - 1


@pytest.mark.parametrize(
    ("name", "dtype", "quantize"),
    [
        ("bf16", torch.bfloat16, "nf4"),
        ("fp16", torch.float16, "int8"),
        ("fp32", torch.float32, "none"),
    ],
)
def test_everything_computes_in_the_dtype_asked_for(model_folder, name, dtype, quantize):
    base = load_base(str(model_folder), dtype=name, quantize=quantize)
    plain = [p for n, p in base.model.named_parameters() if ".pack" not in n]
    assert {p.dtype for p in plain} == {dtype}
    assert base.model.config.dtype == dtype
    assert logits(base.model).dtype == dtype
    # computed in float32 by the models, whatever they are loaded in
    assert {b.dtype for b in base.model.buffers()} == {torch.float32}


def test_what_a_model_keeps_in_float32_stays_so_in_fp16():
    model = ARCHITECTURES["t5"]()
    build.cast(model, torch.float16)
    kept = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {n for n, _ in model.named_parameters() if ".wo." in n}
    build.cast(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_quantised_base_says_so_and_keeps_its_copies(model_folder):
    seen: list[Event] = []
    base = load_base(str(model_folder), quantize="nf4", dtype="fp32", on_event=seen.append)
    assert base.audit.quantized_as == "nf4"
    assert base.audit.copy_bytes == 4 * sum(
        row.num_parameters for row in base.audit.rows if row.is_quantized
    )
    assert [e for e in seen if isinstance(e, Progress)][-1].unit == "B"
    single = load_base(str(model_folder), quantize="nf4", double_quant=False, dtype="fp32")
    assert single.audit.num_bytes > base.audit.num_bytes - 14 * 1024  # each layer has a 1 kB code
    assert not torch.equal(logits(single.model), logits(base.model))


# ------------------------------------------------------------------- the fingerprint


def test_fingerprint_is_the_same_in_every_precision_and_form(model_folder):
    forms = [
        {"dtype": dtype, "quantize": quantize}
        for dtype in ("fp32", "bf16", "fp16")
        for quantize in ("none", "nf4")
    ]
    found = {load_base(str(model_folder), **form).fingerprint for form in forms}
    assert len(found) == 1
    assert found.pop().startswith("sha256:")


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ({"rms_norm_eps": 1e-3}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, True),
        ({"hidden_act": "gelu"}, True),
        ({"transformers_version": "5.0.0", "use_cache": False, "dtype": "bfloat16"}, False),
        ({"eos_token_id": 3, "architectures": ["Other"]}, False),
    ],
    ids=str,
)
def test_fingerprint_tells_another_computation_and_nothing_else(folder, change, differs):
    before = load_base(str(folder)).fingerprint
    edit_config(folder, **change)
    assert (load_base(str(folder)).fingerprint != before) == differs


# ------------------------------------------------------------------- bad input


def remove_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4000])


def remove_tokenizer(folder: Path) -> None:
    for path in (*folder.glob("token*"), *folder.glob("*.jinja")):
        path.unlink()


def save_tokenizer_without(*tokens: str) -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        tokenizer = tiny_tokenizer()
        for token in tokens:
            setattr(tokenizer, token, None)
        tokenizer.save_pretrained(folder)

    return save


def as_code(folder: Path) -> None:
    edit_config(folder, model_type="mine", auto_map={"AutoConfig": "code.MyConfig"})
    (folder / "code.py").write_text("raise SystemExit('this must never run')")


SPOILT: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "missing weight": (
        remove_tensor,
        ("not a complete Llama", "missing: model.layers.1.mlp.up_proj"),
    ),
    "other shapes": (
        lambda f: edit_config(f, intermediate_size=48),
        ("misshapen: model.layers.0.mlp.down_proj.weight is (32, 64), not (32, 48)", "and 1 more"),
    ),
    "deeper config": (lambda f: edit_config(f, num_hidden_layers=3), ("and 4 more", "random")),
    "cut short": (truncate, ("cannot load", "header")),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ("no safetensors file",)),
    "pickles": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        ("pytorch_model.bin: pickles, which can run code",),
    ),
    "no config": (lambda f: (f / "config.json").unlink(), ("no config.json",)),
    "broken config": (lambda f: (f / "config.json").write_text("{"), ("not a valid JSON",)),
    "mistyped config": (lambda f: edit_config(f, hidden_size="x"), ("hidden_size", "expected int")),
    "unknown architecture": (lambda f: edit_config(f, model_type="zzz"), ("zzz",)),
    "another kind of model": (
        lambda f: ARCHITECTURES["t5"]().save_pretrained(f),
        ("not a causal_lm model", "model_type is t5"),
    ),
    "code": (as_code, ("remote code (trust_remote_code), which peftkit does not run",)),
    "an adapter": (lambda f: (f / "adapter_config.json").touch(), ("It is an adapter",)),
    "no tokenizer": (
        remove_tokenizer,
        ("the tokenizer of", "no readable", "Copy tokenizer.json"),
    ),
    "endless tokenizer": (
        save_tokenizer_without("pad_token", "eos_token"),
        ("no eos_token and no pad_token",),
    ),
}


def test_progress_counts_a_tied_weight_once(folder):
    edit_config(folder, tie_word_embeddings=True)
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    seen: list[Event] = []
    base = load_base(str(folder), on_event=seen.append)
    total = sum(p.nbytes for p in base.model.parameters())
    assert {event.total for event in seen if isinstance(event, Progress)} == {total}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_folder_is_one_error_that_says_what_is_wrong(name, folder):
    spoil, words = SPOILT[name]
    spoil(folder)
    with pytest.raises(BaseError) as error:
        load_base(str(folder))
    assert str(folder) in str(error.value)
    for word in words:
        assert word in str(error.value)
    assert error.value.exit_code == 2


def test_unused_weights_are_told(folder):
    edit_tensors(folder, lambda tensors: tensors.update(extra=torch.zeros(3)))
    seen: list[Event] = []
    load_base(str(folder), on_event=seen.append)
    notices = [event.text for event in seen if isinstance(event, Notice)]
    assert notices == ["LlamaForCausalLM does not use these weights of its files: extra"]


def test_missing_pad_token_is_the_end_of_sequence_and_told(folder):
    save_tokenizer_without("pad_token")(folder)
    seen: list[Event] = []
    base = load_base(str(folder), on_event=seen.append)
    assert base.tokenizer.pad_token == base.tokenizer.eos_token == "<|im_end|>"
    assert any("no pad token; <|im_end|>" in e.text for e in seen if isinstance(e, Notice))


def test_model_that_is_nowhere_is_told_with_what_is_near(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    for asked, words in {
        "./modle": "Did you mean 'model'",
        str(folder.parent / "modle"): f"Did you mean '{folder}'",
        "smollm-135m": "Did you mean 'smollm2-135m'",
        "someone/model": "hub cannot be reached",
        "x.gguf": "No such file",
        "": "No such file",
        "a/b/c": "No such file",
        "what is this": "No such file",
    }.items():
        with pytest.raises(BaseError) as error:
            load_base(asked)
        assert words in str(error.value), asked
        assert asked in str(error.value)


# ------------------------------------------------------------------- without weights


def test_skeleton_has_every_module_and_no_memory(model_folder):
    bare, base = skeleton(str(model_folder)), load_base(str(model_folder))
    assert {p.device.type for p in bare.parameters()} == {"meta"}
    shapes = {name: p.shape for name, p in base.model.named_parameters()}
    assert {name: p.shape for name, p in bare.named_parameters()} == shapes
