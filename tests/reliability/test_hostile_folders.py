"""Adapter folders that lie, and folders that try to be run: refused by every command, unopened."""

import contextlib
import json
import pickle
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.config.schema import from_dict
from peftkit.data.style import Style
from peftkit.errors import AdapterError
from peftkit.formats.folders import START
from peftkit.formats.open_adapter import open_adapter, read_side_adapter
from peftkit.formats.peft.folder import AdapterFolder, save_adapter
from peftkit.formats.peft.load import load_adapter, read_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.lora import LoRA
from peftkit.tasks.table import TASKS
from tests.helpers.command_line import Run
from tests.helpers.folders import change_json

CONFIG, NOTES, TENSORS = "adapter_config.json", "peftkit.json", "adapter_model.safetensors"
SECONDS = 2.0
"""For reading a folder that is refused, the machine being busy."""

COMMANDS: dict[str, list[str]] = {
    "generate": ["generate", "{adapter}", "--prompt", "a", "--max-new-tokens", "1"],
    "merge": ["merge", "{adapter}", "--out", "{out}"],
    "export peft": ["export", "{adapter}", "--to", "peft", "--out", "{out}"],
    "export serving": [
        *("export", "{adapter}", "--to", "peft", "--profile", "serving", "--out", "{out}")
    ],
    "export gguf": ["export", "{adapter}", "--to", "gguf", "--out", "{out}"],
    "export mlx": ["export", "{adapter}", "--to", "mlx", "--out", "{out}"],
    "combine": ["combine", "{adapter}=1", "{adapter}=1", "--out", "{out}"],
    "inspect": ["inspect", "{adapter}"],
}


ALL_COMMANDS: dict[str, list[str]] = {
    **COMMANDS,
    "eval": ["eval", "{adapter}", "--data", "{data}"],
    "train": [
        *("train", "{recipe}", "--set", "method={{type: lora, start_from: {adapter}}}"),
        *("--set", "train.max_steps=1", "--out", "{trained}"),
    ],
    "chat": ["chat", "{adapter}"],
    "predict": ["predict", "{adapter}", "--text", "a"],
    "serve": ["serve", "a={adapter}", "--port", "0"],
    "push": ["push", "{adapter}", "me/adapter"],
    "import": ["import", "{adapter}", "--base", "{base}", "--out", "{out}"],
}
ENDING = [*COMMANDS, "eval", "train"]
"""Commands that take any causal adapter, ask nothing, and end."""


@pytest.fixture(params=ALL_COMMANDS)
def command(
    request: pytest.FixtureRequest,
    saved: Path,
    tmp_path: Path,
    peftkit: Run,
    recipe_file: Path,
    model_folder: Path,
) -> Any:
    """Each command that takes an adapter, ready to run on the saved one."""
    places = {
        "adapter": saved,
        "out": tmp_path / "out",
        "trained": tmp_path / "trained",
        "data": tmp_path / "train.jsonl",
        "recipe": recipe_file,
        "base": model_folder,
    }
    return lambda: peftkit(*(part.format(**places) for part in ALL_COMMANDS[request.param]))


@pytest.mark.parametrize("command", ENDING, indirect=True)
def test_every_command_takes_the_sound_folder(command):
    done = command()
    assert done.code == 0, done.err


@pytest.mark.parametrize("file", [CONFIG, NOTES])
def test_tampered_scaling_is_refused(file, command, saved, tmp_path):
    if file == CONFIG:
        change_json(saved / CONFIG, lora_alpha=400)
    else:
        notes = json.loads((saved / NOTES).read_text())
        change_json(saved / NOTES, method=notes["method"] | {"alpha": 400})
    refused(command(), tmp_path, "was changed after the adapter was saved")


