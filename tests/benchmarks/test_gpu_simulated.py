"""The GPU benchmark runs from end to end on the simulated card: on a day with one it will too."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, shapes
from benchmarks.workers import WorkerFailed, ours
from tests.helpers.families import TINY
from tests.simulated_gpu.simulation import simulated

SIZES = {**TINY, "vocab_size": 5_003, "num_hidden_layers": 1, "max_position_embeddings": 8192}


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Have workers run in this process, under the simulation; a tiny shape in place of all."""
    tiny = shapes.Shape("LlamaForCausalLM", "LlamaConfig", {**SIZES, "pad_token_id": 0})
    for shapes_of in (shapes.LARGE, shapes.SHAPES):
        for name in ("llama-3.1-8b", "llama-3-70b"):
            monkeypatch.setitem(shapes_of, name, tiny)

    def work(worker: str, job: dict[str, Any], folder: Path, **_: Any) -> dict[str, Any]:
        if worker != "ours":
            raise WorkerFailed(f"{worker} is not installed")
        file, output = folder / "job.json", folder / f"output-{time.monotonic_ns()}"
        file.write_text(json.dumps({**job, "output": str(output), "started": time.time()}))
        monkeypatch.setattr(sys, "argv", ["ours", str(file)])
        capsys.readouterr()
        with simulated():  # each worker is a process of its own, with its own cap
            ours.main()
        return json.loads(capsys.readouterr().out.strip().splitlines()[-1])

    monkeypatch.setattr(gpu, "work", work)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_all_parts_give_their_tables(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    words = "--length 48 --steps 3 --repeats 1 --against trl-liger --caps 24 --most 256"
    small = ["--within", "256", "--json", str(figures)]
    # rows of the parts that ask for 8k and 12k tokens are left to a real card
    asked = gpu.arguments([*words.split(), *small])
    assert asked.parts == list(gpu.PARTS)
    with simulated():
        code = gpu.main([*words.split(), *small, "--parts", "speed,longest"])
    assert code == 0
    found = json.loads(figures.read_text())["figures"]
    for speed in found["speed"]:
        facts = speed["runs"]["ours"][0]
        assert len(facts["step_seconds"]) == 3
        assert facts["peak_bytes"] > 0
        assert "not installed" in speed["runs"]["trl-liger"][0]["failed"]
    assert found["speed"][1]["quantize"] == "nf4"
    assert [run["longest"] for run in found["longest"]] == [256]


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_the_longest_row_under_a_cap_is_found_by_running_out_of_memory(tmp_path):
    words = ["--within", "128", "--most", "512", "--against", ""]
    args = gpu.arguments(words)
    best, facts = gpu.capped("llama-3.1-8b", 0.009, 64, 512, "ours", args, tmp_path)
    assert 64 <= best < 512
    assert facts["peak_bytes"] <= 0.009e9
