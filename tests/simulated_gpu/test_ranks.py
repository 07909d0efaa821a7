"""Several processes, each with a card of its own, are one run; and what the launcher was told."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from peftkit.execution.environment import select_device
from peftkit.execution.world import World
from peftkit.methods.data_init import as_on_main
from peftkit.methods.lora import LoRA
from peftkit.train.checkpoint_files import Checkpoints
from tests.helpers.children import exit_code, start_ranks
from tests.helpers.families import FAMILIES
from tests.simulated_gpu.same import train
from tests.simulated_gpu.simulation import on_cpu, simulated
from tests.simulated_gpu.tensors import Card

pytestmark = pytest.mark.needs_simulation


def work(folder: str) -> None:
    """What each process does; it reports in report-RANK.json."""
    rank, out = int(os.environ["RANK"]), Path(folder)
    report: dict[str, Any] = {}
    with simulated(Card(count=2)):
        device = select_device()
        report["device"] = str(device)
        method = LoRA(rank=3, alpha=6, init="pissa")
        if rank == 1:  # what only the buffers beside the parameters tell
            torch.manual_seed(1)
        seen = Differing(rank)
        heard, state = train(str(device), out, method=method, batch_size=2, look=seen)
        report |= {"losses": heard.losses, "starts": seen.starts}
        report["sum"] = sum(float(t.double().sum()) for t in state.values())
        report["eva"] = agreed_ranks(device, rank)
        if rank == 1:  # which need not see what the main process sees
            Checkpoints.newest_valid = None  # type: ignore[assignment, method-assign]
        train(str(device), out, method=method, batch_size=2, resume=True)
    (out / f"report-{rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    os._exit(0)


class Differing:
    """Changes what lies beside the parameters on one process, before the run begins."""

    def __init__(self, rank: int) -> None:
        self.rank, self.starts = rank, 0.0
        self._buffers: list[torch.Tensor] = []

    def __call__(self, model: Any) -> None:
        """Take a model whose adapter is on it."""
        self._buffers = [b for n, b in model.named_buffers() if "start_" in n]
        if self.rank == 1:
            for buffer in self._buffers:
                buffer.add_(1.0)

    def read(self) -> None:
        """Look at them after the run."""
        self.starts = sum(float(on_cpu(b).double().sum()) for b in self._buffers)


def agreed_ranks(device: torch.device, rank: int) -> list[Any]:
    """Let two processes find other ranks of EVA, and agree."""
    model, asked = FAMILIES["llama"](), LoRA(rank=2, alpha=4, init="eva", targets=("q", "o"))
    paths = [site.path for site in asked.linear_sites(model)]
    own = {path: 2 + (number == rank) - (number == rank + 1) for number, path in enumerate(paths)}
    method = asked.model_copy(update={"rank_pattern": own, "alpha_pattern": dict.fromkeys(own, 4)})
    starts = {path: (torch.full((own[path], 32), float(rank)), None) for path in paths}
    found, given = as_on_main(model, asked, method, starts, World(device))
    shapes = [list(given[path][0].shape) for path in paths]
    return [dict(found.rank_pattern), shapes, sum(float(a.sum()) for a, _ in given.values())]


def launch(folder: Path) -> list[dict[str, Any]]:
    """Run two processes as `accelerate launch` would; return their reports."""
    children = start_ranks(work, str(folder))
    assert [exit_code(child) for child in children] == [0, 0]
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(2)]


def test_two_cards_learn_what_one_does_with_twice_the_rows(tmp_path):
    (tmp_path / "one").mkdir()
    method = LoRA(rank=3, alpha=6, init="pissa")
    alone, _ = train("cpu", tmp_path / "one", method=method, batch_size=4)
    (tmp_path / "two").mkdir()
    main, other = launch(tmp_path / "two")
    assert main["losses"] == pytest.approx(alone.losses, rel=1e-4)
    assert [main["device"], other["device"]] == ["cuda:0", "cuda:1"]
    assert main["sum"] == other["sum"]
    assert main["starts"] == other["starts"]
    assert main["eva"] == other["eva"]
    assert main["eva"][2] == 0.0  # the main process's


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Let accelerate look at the machine anew; it remembers what it saw first."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("fp16", "precision: fp16 by autocast, loss scaled"),
        pytest.param("bf16", "precision: bf16 by autocast", marks=pytest.mark.slow),
    ],
)
def test_the_precision_that_the_launcher_was_told_is_in_the_header(
    asked, told, tmp_path, monkeypatch, card
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", asked)
    heard, _ = train("cuda", tmp_path, max_steps=3)
    parts = heard.paths.split("; ")
    assert [part for part in parts if part.startswith("precision")] == [told]
    assert any(part.startswith("adapter: 8 groups of 14 layers") for part in parts)
    assert heard.losses[-1] < heard.losses[0]


@pytest.mark.smoke
@pytest.mark.parametrize(("rank", "cards", "number"), [(0, 1, 0), (3, 1, 0), (3, 4, 3), (5, 4, 1)])
def test_each_rank_uses_its_card_of_accelerate(rank, cards, number, monkeypatch):
    """Under Slurm and Kubernetes each process may see one card alone."""
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    with simulated(Card(count=cards)) as card:
        assert select_device() == torch.device("cuda", number)
        assert card.current == number  # where libraries put what they make
