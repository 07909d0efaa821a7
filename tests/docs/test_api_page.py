"""The programs of docs/api.md run, in their order, in one folder."""

import json
import re
import shutil
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_programs_run(model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n} and {n} is", "completion": f" {2 * n}."} for n in range(8)]
    Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("recipe.yaml").write_text(
        f"base: {{model: {model_folder}}}\n"
        "data: {train: train.jsonl, eval: train.jsonl, max_length: 64}\n"
        "train: {output_dir: runs/recipe, batch_size: 4}\n"
    )
    for program in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        exec(program.replace("smollm2-135m", str(model_folder)), {"__name__": "api"})
        for name in ("orders", "style"):
            shutil.copytree("runs/fresh", f"runs/{name}", dirs_exist_ok=True)
    assert "lora_" in capsys.readouterr().out.splitlines()[-1]
