"""The commands of each page run as they stand, on a tiny base."""

import io
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peftkit_cli.about import SCHEMA
from peftkit_cli.app import run

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))


def blocks(page: str, language: str) -> str:
    text = (DOCS / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL))


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of a page's calls of peftkit, in its order."""
    for text in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        for line in text.splitlines():
            if (command := line.rpartition(" | ")[2]).startswith("peftkit "):
                yield shlex.split(command, comments=True)[1:]


NOT_RUN = {
    r"serve|studio|.* --serve": "runs until it is stopped",
    r"init$|quickstart|train recipes/quickstart": "asks questions, or takes minutes",
    r"sweep|distill|train .*--resume": "several runs: tests/cli",
    r"train recipe.yaml --set": "needs a reward function of yours, or a tracker",
    r"recipes cp": "another way to the recipe, whose file exists",
    r"push|pull|base (pack|rm)|.*(USER/NAME|MODEL|NAME$)": "needs the hub, or a name of yours",
    r"import|.*their-adapter|.*tuning|.*ftjob": "files of other programs",
    r"export .*(ollama|--merged)|merge .*\.gguf": "runs llama.cpp's converter: tests/cli/deploy",
    r"predict|data pairs|merge runs/dora": "adapters of other tasks and methods: tests/evaluation",
    r"prove": "needs a server, files of other programs, or a real base: tests/proof",
    r"plan .*--memory": "times the machine for seconds, as the start page's plan does",
    r"eval .*--tasks": "needs lm-eval",
    r"chat .*--tool": "needs a Python file of yours: tests/cli",
}
"""Calls that are only parsed (test_guide.py), and why."""

MODELS = ("smollm2-135m",)
"""Bases that the tiny one replaces."""


def do(page: Path, folder: Path, model: Path, done: set[tuple[str, ...]]) -> None:
    """Run a page's calls that are not in NOT_RUN and not done yet."""
    for call in commands(page):
        if tuple(call) in done or any(re.match(each, " ".join(call)) for each in NOT_RUN):
            continue
        done.add(tuple(call))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            patch.setattr("sys.stdin", io.StringIO("How do I reset my badge?\n/base\n/quit\n"))
            assert run([str(model) if word in MODELS else word for word in call]) == 0, call


@pytest.fixture(scope="module")
def done() -> set[tuple[str, ...]]:
    return set()


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, done: Any) -> Path:
    """A folder with the start page's recipe and rows over the tiny base; its page is done."""
    folder = tmp_path_factory.mktemp("here")
    recipe = blocks("index.md", "yaml").replace(MODELS[0], str(model_folder))
    recipe = recipe.replace("max_length: 512", "max_length: 256")  # it reads no more
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    for name in ("train.jsonl", "eval.jsonl", "general.jsonl"):
        (folder / name).write_text(blocks("index.md", "jsonl"), encoding="utf-8")
    do(DOCS / "index.md", folder, model_folder, done)
    for name in ("orders", "style", "chat"):
        shutil.copytree(folder / "runs/demo", folder / "runs" / name)
    return folder


def test_the_start_page_from_check_to_eval(here):
    assert (here / "runs/demo/adapter_model.safetensors").is_file()
    assert (here / "runs/demo/report.html").is_file()


def test_the_start_page_names_the_line_by_which_editors_find_the_schema():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    assert f"`# yaml-language-server: $schema={SCHEMA}`" in text


@pytest.mark.covers("docs", "cli/peftkit_cli", "peftkit/formats", "peftkit/merging")
def test_each_page_runs_as_it_stands(here, model_folder, done):
    for page in PAGES:
        do(page, here, model_folder, done)
    for made in ("merged/config.json", "served/adapter_config.json", "mlx/adapters.safetensors"):
        assert (here / made).is_file()
    assert (here / "demo.gguf").is_file()


def test_each_reason_excludes_a_command():
    lines = [" ".join(call) for page in PAGES for call in commands(page)]
    assert not [each for each in NOT_RUN if not any(re.match(each, line) for line in lines)]
