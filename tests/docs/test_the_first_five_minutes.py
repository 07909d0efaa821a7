"""The start page and the page on using an adapter are done as they say, on a tiny base."""

import io
import os
import re
import shlex
import shutil
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


INPUTS = {"recipe.yaml", "train.jsonl", "eval.jsonl", "runs/demo", "smollm2-135m", "ls", "."}
"""What this folder has."""
ELSEWHERE = {
    "serve": "runs until it is stopped: tests/server",
    "studio": "runs until it is stopped: tests/studio",
    "--serve": "runs until it is stopped: tests/report",
    "init": "asks: tests/cli/test_init.py",
    "prove": "needs what a server or another program made: tests/cli/test_prove.py",
    "push": "needs a hub: tests/formats/test_hub.py",
    "sweep": "trains several adapters: tests/cli/test_sweeps.py",
    "--tool": "reads a program of the page: tests/tasks/on_policy/test_tools.py",
    "--tasks": "needs lm-eval: tests/peers",
    "--merged": "needs llama.cpp's converter: tests/cli/deploy",
    "ollama": "needs llama.cpp's converter: tests/cli/deploy",
    "merged.gguf": "needs the base as a GGUF file: tests/merging/test_into_gguf.py",
    "general.jsonl": "rows of the reader",
    "compared.html": "needs a second run: tests/report",
    "my_metrics:same_total": "a program of the reader",
    "train.log_to=[tensorboard]": "needs tensorboard: tests/report",
}
"""Words of commands that do not run in this folder, with the reason."""


def commands_of_all_pages() -> dict[str, list[str]]:
    """Return the commands that run in this folder, by page and text."""
    found = {}
    for path in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        text = blocks(os.path.relpath(path, DOCS), "bash").replace("\\\n", " ")
        for line in text.splitlines():
            call = shlex.split(line, comments=True)[1:] if line.startswith("peftkit ") else []
            has_inputs = len(call) == 1 or bool(INPUTS & {*call[1:3]})
            if has_inputs and not ELSEWHERE.keys() & {*call}:
                found[f"{path.name}: {shlex.join(call)}"] = call
    return found


CALLS = commands_of_all_pages()


def test_most_commands_of_the_pages_run():
    assert len(CALLS) >= 40


@pytest.mark.covers("docs", "README.md", "peftkit", "cli/peftkit_cli")
@pytest.mark.parametrize("shown", CALLS)
def test_a_command_of_a_page_runs_as_it_stands(
    shown, trained, model_folder, tmp_path, monkeypatch, capsys
):
    call = [str(model_folder) if word == "smollm2-135m" else word for word in CALLS[shown]]
    call = [word.replace("./smollm2", str(model_folder)) for word in call]
    anew = call[:1] == ["train"] and "--resume" not in call and "--from" not in call
    here = shutil.copytree(
        trained, tmp_path / "here", ignore=shutil.ignore_patterns("runs" if anew else "")
    )
    monkeypatch.chdir(here)
    monkeypatch.setattr("sys.stdin", io.StringIO("How do I reset my badge?\n/base\n/quit\n"))
    assert run(call) == 0, capsys.readouterr().err
    if "--out" in call:
        assert (here / call[call.index("--out") + 1]).exists()
