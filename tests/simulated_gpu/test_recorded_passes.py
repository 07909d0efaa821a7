"""Passes that are recorded as CUDA graphs learn what eager ones learn, by a few launches a step."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.workers import varied
from peftkit.config.schema import from_dict
from peftkit.events import Event, StepDone
from peftkit.execution.environment import select_device
from peftkit.execution.graphs import CapturePool
from peftkit.forward import recorded
from peftkit.forward.recorded import RecordedPasses
from peftkit.kernels import varlen
from peftkit.methods.lora import LoRA
from peftkit.recipe import Recipe
from peftkit.run import run
from peftkit.tasks.tokens import CausalLM
from peftkit.train import memory
from peftkit.train.optim import LossScale
from peftkit.train.step import Step
from tests.helpers.children import exit_code, start_ranks
from tests.helpers.sharded import settings_of
from tests.helpers.varlen_reference import reference_varlen_attn
from tests.simulated_gpu import same, simulation
from tests.simulated_gpu.same import Heard, train
from tests.simulated_gpu.simulation import simulated
from tests.simulated_gpu.tensors import Card

pytestmark = pytest.mark.needs_simulation
NOT_RECORDED = "Training passes run without CUDA graphs. "
EXACT = 1e-6
"""Of losses: sums over more targets, of which the ignored ones are 0."""
SETTINGS: dict[str, Any] = {"max_steps": 8, "eval_every": None, "record": True}
DROPOUT = LoRA(rank=4, alpha=8, dropout=0.1)


class Launches(Heard):
    """Also notes the launches and replays of each step."""

    card: Card
    replayed = 0
    stops_after: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.replays = list[int](), list[int]()
        self._before = 0, 0

    def __call__(self, event: Event) -> None:
        """Listen."""
        super().__call__(event)
        if isinstance(event, StepDone):
            launches, replays = self._before
            self._before = self.card.launches, Launches.replayed
            self.launches.append(self._before[0] - launches)
            self.replays.append(self._before[1] - replays)
            if event.step == self.stops_after:
                raise KeyboardInterrupt


@pytest.fixture(autouse=True)
def _spans(monkeypatch: pytest.MonkeyPatch) -> None:
    use_spans(monkeypatch)


def use_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel of documents take float32, so that numbers can be compared, and count."""
    monkeypatch.setattr(varlen, "kernel", lambda: reference_varlen_attn)
    monkeypatch.setattr(varlen, "is_available", lambda device: device.type == "cuda")
    monkeypatch.setattr(varlen, "DTYPES", (torch.float32,))
    replay = simulation.Graph.replay

    def counted(graph: Any) -> None:
        Launches.replayed += 1
        replay(graph)

    monkeypatch.setattr(simulation.Graph, "replay", counted)
    monkeypatch.setattr(same, "Heard", Launches)


Learnt = tuple[Launches, dict[str, Tensor]]
_eager: dict[str, Learnt] = {}


def learnt(folder: Path, **settings: Any) -> Learnt:
    """Train eight steps of two micro-batches."""
    with simulated() as card:
        Launches.card, Launches.replayed = card, 0
        found: Any = train("cuda", folder, **{**SETTINGS, **settings})
    return found


def learnt_eagerly(folder: Path, **settings: Any) -> Learnt:
    """Train with the same batches, but without a capture; once for each settings."""
    if (key := repr(settings)) not in _eager:
        with mock.patch.object(recorded, "EAGER_STEPS", 100):
            _eager[key] = learnt(folder / "eager", **settings)
    return _eager[key]


def assert_same(found: Learnt, expected: Learnt) -> None:
    """Compare runs of the same numbers, up to the order of sums."""
    assert found[0].losses == pytest.approx(expected[0].losses, rel=EXACT)
    for name, tensor in expected[1].items():
        torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=EXACT)


WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "dropout": {"method": DROPOUT},
    "recomputed": {"gradient_checkpointing": True},
    "nf4, packed": {"quantize": "nf4", "packed": True, "max_steps": 12},
}
FAST = ("dropout", "recomputed")


@pytest.mark.parametrize(
    "way", [way if way in FAST else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_recorded_passes_learn_what_eager_ones_do_by_few_launches(way, tmp_path):
    eager = learnt_eagerly(tmp_path, **WAYS[way])
    found = learnt(tmp_path / "found", **WAYS[way])
    assert_same(found, eager)
    assert found[0].notices == eager[0].notices == []
    assert found[0].replays[:3] == [0, 0, 0], "two eager steps, and an eager pass of each shape"
    assert found[0].replays[-1] == 2
    assert min(found[0].launches[-3:]) < 200 < min(eager[0].launches) / 5
    assert not any(eager[0].replays)


def test_a_resumed_run_draws_the_numbers_of_a_whole_one(tmp_path, monkeypatch):
    settings: dict[str, Any] = {"method": DROPOUT, "save_every": 6}
    whole = learnt(tmp_path / "whole", **settings)
    monkeypatch.setattr(Launches, "stops_after", 7)
    with pytest.raises(KeyboardInterrupt):
        learnt(tmp_path / "parts", **settings)
    monkeypatch.setattr(Launches, "stops_after", None)
    rest = learnt(tmp_path / "parts", **settings, resume=True)
    assert rest[0].losses == pytest.approx(whole[0].losses[6:], rel=EXACT)
    assert whole[0].replays[5] > 0


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> None:
    """Let a method raise once that the card is full, at one of its calls."""
    original, calls = getattr(owner, name), 0

    def call(*args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(*args, **more)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [(CapturePool, "capture", 2), pytest.param(Step, "_sums", 15, marks=pytest.mark.slow)],
)
def test_without_memory_the_graphs_go_first(owner, name, at, tmp_path, monkeypatch):
    """In a capture, or in an eager pass while there are graphs."""
    eager = learnt_eagerly(tmp_path)
    failing(monkeypatch, owner, name, at)
    found = learnt(tmp_path / "found")
    assert_same(found, eager)
    (notice,) = found[0].notices
    assert "Memory ran out. From now on: passes are not recorded as CUDA graphs" in notice
    assert "rows at a time" not in notice
    assert found[0].replays[-1] == 0


def planted(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    """Change what each replay leaves."""
    replay = simulation.Graph.replay

    def changed(graph: Any) -> None:
        replay(graph)
        change(graph)

    monkeypatch.setattr(simulation.Graph, "replay", changed)


def test_a_graph_that_computes_other_gradients_is_not_used(tmp_path, monkeypatch):
    eager = learnt_eagerly(tmp_path, method=DROPOUT)
    steps: list[Step] = []
    init = Step.__init__
    monkeypatch.setattr(Step, "__init__", lambda self, *a: (steps.append(self), init(self, *a))[1])
    planted(monkeypatch, lambda graph: next(iter(steps[-1].parameters.values())).grad.mul_(1.01))
    found = learnt(tmp_path / "found", method=DROPOUT)
    assert_same(found, eager)
    (notice,) = found[0].notices
    assert notice.startswith(f"{NOT_RECORDED}A replayed pass computes other numbers")
    assert "the gradient of " in notice
    assert found[0].replays[-1] == 0


def test_a_number_of_python_that_changes_between_steps_is_noticed(tmp_path, monkeypatch):
    """It is another one at the first replay than it was at the capture."""
    loss, calls = CausalLM.loss, 0

    def scaled(self: CausalLM, model: Any, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return loss(self, model, batch) * (1.0 + calls)

    monkeypatch.setattr(CausalLM, "loss", scaled)
    found, _ = learnt(tmp_path)
    (notice,) = found.notices
    assert f"{NOT_RECORDED}A replayed pass computes other numbers" in notice


def test_a_number_that_changes_once_a_step_is_noticed(tmp_path, monkeypatch):
    """Of four passes of one shape the second is captured; the third is no test of the number."""
    loss, steps = CausalLM.loss, list[RecordedPasses]()
    begin = RecordedPasses.begin
    monkeypatch.setattr(RecordedPasses, "begin", lambda self: (steps.append(self), begin(self))[1])
    monkeypatch.setattr(CausalLM, "loss", lambda *a: loss(*a) * (1.0 + len(steps)))
    monkeypatch.setattr(same, "SIZES", (12, 12, 12, 12))
    found, _ = learnt(tmp_path, batch_size=2, gradient_accumulation=4)
    (notice,) = found.notices
    assert f"{NOT_RECORDED}A replayed pass computes other numbers" in notice


def test_gradients_that_overflow_say_nothing_about_a_graph(tmp_path, monkeypatch):
    """As in fp16, whose first steps try ever smaller loss scales."""

    def start(self: LossScale, needed: bool) -> None:
        self.needed, self.factor, self.good_steps = True, 2.0**140, 0

    eager = learnt_eagerly(tmp_path)
    monkeypatch.setattr(LossScale, "__init__", start)
    found = learnt(tmp_path / "found")
    assert_same(found, eager)
    assert found[0].notices == []
    assert found[0].replays[-1] == 2


WAITS = "operation not permitted when stream is capturing"


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({}, WAITS),
        ({"gradient_checkpointing": True}, "A recomputed block draws random numbers"),
    ],
)
def test_a_pass_that_cannot_be_captured_runs_eagerly(settings, cause, tmp_path, monkeypatch):
    """The generator, which a capture that broke off leaves unusable, still draws."""
    eager = learnt_eagerly(tmp_path, method=DROPOUT, **settings)
    if cause == WAITS:
        loss = CausalLM.loss

        def waiting(self: CausalLM, model: Any, batch: Any) -> Tensor:
            found = loss(self, model, batch)
            return found * (1.0 if float(found.detach()[0]) else 0.0)

        monkeypatch.setattr(CausalLM, "loss", waiting)
    found = learnt(tmp_path / "found", method=DROPOUT, **settings)
    assert_same(found, eager)
    (notice,) = found[0].notices
    assert notice.startswith(NOT_RECORDED)
    assert cause in notice
    assert found[0].replays == [0] * 8


class Unrecorded(CausalLM):
    """Has another loss, perhaps."""


@pytest.mark.parametrize(
    ("cause", "settings"),
    [
        ("hook of a module", {"look": type("Look", (), {})}),
        ("loss of this task", {}),
        ("Rows are padded", {}),
        ("The head is trained", {"method": LoRA(rank=2, targets=("q",), train_fully=("lm_head",))}),
        ("train.quantize_for", {"quantize_for": "q8_0", "quantize_from": 0.0}),
    ],
)
def test_what_cannot_be_recorded_is_reported_before_the_first_step(
    cause, settings, tmp_path, monkeypatch
):
    if cause == "Rows are padded":
        monkeypatch.setattr(varlen, "DTYPES", (torch.bfloat16,))
    if cause == "loss of this task":
        monkeypatch.setattr(same, "CausalLM", Unrecorded)
    if "look" in settings:

        class Look:
            def __call__(self, model: Any) -> None:
                model.model.norm.register_forward_hook(lambda *args: None)

            def read(self) -> None:
                pass

        settings = {"look": Look()}
    found, _ = learnt(tmp_path, max_steps=1, **settings)
    notices = [notice for notice in found.notices if notice.startswith(NOT_RECORDED)]
    assert len(notices) == 1
    assert cause in notices[0]


GRPO: dict[str, Any] = {
    "type": "grpo",
    "rewards": [{"use": f"{Path(varied.__file__)}:varied"}],
    "answers": 4,
    "max_new_tokens": 12,
    "mask_cut": False,
}
TASKS: dict[str, dict[str, Any]] = {
    "preference": {"type": "preference"},
    "orpo": {"type": "preference", "loss": "orpo"},
    "anchor": {"type": "causal_lm", "anchor": 1.0},
    "grpo": GRPO,
    "updates": {**GRPO, "updates": 2, "kl": 0.1},
}


@pytest.mark.parametrize(
    "task",
    [
        task if task in ("anchor", "grpo") else pytest.param(task, marks=pytest.mark.slow)
        for task in TASKS
    ],
)
def test_tasks_whose_passes_are_recorded_learn_the_same(task, tmp_path):
    rows = "preference" if "preference" in TASKS[task].values() else "causal_lm"
    train = {"max_steps": 12, "batch_size": 3, "tokens_per_batch": None, "eval_every": None}
    settings = settings_of(tmp_path, rows, train=train)
    settings["data"].pop("packing", None)
    settings["task"] = TASKS[task]
    losses, replays = {}, 0
    for record in (False, True):
        settings["train"] |= {"output_dir": str(tmp_path / str(record)), "record": record}
        recipe = from_dict(Recipe, settings, "test")
        with simulated() as card:
            heard, Launches.card, Launches.replayed = Launches(), card, 0
            run(recipe, on_event=heard)
        losses[record], replays = heard.losses, sum(heard.replays)
        assert not [notice for notice in heard.notices if NOT_RECORDED in notice]
    assert losses[True] == pytest.approx(losses[False], rel=1e-4, abs=EXACT)
    assert replays > 0


def work(folder: str) -> None:
    """Train on one of two cards, eagerly and with recorded passes; report what was learnt."""
    rank, report = int(os.environ["RANK"]), dict[str, Any]()
    with pytest.MonkeyPatch.context() as patches:
        use_spans(patches)
        for record in (False, True):
            with simulated(Card(count=2)) as card:
                Launches.card, Launches.replayed = card, 0
                settings = {**SETTINGS, "record": record, "batch_size": 2}
                heard, state = train(str(select_device()), Path(folder, str(record)), **settings)
            weights = sum(float(tensor.double().sum()) for tensor in state.values())
            report[str(record)] = [heard.losses, weights, Launches.replayed]
    Path(folder, f"report-{rank}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    os._exit(0)


@pytest.mark.slow
def test_each_of_two_processes_records_its_passes(tmp_path):
    for record in ("False", "True"):
        (tmp_path / record).mkdir()
    children = start_ranks(work, str(tmp_path))
    assert [exit_code(child) for child in children] == [0, 0]
    reports = [json.loads((tmp_path / f"report-{rank}.json").read_text()) for rank in range(2)]
    losses, weights, _ = reports[0]["False"]
    for rank, report in enumerate(reports):
        found, of_rank, replays = report["True"]
        assert found == pytest.approx(losses if rank == 0 else [], rel=EXACT)
        assert of_rank == pytest.approx(weights, rel=1e-4)
        assert replays > 0


@pytest.mark.parametrize(("share", "is_recorded"), [(2.5, True), (1.5, False)])
def test_passes_are_recorded_if_graphs_have_the_memory_of_a_second_pass(
    share, is_recorded, tmp_path, monkeypatch
):
    needed: list[float] = []
    choose = memory.choose

    def noted(requested: Any, costs: Any, available: float, longest: int, **more: Any) -> Any:
        needed.append(costs[0][1] * requested.rows * longest)
        return choose(requested, costs, available, longest, **more)

    monkeypatch.setattr(memory, "choose", noted)
    learnt(tmp_path, max_steps=1)
    monkeypatch.setattr(memory, "_available", lambda *args: share * needed[0])
    found, _ = learnt(tmp_path, max_steps=1)
    assert ["Passes are not recorded" in notice for notice in found.notices] == [True] * (
        not is_recorded
    )
