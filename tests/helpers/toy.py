"""A model of a few hundred parameters and a task of a few tokens, to train in milliseconds."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peftkit.data.pack import padded
from peftkit.events import Event, Notice, Saved, StepDone
from peftkit.execution.signals import StopRequest
from peftkit.execution.state import Result
from peftkit.settings import TrainConfig
from peftkit.tasks.base import Task
from peftkit.train.loop import fit
from peftkit.train.start import new_run
from peftkit.train.step import Step

VOCABULARY = 31
COUNTED = 2
"""Passes in training mode before the first step of a fresh run: what they save is counted."""


@dataclass(frozen=True, slots=True)
class Row:
    """As the real task's rows: labels of -100 are not learnt."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    source: str


def make_rows(count: int, *, first: int = 0) -> list[Row]:
    """Rows of 3 to 9 tokens, of which the first is not learnt."""
    rows = []
    for index in range(first, first + count):
        ids = tuple((7 * index + 5 * k * k + 3) % VOCABULARY for k in range(3 + index % 7))
        labels = (-100, *((3 * i + 1) % VOCABULARY for i in ids[1:]))
        rows.append(Row(ids, labels, f"train.jsonl:{index + 1}"))
    return rows


class Toy(nn.Module):
    """A frozen base with a low-rank update and dropout."""

    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator, dtype=dtype) * 0.5)

        self.embed = nn.Embedding(VOCABULARY, 8, _weight=normal(VOCABULARY, 8))
        self.base = nn.Linear(8, VOCABULARY)
        self.base.weight, self.base.bias = normal(VOCABULARY, 8), normal(VOCABULARY)
        self.requires_grad_(False)
        self.dropout = nn.Dropout(dropout)
        self.lora_A = nn.Linear(8, 4, bias=False)
        self.lora_B = nn.Linear(4, VOCABULARY, bias=False)
        self.lora_A.weight, self.lora_B.weight = normal(4, 8), normal(VOCABULARY, 4)
        self.magnitude = nn.Parameter(torch.ones(VOCABULARY, dtype=dtype))

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.embed(ids))
        return (self.base(x) + self.lora_B(self.lora_A(self.dropout(x)))) * self.magnitude


class ToyTask(Task):
    """Right-padded batches, summed cross-entropy."""

    predicts_tokens = True

    def __init__(self) -> None:
        """Need no model and no files."""

    def spans(self, row: Row) -> list[tuple[str, str]]:
        return [("", str(row.input_ids))]

    def training(self, model: nn.Module, plan: Any = None) -> AbstractContextManager[object]:
        return nullcontext()

    def collate(self, rows: Sequence[Row]) -> Mapping[str, Tensor]:
        width = max(len(row.input_ids) for row in rows)
        padded = [(row, width - len(row.input_ids)) for row in rows]
        return {
            "input_ids": torch.tensor([[*r.input_ids] + [0] * n for r, n in padded]),
            "labels": torch.tensor([[*r.labels] + [-100] * n for r, n in padded]),
        }

    def num_positions(self, rows: Sequence[Row]) -> int:
        return len(rows) * padded(*rows)

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        return int((batch["labels"] != -100).sum())

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(batch["input_ids"]).float()
        targets = batch["labels"].flatten()
        return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")[None]


def step_of(model: nn.Module, task: Any, **changes: Any) -> Step:
    """Return a step alone, without a loop around it."""
    config = config_of(Path("unused"), **{"batch_size": 8, **changes})
    run = new_run(model, task, make_rows(2), [], config, stop=StopRequest())
    return Step(run)


