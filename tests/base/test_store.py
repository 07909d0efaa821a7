"""A base that was packed once: opened as it was, or known to be of no use and packed anew."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from peftkit.base import store
from peftkit.base.build import build
from peftkit.base.form import Form
from peftkit.base.load import Base, load_base
from peftkit.base.pack import pack_base
from peftkit.base.purpose import CAUSAL_LM, Purpose
from peftkit.errors import BaseError, PeftkitError, RunError
from peftkit.events import Event, Notice
from peftkit.files import disk
from peftkit.quant.audit import audit
from peftkit_cli.app import run
from tests.base.test_stream import purpose_of, state_of
from tests.families import ARCHITECTURES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEFTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


def opened(folder: Path, **more: Any) -> tuple[Base, list[str]]:
    seen: list[Event] = []
    base = load_base(str(folder), quantize="nf4", on_event=seen.append, **more)
    return base, [event.text for event in seen if isinstance(event, Notice)]


def ids() -> torch.Tensor:
    return torch.arange(24).remainder(23).view(2, 12) + 3


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gpt_oss", "t5", "phi3"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_opened_base_is_the_packed_one_to_the_bit(family, kind, tmp_path) -> None:
    ARCHITECTURES[family]().save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    purpose: Purpose | None = purpose_of(config)
    assert purpose is not None
    form = Form(kind, True, torch.bfloat16, CPU, False)
    where = store.Location(str(tmp_path), str(tmp_path))
    wanted = store.Wanted(family, tmp_path, purpose, config, form)
    built = build(where, None, purpose, config, form)
    store.keep(tmp_path / "kept", built, wanted)
    again = store.open_stored(tmp_path / "kept", wanted)
    assert again.fingerprint == built.fingerprint
    found, known = state_of(again.model), state_of(built.model)
    assert found.keys() == known.keys()
    for name, tensor in known.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert audit(again.model) == audit(built.model)
    inputs = {"input_ids": ids()} | ({"decoder_input_ids": ids()} if family == "t5" else {})
    with torch.no_grad():
        assert torch.equal(again.model(**inputs).logits, built.model(**inputs).logits)


def test_large_base_is_kept_and_a_small_one_only_when_asked(folder, cache, monkeypatch) -> None:
    first, _ = opened(folder)
    assert not cache.exists()
    monkeypatch.setattr(store, "WORTH_KEEPING", 0)
    _, told = opened(folder)
    assert "is kept in" in told[0]
    assert len(store.stored_bases()) == 1

    def never(*args: object, **more: object) -> None:
        raise AssertionError("it is opened, not packed")

    monkeypatch.setattr("peftkit.base.load.build", never)
    second, told = opened(folder)
    assert told == []
    assert second.fingerprint == first.fingerprint
    assert second.audit.quantized_as == "nf4"
    with pytest.raises(AssertionError):
        opened(folder, store="off")


def test_opened_base_trains_like_any_other(folder) -> None:
    from peftkit import LoRA, attach

    pack_base(str(folder))
    base, _ = opened(folder)
    adapter = attach(base.model, LoRA(rank=2))
    base.model(input_ids=ids()).logits.sum().backward()
    assert all(p.grad is not None for p in adapter.parameters())


def change_base(folder: Path, kept: Path) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.norm.weight"].mul_(2)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(1, 1))


def turn_a_bit(folder: Path, kept: Path) -> None:
    data = bytearray((kept / store.WEIGHTS).read_bytes())
    data[-100] ^= 1
    (kept / store.WEIGHTS).write_bytes(data)


def cut_short(folder: Path, kept: Path) -> None:
    path = kept / store.WEIGHTS
    path.write_bytes(path.read_bytes()[:-10])


def of_another_version(folder: Path, kept: Path) -> None:
    path = kept / store.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 0}))


def broken_manifest(folder: Path, kept: Path) -> None:
    (kept / store.MANIFEST).write_text("{")


def without_weights(folder: Path, kept: Path) -> None:
    (kept / store.WEIGHTS).unlink()


@pytest.mark.parametrize(
    "spoil",
    [change_base, turn_a_bit, cut_short, of_another_version, broken_manifest, without_weights],
)
def test_store_of_no_use_is_told_and_not_used(spoil, folder) -> None:
    kept = pack_base(str(folder))
    spoil(folder, kept)
    plain = load_base(str(folder), quantize="nf4", store="off")
    base, told = opened(folder)
    assert "packed anew" in told[0]
    assert kept.name in told[0] or str(kept) in told[0]
    assert base.fingerprint == plain.fingerprint
    with torch.no_grad():
        assert torch.equal(base.model(input_ids=ids()).logits, plain.model(input_ids=ids()).logits)


def test_full_disk_leaves_nothing(folder, cache, monkeypatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 10)
    with pytest.raises(RunError):
        pack_base(str(folder))
    assert list((cache / "packed").iterdir()) == []
    monkeypatch.setattr(store, "WORTH_KEEPING", 0)
    base, told = opened(folder)  # a run goes on without
    assert "is not kept" in told[0]
    assert base.audit.quantized_as == "nf4"


def test_what_cannot_be_kept_packed_is_refused(folder) -> None:
    with pytest.raises(BaseError):
        pack_base(str(folder), quantize="none")
    with pytest.raises(PeftkitError):
        pack_base(str(folder), quantize="nf8")


def test_commands_pack_list_and_remove(folder, capsys) -> None:
    assert run(["base", "pack", str(folder), "--quantize", "int8"]) == 0
    kept = Path(capsys.readouterr().out.strip())
    assert run(["base", "ls", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert (listed["name"], listed["model"]) == (kept.name, str(folder))
    assert (listed["quantize"], listed["problem"]) == ("int8", "")
    assert listed["num_bytes"] > (kept / store.WEIGHTS).stat().st_size
    of_another_version(folder, kept)
    assert run(["base", "ls", "--json"]) == 0
    assert "version 0" in json.loads(capsys.readouterr().out)[0]["problem"]
    assert run(["base", "rm", "nothing"]) == 2
    assert kept.name in capsys.readouterr().err
    assert run(["base", "rm", kept.name]) == 0
    assert not kept.exists()


def test_causal_lm_is_what_a_base_is_packed_for(folder) -> None:
    kept = pack_base(str(folder))
    form = json.loads((kept / store.MANIFEST).read_text())["form"]
    assert form["quantize"] == "nf4"
    other = store.folder_of(folder, Form("nf4", False, torch.bfloat16, CPU, False), CAUSAL_LM)
    assert other != kept
