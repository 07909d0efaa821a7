"""The README is short, and its program runs on a tiny base; docs/test_guide.py reads the rest."""

import io
import re
from pathlib import Path

from peftkit_cli.app import run
from tests.helpers.folders import write_rows

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_it_is_read_in_one_go():
    assert len(README.splitlines()) <= 130, "move the details to docs/"


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
