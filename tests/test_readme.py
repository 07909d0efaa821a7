"""Runs the README's recipe and program on a tiny base, and checks its commands and links."""

import io
import re
from pathlib import Path

import yaml

from peftkit.config.schema import from_dict
from peftkit.recipe import Recipe
from peftkit_cli.app import run
from tests.helpers.folders import write_rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_it_is_read_in_one_go():
    assert len(README.splitlines()) <= 130, "move the details to docs/"


def test_the_recipe_is_valid():
    (text,) = blocks("yaml")
    from_dict(Recipe, yaml.safe_load(text.replace("2e-4", "2.0e-4")), "README.md")


def test_a_program_runs(tmp_path, model_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"instruction": f"Say {n}.", "output": str(n)} for n in range(8)]
    write_rows(tmp_path / "train.jsonl", rows)
    (program,) = blocks("python")
    exec(compile(program.replace("smollm2-135m", str(model_folder)), "README.md", "exec"), {})
    assert (tmp_path / "runs/demo/adapter_model.safetensors").is_file()
    monkeypatch.setattr("sys.stdin", io.StringIO("Say 3.\n/base\n/quit\n"))
    assert run(["chat", "runs/demo", "--max-new-tokens", "4"]) == 0
    assert run(["export", "runs/demo", "--to", "peft", "--out", "exported"]) == 0
    assert run(["merge", "runs/demo", "--out", "merged"]) == 0


def test_every_command_in_it_exists(capsys):
    shell = "\n".join(blocks("bash"))
    names = set(re.findall(r"(?m)^peftkit (\w+)", shell)) | set(
        re.findall(r"`peftkit (\w+)", README)
    )
    assert len(names) >= 10
    for name in sorted(names):
        assert run([name, "--help"]) == 0, name
    capsys.readouterr()


def test_every_make_target_in_it_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?m)^make (\w+)", "\n".join(blocks("bash"))):
        assert re.search(rf"(?m)^{target}:", makefile), target


def test_every_file_it_links_to_exists():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).is_file(), link
