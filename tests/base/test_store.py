"""A base that was packed once: opened as it was, or known to be of no use and packed anew."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from peftkit.base import store
from peftkit.base.build import build
from peftkit.base.heads import ClassHead
from peftkit.base.load import Base, load_base
from peftkit.base.locate import Location
from peftkit.base.purpose import Purpose
from peftkit.base.request import request_of
from peftkit.base.stored import pack_base, stored_bases
from peftkit.config.schema import from_dict
from peftkit.errors import RunError
from peftkit.events import Event, Notice
from peftkit.files import disk
from peftkit.quant.audit import audit
from peftkit.settings import BaseConfig
from peftkit_cli.app import run
from tests.helpers.bases import assert_same_state, purpose_of
from tests.helpers.families import ARCHITECTURES
from tests.helpers.folders import change_json, change_tensors

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


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "nf4"), ("gpt2", "int8"), ("gpt_oss", "nf4"), ("t5", "int8")]
)
def test_opened_base_is_the_packed_one_to_the_bit(family, kind, tmp_path):
    ARCHITECTURES[family]().save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    purpose: Purpose | None = purpose_of(config)
    assert purpose is not None
    settings = from_dict(BaseConfig, {"model": "x", "quantize": kind, "dtype": "bf16"}, "test")
    request = request_of(settings, purpose, Location(str(tmp_path), str(tmp_path)), CPU)
    built = build(request)
    store.keep(tmp_path / "kept", built, request)
    again = store.open_stored(tmp_path / "kept", request)
    assert again.fingerprint == built.fingerprint
    assert_same_state(again.model, built.model)
    assert audit(again.model) == audit(built.model)
    inputs = {"input_ids": ids()} | ({"decoder_input_ids": ids()} if family == "t5" else {})
    with torch.no_grad():
        assert torch.equal(again.model(**inputs).logits, built.model(**inputs).logits)


def test_large_base_is_kept_and_a_small_one_only_when_asked(folder, cache, monkeypatch):
    first, _ = opened(folder)
    assert not cache.exists()
    monkeypatch.setattr(store, "MIN_STORED_BYTES", 0)
    _, told = opened(folder)
    assert "is stored in" in told[0]
    assert len(stored_bases()) == 1

    def never(*args: object, **more: object) -> None:
        raise AssertionError("it is opened, not packed")

    monkeypatch.setattr("peftkit.base.store.build", never)
    second, told = opened(folder)
    assert told == []
    assert second.fingerprint == first.fingerprint
    assert second.audit.quantized_as == "nf4"
    with pytest.raises(AssertionError):
        opened(folder, store="off")


def change_base(folder: Path, kept: Path) -> None:
    path = folder / "model.safetensors"
    change_tensors(path, lambda tensors: tensors["model.norm.weight"].mul_(2))
    os.utime(path, ns=(1, 1))


def turn_a_bit(folder: Path, kept: Path) -> None:
    data = bytearray((kept / store.WEIGHTS).read_bytes())
    data[-100] ^= 1
    (kept / store.WEIGHTS).write_bytes(data)


def of_another_version(folder: Path, kept: Path) -> None:
    change_json(kept / store.MANIFEST, version=0)


def broken_manifest(folder: Path, kept: Path) -> None:
    (kept / store.MANIFEST).write_text("{")


@pytest.mark.parametrize("spoil", [change_base, turn_a_bit, of_another_version, broken_manifest])
def test_store_of_no_use_is_told_and_not_used(spoil, folder):
    kept = pack_base(str(folder))
    spoil(folder, kept)
    plain = load_base(str(folder), quantize="nf4", store="off")
    base, told = opened(folder)
    assert "packed again" in told[0]
    assert kept.name in told[0] or str(kept) in told[0]
    assert base.fingerprint == plain.fingerprint
    with torch.no_grad():
        assert torch.equal(base.model(input_ids=ids()).logits, plain.model(input_ids=ids()).logits)


def test_full_disk_leaves_nothing(folder, cache, monkeypatch):
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 10)
    with pytest.raises(RunError):
        pack_base(str(folder))
    assert stored_bases() == []
    monkeypatch.setattr(store, "MIN_STORED_BYTES", 0)
    base, told = opened(folder)  # a run goes on without
    assert "is not stored" in told[0]
    assert base.audit.quantized_as == "nf4"


def test_run_leaves_room_on_the_disk_and_packing_takes_what_fits(folder, monkeypatch):
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 9_000_000_000)
    monkeypatch.setattr(store, "MIN_STORED_BYTES", 0)
    _, told = opened(folder)
    assert "is not stored" in told[0]
    assert "9.0 GB" in told[0]
    assert stored_bases() == []
    pack_base(str(folder))
    assert len(stored_bases()) == 1


def test_commands_pack_list_and_remove(folder, capsys):
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
    (kept.parent / ".left-behind").mkdir()
    assert run(["base", "ls"]) == 0
    shown = capsys.readouterr()
    assert "incomplete" in " ".join(shown.out.split())
    assert "2 packed bases in" in shown.err
    assert run(["base", "rm", ".left-behind"]) == 0
    assert run(["base", "rm", "nothing"]) == 2
    assert kept.name in capsys.readouterr().err
    assert run(["base", "rm", kept.name]) == 0
    assert not kept.exists()


class Alone:
    """The only process of a machine."""

    is_first_here = True
    waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.mark.parametrize(
    ("quantize", "dtype", "labels", "kept"),
    [
        ("none", "fp32", (), False),
        ("none", "bf16", (), True),
        ("nf4", "fp32", (), True),
        ("none", "fp32", ("good", "bad", "neither"), False),
        ("nf4", "bf16", ("good", "bad", "neither"), True),
    ],
)
def test_a_base_that_processes_open_together_is_the_one_that_each_loads(
    quantize, dtype, labels, kept, folder, cache
):
    asked: dict[str, Any] = {"quantize": quantize, "dtype": dtype, "device": "cpu"}
    if labels:
        kind = "AutoModelForSequenceClassification"
        asked["purpose"] = Purpose("sequence_classification", kind, head=ClassHead(labels))
    expected, sharing = load_base(str(folder), **asked), Alone()
    for _ in range(2):  # made, and opened again
        found = load_base(str(folder), sharing=sharing, **asked)
        assert_same_state(found.model, expected.model)
        assert found.fingerprint == expected.fingerprint
        assert found.audit.rows == expected.audit.rows
        assert found.head == expected.head
        assert found.model.config.to_dict() == expected.model.config.to_dict()
    assert sharing.waits == 2 * kept
    assert [*cache.glob("packed/*/model.safetensors")] != [] if kept else not cache.exists()
    assert not [*cache.glob("packed/tmp*")]


@pytest.mark.slow
def test_of_two_that_pack_the_same_base_one_waits_and_opens_it(folder, cache, monkeypatch):
    monkeypatch.setattr(store, "MIN_STORED_BYTES", 0)
    building, may_go_on, built = threading.Event(), threading.Event(), []
    plain = build

    def slow(*args: Any, **more: Any) -> Any:
        built.append(threading.current_thread().name)
        building.set()
        assert may_go_on.wait(60)
        return plain(*args, **more)

    monkeypatch.setattr("peftkit.base.store.build", slow)
    found: dict[str, tuple[Base, list[str]]] = {}

    def load_in_turn(name: str) -> None:
        seen: list[Event] = []

        def listen(event: Event) -> None:
            seen.append(event)
            if isinstance(event, Notice) and "waits" in event.text:
                may_go_on.set()

        base = load_base(str(folder), quantize="nf4", on_event=listen)
        found[name] = base, [e.text for e in seen if isinstance(e, Notice)]

    first = threading.Thread(target=load_in_turn, args=["first"], name="first")
    first.start()
    assert building.wait(60)
    load_in_turn("second")
    first.join()
    assert built == ["first"]
    assert "waits" in found["second"][1][0]
    assert found["first"][0].fingerprint == found["second"][0].fingerprint
    assert [stored.problem for stored in stored_bases()] == [""]  # and nothing is left of another
