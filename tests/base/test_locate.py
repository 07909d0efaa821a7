"""Where a base is: GGUF files, short names, the hub and its cache."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.utils.hub import cached_file

from peftkit.base import locate, pretrained
from peftkit.base.load import load_base, local_folder
from peftkit.errors import BaseError
from peftkit.events import Event, Progress, Stage
from tests.helpers.adapters import logits
from tests.helpers.families import ARCHITECTURES
from tests.helpers.gguf_files import write_gguf

gguf = pytest.importorskip("gguf", reason="GGUF files need: pip install gguf")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed package with a GGUF file in it, and code that must not run."""
    root = tmp_path_factory.mktemp("packages")
    inside = root / "tiny_llm"
    inside.mkdir()
    (inside / "__init__.py").write_text("raise SystemExit('this must never run')")
    torch.manual_seed(0)
    write_gguf(inside / "tiny.gguf", ARCHITECTURES["llama"]())
    return inside


@pytest.fixture
def tiny_known(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The short name `tiny`, found in the package; return the cache."""
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setitem(
        locate.KNOWN, "tiny", locate.Known("org/tiny", "tiny_llm", "tiny-llm==1", "tiny.gguf")
    )
    monkeypatch.setenv("PEFTKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_gguf_file_loads_as_the_model_it_was_made_of(package, model_folder, capfd):
    base = load_base(str(package / "tiny.gguf"), dtype="fp32")
    assert capfd.readouterr() == ("", "")
    plain = load_base(str(model_folder), dtype="fp32")
    torch.testing.assert_close(logits(base.model), logits(plain.model), rtol=1e-4, atol=1e-4)
    text = 'the answer is {"name": "Anna"}<|im_end|>'
    assert base.tokenizer(text).input_ids == plain.tokenizer(text).input_ids
    assert not base.model.is_quantized
    assert base.name == str(package / "tiny.gguf")
    quantized = load_base(str(package / "tiny.gguf"), dtype="bf16", quantize="nf4")
    assert quantized.audit.quantized_as == "nf4"
    assert quantized.fingerprint == base.fingerprint
    assert local_folder(str(package / "tiny.gguf")) is None


@pytest.mark.parametrize("content", [b"", b"GGUF" + 40 * b"x", b"GGUF\x03\x00\x00\x00"])
def test_damaged_gguf_is_an_error(content, tmp_path):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(BaseError, match=r"x\.gguf"):
        load_base(str(tmp_path / "x.gguf"))


def test_short_name_is_converted_once_and_is_the_same_model(tiny_known, package, capfd):
    seen: list[Event] = []
    first = load_base("tiny", on_event=seen.append)
    target = tiny_known / "bases" / "tiny"
    assert [event.text for event in seen if isinstance(event, Stage)] == [
        f"Converting tiny.gguf into {target} (once)",
        "Loading the base tiny",
    ]
    converting = [e for e in seen if isinstance(e, Progress) and "Converting" in e.text]
    assert [event.done / event.total for event in converting] == [0.5, 0.75, 1.0]
    assert capfd.readouterr() == ("", "")
    assert sorted(path.name for path in target.parent.iterdir()) == [".locks", "tiny"]
    assert "tiny_llm" not in sys.modules
    modes = {path.stat().st_mode for path in target.iterdir()}
    assert len(modes) == 1
    seen.clear()
    again = load_base("tiny", on_event=seen.append)
    assert sum(isinstance(event, Stage) for event in seen) == 1
    direct = load_base(str(package / "tiny.gguf"))
    assert first.fingerprint == again.fingerprint == direct.fingerprint
    assert torch.equal(logits(again.model), logits(direct.model))
    assert (again.name, again.hub_id) == ("tiny", "org/tiny")
    plain = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=again.model.dtype)
    assert torch.equal(logits(plain.eval()), logits(again.model))


def test_hub_id_of_a_short_name_is_never_the_converted_copy(tiny_known):
    load_base("tiny")
    with pytest.raises(BaseError, match=r"its short name, .*: tiny"):
        load_base("org/tiny")
    with pytest.raises(BaseError, match="cannot be reached"):
        load_base("tiny", revision="v1")


def test_cached_hub_model_loads_without_the_hub(model_folder, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--llama"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    snapshot = repository / "snapshots" / commit
    shutil.copytree(model_folder, snapshot)
    monkeypatch.setattr(pretrained, "cached_file", cached_in(tmp_path))
    base = load_base("org/llama")
    assert (base.name, base.hub_id, base.revision) == ("org/llama", "org/llama", commit)
    assert local_folder("org/llama") == snapshot
    assert base.fingerprint == load_base(str(model_folder)).fingerprint


def cached_in(cache: Path) -> Callable[..., Any]:
    return lambda *args, **kwargs: cached_file(*args, cache_dir=cache, **kwargs)
