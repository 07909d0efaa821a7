"""The start page and the page on using an adapter are done as they say, on a tiny base."""

import io
import re
import shlex
from pathlib import Path

import pytest

from peftkit_cli.about import SCHEMA
from peftkit_cli.app import run

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL))


def commands(page: str, *names: str) -> list[list[str]]:
    """Return the calls of some of peftkit's commands, in the order of the page."""
    lines = [line for line in blocks(page, "bash").splitlines() if line.startswith("peftkit ")]
    found = [
        call
        for call in (shlex.split(line, comments=True)[1:] for line in lines)
        if call[0] in names
    ]
    assert {call[0] for call in found} == set(names)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A folder with the start page's recipe and rows over the tiny base, checked and trained."""
    folder = tmp_path_factory.mktemp("here")
    recipe = blocks("index.md", "yaml").replace("smollm2-135m", str(model_folder))
    recipe = recipe.replace("max_length: 512", "max_length: 256")  # it reads no more
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    for name in ("train.jsonl", "eval.jsonl"):
        (folder / name).write_text(blocks("index.md", "jsonl"), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for call in commands("index.md", "check", "plan", "train"):
            assert run(call) == 0, call
    return folder


@pytest.fixture
def here(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def test_the_start_page_from_train_to_eval(here, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("How do I reset my badge?\n/base\n/quit\n"))
    for call in commands("index.md", "report", "chat", "eval"):
        assert run(call) == 0, (call, capsys.readouterr().err)
    assert (here / "runs/demo/adapter_model.safetensors").is_file()
    assert (here / "runs/demo/report.html").is_file()


def test_the_start_page_names_the_line_by_which_editors_find_the_schema():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    assert f"`# yaml-language-server: $schema={SCHEMA}`" in text


@pytest.mark.covers("docs", "cli/peftkit_cli", "peftkit/formats", "peftkit/merging")
def test_the_guide_applies_the_adapter(here, capsys):
    (anew,) = [call for call in commands("continue.md", "train") if "--from" in call]
    merge = commands("use.md", "merge")[0]
    ask = commands("use.md", "generate")[0]
    # merged exports run llama.cpp's converter: tests/cli/deploy
    exports = [
        call for call in commands("use.md", "export") if not {"--merged", "ollama"} & {*call}
    ]
    assert any("gguf" in call for call in exports)
    looks = commands("continue.md", "runs", "report", "inspect")
    looks = [call for call in looks if "--serve" not in call]  # until it is stopped
    for call in [anew, ask, merge, *exports, *looks]:
        assert run(call) == 0, (call, capsys.readouterr().err)
    for made in ("merged/config.json", "served/adapter_config.json", "mlx/adapters.safetensors"):
        assert (here / made).is_file()
    assert (here / "demo.gguf").is_file()