@pytest.mark.parametrize("field", ["prompt_style", "loading", START])
def test_prompts_and_templates_are_hashed(field, saved_once, model_folder, tmp_path):
    base = load_base(str(model_folder), dtype="fp32")
    adapter = load_adapter(base.model, saved_once)
    loading = {"dtype": "fp32", "quantize": "none"}
    style = Style("chat", "{{ messages[0].content }}")
    origin = Provenance(base.name, fingerprint=base.fingerprint, loading=loading)
    folder = tmp_path / "whole"
    folder.mkdir()
    AdapterFolder(adapter, replace(origin, prompt_style=style), start=adapter.state()).save(folder)
    read_adapter(folder)
    notes = json.loads((folder / NOTES).read_text())
    if field == START:
        data = bytearray((folder / START).read_bytes())
        data[-3] ^= 1
        (folder / START).write_bytes(data)
    elif field == "loading":
        change_json(folder / NOTES, base=notes["base"] | {"loading": loading | {"dtype": "bf16"}})
    else:
        change_json(folder / NOTES, prompt_style=notes["prompt_style"] | {"chat_template": "x"})
    with pytest.raises(AdapterError, match="sha256"):
        read_adapter(folder)


@pytest.mark.parametrize("task", ["causal_lm", "reward"])
def test_a_foreign_judge_is_refused(task, model_folder, tmp_path):
    kind = from_dict(TASKS[task], {"type": task}, "test")
    place = shutil.copytree(model_folder, tmp_path / "base")

    def adapter_over_base() -> Path:
        base = load_base(str(place), dtype="fp32", purpose=kind.purpose)
        method = LoRA(rank=2, targets=("q",), train_fully=base.head)
        origin = Provenance(
            *(base.name, base.hub_id, base.revision, base.fingerprint, base.trunk),
            task_type=kind.task_type,
            task=kind.saved(),
        )
        return save_adapter(attach(base.model, method), tmp_path / "adapter", origin)

    folder = adapter_over_base()
    read_side_adapter(folder, load_base(str(place), dtype="fp32"))
    weights = load_file(place / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] += 0.01
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(AdapterError, match="was trained on another base"):
        read_side_adapter(folder, load_base(str(place), dtype="fp32"))


def test_nan_is_refused_by_every_command(command, saved, tmp_path):
    tensors = load_file(saved / TENSORS)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, saved / TENSORS)
    (saved / NOTES).unlink()  # whose hash would be the first to say so
    done = command()
    if "kind " in done.out:  # inspect looks at anything, and says what it sees
        assert "tensors hold NaN or Infinity" in done.err
        return
    refused(done, tmp_path, "NaN")


def test_a_flipped_bit_is_always_refused(command, saved, tmp_path):
    data = bytearray((saved / TENSORS).read_bytes())
    data[-3] ^= 1
    (saved / TENSORS).write_bytes(data)
    refused(command(), tmp_path, "sha256")


def refused(done: Any, tmp_path: Path, word: str) -> None:
    assert done.code == 2, (done.out, done.err)
    assert word in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that leaves a file behind when it is imported; the file must never appear."""
    ran = tmp_path / "ran"
    (tmp_path / "canary_module.py").write_text(f"open({str(ran)!r}, 'w')\nclass Model: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield ran
    assert not ran.exists()
    assert "canary_module" not in sys.modules


IMPORTS: tuple[dict[str, Any], ...] = (
    {"auto_mapping": {"base_model_class": "Model", "parent_library": "canary_module"}},
    {"megatron_core": "canary_module", "megatron_config": {"a": 1}},
    {"tokenizer_kwargs": {"trust_remote_code": True}, "tokenizer_name_or_path": "canary_module"},
    {"auto_map": {"AutoModel": "canary_module.Model"}, "custom_modules": "canary_module"},
    {"loftq_config": {"__class__": "canary_module.Model"}},
    {"peft_type": "canary_module.Model"},
    {"task_type": "canary_module.Model"},
)


@pytest.mark.parametrize("fields", IMPORTS, ids=lambda fields: next(iter(fields)))
@pytest.mark.parametrize("with_notes", [True, False])
def test_a_config_never_causes_an_import(fields, with_notes, saved, canary):
    change_json(saved / CONFIG, **fields)
    if not with_notes:
        (saved / NOTES).unlink()
    with contextlib.suppress(AdapterError):  # ignored or refused, both are well
        open_adapter(saved)


class Bomb:
    """Imports the canary when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (__import__, ("canary_module",))