@dataclass
class Played:
    """A run that was played, to its end or to an exception."""

    model: nn.Module
    events: list[Event]
    result: Result | None = None
    error: BaseException | None = None
    losses: list[float] = field(init=False)
    notices: list[str] = field(init=False)
    saved: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.losses = [e.loss for e in self.events if isinstance(e, StepDone)]
        self.notices = [e.text for e in self.events if isinstance(e, Notice)]
        self.saved = [e.path.name for e in self.events if isinstance(e, Saved)]

    def failed(self, kind: Any, *texts: str) -> Any:
        """Return the error, which must be of a kind and have these texts."""
        assert isinstance(self.error, kind), self.error
        assert [text for text in texts if text not in str(self.error)] == []
        return self.error

    @property
    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}


def config_of(folder: Path, **changes: Any) -> TrainConfig:
    """14 rows in steps of 4: 4 steps an epoch, the last of 2 rows; 12 steps in all."""
    settings: dict[str, Any] = {
        "output_dir": folder,
        "epochs": 3.0,
        "batch_size": 2,
        "gradient_accumulation": 2,
        "learning_rate": 0.02,
        "warmup_ratio": 0.2,
        "weight_decay": 0.1,
        "save_every": 1,
        "eval_every": 3,
        "tokens_per_batch": None,
    }
    return TrainConfig(**{**settings, **changes})


def play(
    folder: Path,
    *,
    model: nn.Module | None = None,
    task: Any = None,
    rows: Sequence[Any] | None = None,
    eval_rows: Sequence[Any] | None = None,
    on_event: Callable[[Event], None] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    allow_changes: Sequence[str] = (),
    identity: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Played:
    """Run `fit` on the toy; whatever it raises is in `error`."""
    model = model or Toy()
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if on_event is not None:
            on_event(event)

    result, error = None, None
    try:
        result = fit(
            model,
            task or ToyTask(),
            make_rows(14) if rows is None else rows,
            make_rows(3, first=50) if eval_rows is None else eval_rows,
            config_of(folder, **changes),
            resume=resume,
            overwrite=overwrite,
            allow_changes=allow_changes,
            identity=identity,
            on_event=listen,
        )
    except BaseException as problem:
        error = problem
    return Played(model, events, result, error)


class Crash(Exception):
    """Stands for whatever ends a process."""


def crash_after(step: int) -> Callable[[Event], None]:
    """Return a listener that ends the run once the checkpoint of a step is there."""

    def listen(event: Event) -> None:
        if isinstance(event, Saved) and event.path.name == f"step-{step}":
            raise Crash

    return listen


def names(folder: Path) -> list[str]:
    """Return what lies among a run's checkpoints."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def begin(folder: Path, steps: int = 6) -> None:
    """Train some steps with dropout, with checkpoints of the last two, and crash."""
    crash = crash_after(steps)
    play(folder, model=Toy(dropout=0.3), eval_every=None, on_event=crash)


def go_on(folder: Path) -> Played:
    """Resume what `begin` began."""
    return play(folder, model=Toy(dropout=0.3), eval_every=None, resume=True)


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether tensors are equal to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class CausalTask(ToyTask):
    """The loss of a real causal model."""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        return logits.logsumexp(-1).sum()[None]


class GradientCheckpointingLayer(nn.Module):
    """As transformers' layers of this name: marked, and recomputed through the mark."""

    gradient_checkpointing = False

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.scale = nn.Parameter(torch.full((8,), 0.9), requires_grad=False)
        self.shift = torch.full((8,), 0.9)  # neither parameter nor buffer, and yet no activation

    def run(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(x * self.scale) * self.shift  # saves the tanh, (..., 8)
        return self.drop(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(self.run, x)
        return self.run(x)


class Deep(Toy):
    """Two blocks between embedding and head; what trains lies before them as well."""

    def __init__(self, dropout: float = 0.0, *, in_blocks: float = 0.0) -> None:
        super().__init__(dropout)
        self.start = nn.Parameter(torch.zeros(8))
        self.blocks = nn.Sequential(*(GradientCheckpointingLayer(in_blocks) for _ in range(2)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.embed(ids) + self.start)
        return (self.base(x) + self.lora_B(self.lora_A(self.dropout(x)))) * self.magnitude
