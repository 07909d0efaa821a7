"""export, import, push and pull: what they print, and how they end."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.low_rank import read_low_rank
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.lora import LoRA
from tests.helpers.adapters import base_folder, model_with_adapter
from tests.helpers.command_line import Run
from tests.helpers.hub_server import joined_hub


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, attached = model_with_adapter("llama", LoRA(rank=4, targets=("q", "v")))
    return save_adapter(attached, tmp_path_factory.mktemp("saved"), Provenance(base="org/base"))


@pytest.fixture
def adapter(saved: Path, peftkit: Run, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "json")
    return Path("json")


@pytest.mark.parametrize(
    ("to", "out", "hint"),
    [
        ("mlx", "my mlx", "mlx_lm.generate --model org/base --adapter-path 'my mlx' --prompt"),
        ("gguf", "a.gguf", "llama-server -m BASE.gguf --lora a.gguf"),
    ],
)
def test_there_and_back(to, out, hint, adapter, peftkit, tmp_path):
    if to == "gguf":
        pytest.importorskip("gguf", reason="the extra peftkit[gguf] is not installed")
    base = base_folder("llama", tmp_path / "base")
    more = ("--base", base) if to == "gguf" else ()
    done = peftkit("export", adapter, "--to", to, "--out", out, *more).succeeded()
    assert done.out == f"{out}\n"
    assert hint in done.err
    done = peftkit("import", out, "--base", base, "--out", "back").succeeded()
    assert done.out == "back\n"
    assert read_low_rank(tmp_path / "back")[1].keys() == read_low_rank(tmp_path / "json")[1].keys()


def test_an_import_takes_the_base_that_the_adapter_names(peftkit, tmp_path):
    base = base_folder("llama", tmp_path / "base")
    _, attached = model_with_adapter("llama", LoRA(rank=4, targets=("q", "v")))
    folder = save_adapter(attached, tmp_path / "json", Provenance(base=str(base)))
    assert peftkit("import", "json", "--out", "back").code == 0
    assert read_low_rank(tmp_path / "back")[1].keys() == read_low_rank(folder)[1].keys()
    config = folder / "adapter_config.json"
    fields = json.loads(config.read_text()) | {"base_model_name_or_path": None}
    config.write_text(json.dumps(fields))
    (folder / "peftkit.json").unlink()
    refused = peftkit("import", "json", "--out", "none")
    assert refused.code == 2
    assert "--base MODEL" in refused.err


def test_a_pickle_error_names_a_safe_load(adapter, peftkit, monkeypatch):
    folder = adapter.rename("pickled").resolve()
    file = folder / "adapter_model.safetensors"
    expected = load_file(file)
    torch.save(expected, folder / "adapter_model.bin")
    file.unlink()
    (folder / "peftkit.json").unlink()
    refused = peftkit("import", "pickled", "--base", "org/base", "--out", "none")
    assert refused.code == 2
    code = re.search(r'python -c "(.*?)"', " ".join(refused.err.split()))
    assert code is not None
    monkeypatch.chdir(folder)
    exec(code[1], {})
    assert all(torch.equal(expected[n], tensor) for n, tensor in load_file(file).items())


def test_serving_says_how_to_serve(adapter, peftkit):
    args = ("export", adapter, "--to", "peft", "--profile", "serving", "--out", "served")
    done = peftkit(*args).succeeded()
    command = "vllm serve org/base --enable-lora --max-lora-rank 8 --lora-modules served=served"
    assert f"vLLM: {command}" in done.err


def test_a_taken_place_is_left_alone_without_force(adapter, peftkit):
    args = ("export", adapter, "--to", "peft", "--out", "out")
    assert peftkit(*args).code == 0
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    assert "--force" in peftkit(*args, "--dtype", "bf16").refusal()
    assert {path: path.read_bytes() for path in Path("out").iterdir()} == before
    assert peftkit(*args, "--dtype", "bf16", "--force").code == 0
    _, modules = read_low_rank("out")
    assert {str(module.a.dtype) for module in modules.values()} == {"torch.bfloat16"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("export", "json", "--to", "mlx", "--out", "x", "--profile", "serving"), "--to peft"),
        (("export", "json", "--to", "mlx", "--out", "x", "--dtype", "q8_0"), "no dtype q8_0"),
        (("export", "json", "--to", "onnx", "--out", "x"), "'peft', 'gguf', 'mlx'"),
        (("export", "nothing", "--to", "mlx", "--out", "x"), "no adapter folder 'nothing'"),
        (("import", "nothing", "--base", "base", "--out", "x"), "There is no such file or folder"),
        (("import", "json", "--base", "./base", "--out", "x"), "no base model './base'"),
        (("push", "json", "../x"), "is not the name of a repository"),
        (("push", "json", "me/x"), "HF_HUB_OFFLINE is set"),
        (("pull", "/etc/passwd", "--out", "x"), "is not the name of a repository"),
        (("pull", "me/x", "--out", "x"), "not in the cache"),
        (("chat", "me/x"), "there is no folder 'me/x', and the adapter me/x cannot be downloaded"),
    ],
)
def test_bad_input_exits_2(args, message, adapter, peftkit):
    assert message in peftkit(*args).refusal()
    assert not Path("x").exists()


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_push_and_pull_print_the_commit_and_the_folder(adapter, peftkit, tmp_path, monkeypatch):
    with joined_hub(monkeypatch, tmp_path / "cache") as hub:
        pushed = peftkit("push", "json", "me/json", "--private")
        commit = hub.repos["me/json"].main
        assert pushed[:2] == (0, f"{hub.url}/me/json/commit/{commit}\n"), pushed.err
        pulled = peftkit("pull", f"me/json@{commit}", "--out", "pulled")
        assert pulled[:2] == (0, "pulled\n"), pulled.err
        assert peftkit("export", "me/json", "--to", "mlx", "--out", "mlx").code == 0
    for name in ("adapter_model.safetensors", "peftkit.json"):
        assert (tmp_path / "pulled" / name).read_bytes() == (tmp_path / "json" / name).read_bytes()
