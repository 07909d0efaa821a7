"""Two processes on gloo are one run: the same weights, one writer, one end."""

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from peftkit.errors import RunError
from peftkit.events import Event, Progress, Saved, Stage
from peftkit.execution.world import World
from tests.helpers.children import exit_code, start, start_ranks
from tests.helpers.toy import COUNTED, Played, Toy, ToyTask, make_rows, play, same

ROWS = make_rows(14)  # steps of 4: the last of an epoch has 2 rows, one for each process


class Listing(ToyTask):
    """Notes the rows trained on, and does what it is told to meanwhile."""

    def __init__(self, what: str) -> None:
        self.what, self.seen, self.calls, self.last = what, list[Any](), -COUNTED, 0

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        if model.training:
            self.calls, self.last = self.calls + 1, len(batch["labels"])
            is_second = os.environ["RANK"] == "1"
            if self.what == "terminate" and is_second and self.calls == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            if self.what == "die" and is_second and self.calls == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "short" and is_second and len(batch["labels"]) > 1:
                raise RuntimeError("CUDA out of memory.")
            if self.what == "nan" and is_second and self.calls == 5:
                return super().loss(model, batch) * float("nan")
        loss = super().loss(model, batch)
        if model.training and loss.requires_grad:
            rows = [tuple(row) for row in batch["input_ids"].tolist()]
            loss.register_hook(lambda _: self.seen.extend(rows))  # learnt from, not only counted
        return loss


RUNS: dict[str, dict[str, Any]] = {
    "": {},
    "differ": {},
    "terminate": {},
    "resume": {"folder": "terminate", "resume": True},
    "late": {},
    "short": {"batch_size": 2, "gradient_accumulation": 1},
    "few": {"rows": ROWS[:5]},  # in steps of 4: the last has one row, and one process has none
    "nan": {},
}
"""What happens to one process, or how the run is changed."""


def work(folder: str, runs: Mapping[str, dict[str, Any]]) -> None:
    """What each process does: one run after the other; reports of all in report-RANK.json."""
    rank, reports = os.environ["RANK"], {}
    for what, changes in runs.items():
        task, model = Listing(what), Toy()
        settings = {"batch_size": 1, "gradient_accumulation": 2, "save_every": 2, "rows": ROWS}
        settings |= changes
        if what == "differ" and rank == "1":
            torch.nn.init.zeros_(model.lora_A.weight)
        out = Path(folder, f"run-{settings.pop('folder', what)}")
        listen = terminate_after_the_last_save if what == "late" else None
        run = play(out, model=model, task=task, on_event=listen, **settings)
        reports[what] = {
            "losses": run.losses,
            "events": sum(not isinstance(event, Stage | Progress) for event in run.events),
            "notices": run.notices,
            "error": repr(run.error),
            "code": getattr(run.error, "exit_code", 0),
            "seen": task.seen,
            "last": task.last,
            "sum": sum(float(p.double().sum()) for p in run.weights.values()),
            "is_main": run.result.is_main if run.result else None,
        }
    Path(folder, f"report-{rank}.json").write_text(json.dumps(reports))
    World(torch.device("cpu")).wait()  # who leaves first may cut off what the other still reads
    os._exit(0)


def terminate_after_the_last_save(event: Event) -> None:
    """On the main process, which alone hears of it."""
    if isinstance(event, Saved) and event.path.name == "step-12":
        os.kill(os.getpid(), signal.SIGTERM)


