"""A model folder's weights are written again tensor by tensor, what is not changed bit for bit."""

import json
from pathlib import Path
from weakref import ReferenceType, ref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from peftkit.errors import BaseError, RunError
from peftkit.merging.over_files import INDEX, Shards, find_shards, write_over_files
from tests.helpers.folders import tensors_in

CHANGED = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(params=["one file", "shards"])
def folder(request: pytest.FixtureRequest, llama: PreTrainedModel, tmp_path: Path) -> Path:
    """A tiny Llama in bfloat16 as transformers saves it."""
    size = "50GB" if request.param == "one file" else "20KB"
    llama.to(torch.bfloat16).save_pretrained(tmp_path / "base", max_shard_size=size)
    return tmp_path / "base"


def shards_of(folder: Path) -> Shards:
    shards = find_shards(folder)
    assert shards is not None
    return shards


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_what_is_not_changed_is_copied_bit_for_bit(folder, out):
    write_over_files(shards_of(folder), out, {CHANGED: lambda weight: weight.float() + 1})
    before, after = tensors_in(folder), tensors_in(out)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        expected = (tensor.float() + 1).bfloat16() if name == CHANGED else tensor
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name], expected), name
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in folder.iterdir())
    AutoModelForCausalLM.from_pretrained(out)


def test_files_are_the_same_to_the_byte_when_nothing_changes(folder, out):
    write_over_files(shards_of(folder), out, {})
    for path in folder.glob("*.safetensors"):
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_a_requested_dtype_applies_to_weights_and_config(folder, out):
    write_over_files(shards_of(folder), out, {}, dtype=torch.float16)
    for name, tensor in tensors_in(out).items():
        assert tensor.dtype == torch.float16
        assert torch.equal(tensor, tensors_in(folder)[name].to(torch.float16))
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float16
    if (out / INDEX).exists():
        total = sum(t.numel() * t.element_size() for t in tensors_in(out).values())
        assert json.loads((out / INDEX).read_text())["metadata"]["total_size"] == total


def test_integers_and_unknown_dtypes_are_copied(tmp_path, out):
    tensors = {
        "blocks": torch.arange(64, dtype=torch.uint8),
        "scales": torch.ones(4).to(torch.float8_e4m3fn),
        "ids": torch.arange(3),
        "norm": torch.ones(3, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    write_over_files(shards_of(tmp_path), out, {}, dtype=torch.bfloat16)
    after = load_file(out / "model.safetensors")
    assert after.pop("norm").dtype == torch.bfloat16
    assert all(torch.equal(after[n].view(torch.uint8), tensors[n].view(torch.uint8)) for n in after)


def test_what_is_not_finite_in_its_dtype_is_refused(tmp_path, out):
    save_file({"a": torch.tensor([1e6])}, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match="too large for this dtype"):
        write_over_files(shards_of(tmp_path), out, {}, dtype=torch.float16)
    with pytest.raises(RunError, match="cannot write a"):
        write_over_files(shards_of(tmp_path), out, {"a": lambda weight: weight / 0})
    assert not list(out.iterdir())


def test_weights_other_licences_and_notes_stay_behind(tmp_path, out):
    base = tmp_path / "base"
    (base / "onnx").mkdir(parents=True)
    copied = ("tokenizer.json", "chat_template.jinja", "vocab.txt", "LICENSE")
    left = ("pytorch_model.bin", "tf_model.h5", "README.md", "x.gguf", ".gitattributes")
    for name in (*copied, *left):
        (base / name).write_text(f"{name} of the base")
    (tmp_path / "blob").write_text("{}")
    (base / "config.json").symlink_to("../blob")  # as in the hub's cache
    save_file({"a": torch.ones(2)}, base / "model.safetensors")
    write_over_files(shards_of(base), out, {})
    names = [*copied, "config.json", "model.safetensors"]
    assert sorted(p.name for p in out.iterdir()) == sorted(names)
    assert all((out / n).read_text() == f"{n} of the base" for n in copied)
    assert not (out / "config.json").is_symlink()
    assert (out / "config.json").read_text() == "{}"


def test_a_folder_without_safetensors_has_no_shards(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert find_shards(tmp_path) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("weight_map"), "no weight_map"),
        (lambda index: index["weight_map"].update(a="../../etc/passwd"), "names the file '../../"),
        (lambda index: index["weight_map"].update(a=3), "names the file 3"),
        (lambda index: index["weight_map"].update(a="gone.safetensors"), "no such file"),
        (lambda index: index["weight_map"].update({CHANGED: "other.safetensors"}), "no such file"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path, change, message):
    save_file({CHANGED: torch.ones(2)}, tmp_path / "one.safetensors")
    index = {"metadata": {}, "weight_map": {CHANGED: "one.safetensors"}}
    change(index)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(BaseError, match=message):
        find_shards(tmp_path)


def test_a_shard_cut_short_is_refused(tmp_path):
    save_file({CHANGED: torch.ones(2)}, tmp_path / "model.safetensors")
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(BaseError, match="not fully covered"):
        find_shards(tmp_path)


def test_a_tensor_or_two_are_in_memory_whatever_the_model(tmp_path, out):
    names = [f"t{number}" for number in range(9)]
    save_file({name: torch.ones(8) for name in names}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    seen: list[ReferenceType[Tensor]] = []
    alive: list[int] = []

    def change(weight: Tensor) -> Tensor:
        seen.append(ref(weight))
        alive.append(sum(one() is not None for one in seen))
        return -weight

    write_over_files(shards_of(tmp_path), out, dict.fromkeys(names, change))
    assert len(alive) == len(names)
    assert max(alive) <= 2
    assert all((tensor == -1).all() for tensor in load_file(out / "model.safetensors").values())