@pytest.mark.parametrize("name", ["adapter_model.bin", TENSORS, CONFIG, NOTES])
def test_no_pickle_is_ever_loaded(name, saved, canary, peftkit):
    if name == "adapter_model.bin":
        (saved / TENSORS).unlink()
    (saved / name).write_bytes(pickle.dumps({"w": torch.ones(2), "x": Bomb()}))
    with pytest.raises(AdapterError):
        open_adapter(saved)
    done = peftkit("inspect", saved)
    assert (done.code, done.out) == (2, "")


@pytest.mark.parametrize("with_notes", [True, False])
@pytest.mark.parametrize(
    "rank", [-1, 0, 10**9, 2**70, True, "8", 1.5, None, [2], {"q": 2}], ids=str
)
def test_a_bad_rank_is_refused_in_bounded_time(rank, with_notes, saved):
    change_json(saved / CONFIG, r=rank)
    if not with_notes:
        (saved / NOTES).unlink()
    began = time.perf_counter()
    with pytest.raises(AdapterError):
        open_adapter(saved)
    assert time.perf_counter() - began < SECONDS


TEXTS: dict[str, bytes] = {
    "deep": b'{"r":' * 50_000 + b"1" + b"}" * 50_000,
    "the same key twice": b'{"peft_type": "LORA", "r": 2, "r": 4}',
    "NaN": b'{"peft_type": "LORA", "r": 2, "lora_alpha": NaN}',
    "Infinity": b'{"peft_type": "LORA", "r": 2, "lora_alpha": Infinity}',
    "out of range": b'{"peft_type": "LORA", "r": 2, "lora_alpha": 1e999}',
    "many digits": b'{"peft_type": "LORA", "r": ' + b"9" * 100_000 + b"}",
    "a list": b"[1, 2]",
    "empty": b"",
    "a web page": b"<!DOCTYPE html><html>404</html>",
}


@pytest.mark.parametrize("name", [CONFIG, NOTES])
@pytest.mark.parametrize("text", [*TEXTS, "100 MB"])
def test_a_bad_config_is_refused_in_bounded_time(text, name, saved):
    with open(saved / name, "wb") as file:
        file.write(TEXTS.get(text, b'{"r": 2}'))
        if text == "100 MB":
            file.truncate(100 << 20)
    began = time.perf_counter()
    with pytest.raises(AdapterError):
        open_adapter(saved)
    assert time.perf_counter() - began < SECONDS


def test_no_name_in_a_folder_leads_out_of_it(saved, tmp_path, peftkit):
    """A weight map, a hash table and a target may hold any path: only fixed names are opened."""
    notes = json.loads((saved / NOTES).read_text())
    outside = {"../victim": "0" * 64, "/etc/passwd": "0" * 64}
    change_json(saved / NOTES, sha256=notes["sha256"] | outside)
    (tmp_path / "victim").write_text("as it was")
    out = tmp_path / "out"
    assert peftkit("export", saved, "--to", "mlx", "--out", out).code == 0
    assert (tmp_path / "victim").read_text() == "as it was"
    change_json(saved / CONFIG, target_modules=["../../victim"])
    with pytest.raises(AdapterError):
        open_adapter(saved)


def test_tensor_hashes_detect_another_base(saved, tmp_path, model_folder):
    (saved / NOTES).unlink()
    open_adapter(saved)
    other = tmp_path / "other"
    shutil.copytree(model_folder, other)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] += 0.01
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(AdapterError, match="trained on another base"):
        open_adapter(saved, str(other))
    open_adapter(saved, str(other), force=True)