def launch(folder: Path, runs: Mapping[str, dict[str, Any]]) -> list[int | None]:
    """Run two processes as `accelerate launch --cpu --num_processes 2` would; return exit codes."""
    return [exit_code(child) for child in start_ranks(work, str(folder), runs)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs on two processes, with accumulation 2 on each."""
    directory = tmp_path_factory.mktemp("two")
    assert launch(directory, RUNS) == [0, 0]
    return directory


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(2)]


def weights(folder: Path, step: int = 12) -> dict[str, Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step}" / "weights.safetensors")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Played, Path]:
    """The same on one process, with accumulation 4."""
    folder = tmp_path_factory.mktemp("one")
    run = play(folder, rows=ROWS, batch_size=1, gradient_accumulation=4, save_every=2)
    return run, folder


def test_two_ranks_equal_double_accumulation(folder, reports, one):
    # sums in another order, magnified where AdamW divides by a small gradient
    assert reports[0][""]["losses"] == pytest.approx(one[0].losses, rel=1e-4)
    for name, weight in weights(one[1]).items():
        torch.testing.assert_close(weights(folder / "run-")[name], weight, rtol=1e-3, atol=1e-4)


def test_ranks_end_equal_from_different_initial_weights(reports):
    assert len({report[run]["sum"] for report in reports for run in ("", "differ")}) == 1


def test_every_row_is_learnt_once_an_epoch_by_one_of_them(reports):
    rows = sorted(list(row.input_ids) for row in ROWS)
    seen = [row for report in reports for row in report[""]["seen"]]
    assert sorted(seen) == sorted(3 * rows)


def test_only_the_main_process_logs(folder, reports):
    main, other = (report[""] for report in reports)
    assert (main["is_main"], other["is_main"]) == (True, False)
    assert main["events"] > 12
    assert other["events"] == 0
    assert len((folder / "run-" / "metrics.jsonl").read_text().splitlines()) == main["events"]


def test_a_signal_to_one_rank_stops_both(folder, reports):
    assert [report["terminate"]["code"] for report in reports] == [143, 143]
    assert all("after step 3" in report["terminate"]["error"] for report in reports)
    main = reports[0]
    assert main["resume"]["losses"] == main[""]["losses"][3:]
    assert same(weights(folder / "run-terminate"), weights(folder / "run-"))


def test_a_signal_in_the_last_save_still_counts_on_both(reports):
    assert [report["late"]["code"] for report in reports] == [143, 143]


def test_out_of_memory_on_one_rank_degrades_all(reports, one):
    main, other = (report["short"] for report in reports)
    assert main["losses"] == pytest.approx(one[0].losses, rel=1e-4)
    assert [main["last"], other["last"]] == [1, 1]
    (notice,) = main["notices"]
    assert notice.startswith("Step 1: Memory ran out. From now on: 1 rows at a time instead of 2.")


def test_ranks_may_have_unequal_rows(reports, tmp_path):
    alone = play(tmp_path, rows=ROWS[:5], batch_size=1, gradient_accumulation=4)
    assert reports[0]["few"]["losses"] == pytest.approx(alone.losses, rel=1e-4)


def test_a_nan_on_one_rank_stops_both(folder, reports):
    assert all("RunError" in report["nan"]["error"] for report in reports)
    assert (folder / "run-nan" / "rank1-diagnosis.json").exists()


def test_another_number_of_processes_is_refused(folder):
    settings: dict[str, Any] = {"batch_size": 1, "gradient_accumulation": 2, "save_every": 2}
    run = play(folder / "run-", rows=ROWS, resume=True, **settings)
    assert "num_processes: 2 -> 1" in str(run.error)


def test_a_killed_process_ends_the_other_in_bounded_time(tmp_path):
    began = time.monotonic()
    codes = launch(tmp_path, {"die": {}})
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, None)
    assert time.monotonic() - began < 30


class Precise(ToyTask):
    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        assert torch.is_autocast_enabled("cpu"), "the launcher asked for bf16"
        assert model(batch["input_ids"]).dtype == torch.bfloat16
        return super().loss(model, batch)


def train_precisely(folder: str) -> None:
    run = play(Path(folder), model=Plain(), task=Precise())
    os._exit(0 if run.error is None else 1)


class Plain(Toy):
    """Without the fp32 magnitude, which would make the output fp32."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.base(x) + self.lora_B(self.lora_A(x))


def test_the_precision_that_the_launcher_was_told_is_used(tmp_path):
    """`accelerate launch --mixed_precision bf16`."""
    child = start(train_precisely, str(tmp_path), ACCELERATE_MIXED_PRECISION="bf16")
    assert exit_code(child) == 0


def test_processes_that_do_not_find_each_other_are_refused(monkeypatch):
    """Without its address, accelerate would let each of them train alone."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "-1")
    monkeypatch.setattr("accelerate.Accelerator", Alone)
    with pytest.raises(RunError, match="2 processes were launched, but accelerate has joined 1"):
        World(torch.device("cpu"))


class Alone:
    """An Accelerator that has joined nobody."""

    process_index, num_processes, device = 0, 1, torch.device("cpu")

    def __init__(self, **settings: object) -> None: ...


def test_a_lone_process_sums_and_gathers_nothing():
    world = World(torch.device("cpu"))
    assert (world.rank, world.world_size, world.is_main) == (0, 1, True)
    assert world.sum(torch.tensor(3.0)) == 3.0
    assert world.gather(torch.tensor([1, 2])).tolist() == [[1, 2]]
    assert world.max(7) == 7
