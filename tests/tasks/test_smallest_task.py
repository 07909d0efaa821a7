"""What a new task has to define, and that the rest follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from peftkit.adapter import attach
from peftkit.data.format import ParsedRow
from peftkit.data.records import Record
from peftkit.data.rows.encoder import RowEncoder
from peftkit.events import Event, StepDone, Table
from peftkit.methods.lora import LoRA
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.base import Task
from peftkit.tasks.config import TaskConfig
from peftkit.train.loop import fit
from tests.helpers.folders import write_rows


@dataclass(frozen=True, slots=True)
class Line:
    """A text and the number that its mean logit is drawn to."""

    input_ids: tuple[int, ...]
    number: float
    source: str


class LineEncoder(RowEncoder):
    """A row of each record with a text and a number."""

    kind = Line

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def read(self, records: Sequence[Record], where: str) -> ParsedRow[Record]:
        return ParsedRow(tuple(records), ())

    def row(self, example: Record) -> Line:
        ids = self.tokenizer(str(example.fields["text"])).input_ids
        return Line(tuple(ids), float(example.fields["number"]), example.source)


class Lines(Task):
    """Draw the mean logit of a text to a number."""

    metric_names = ("distance",)

    def build(self, model: nn.Module) -> None:
        self.rows.encoder = LineEncoder(self.tokenizer)

    def collate(self, rows: Sequence[Line]) -> dict[str, Tensor]:
        width = max(len(row.input_ids) for row in rows)
        ids = [[*row.input_ids, *[0] * (width - len(row.input_ids))] for row in rows]
        return {"ids": torch.tensor(ids), "numbers": torch.tensor([row.number for row in rows])}

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        return len(batch["numbers"])

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["ids"], use_cache=False).logits.float()
        error = logits.mean((1, 2)) - batch["numbers"]
        return torch.stack([(error**2).sum(), error.detach().abs().sum()])


class LinesConfig(TaskConfig):
    """The section of a recipe."""

    task_type: ClassVar[str | None] = None
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    task: ClassVar = Lines

    type: Literal["lines"] = "lines"


MOST = 5
"""Names that a task has to define."""


def test_a_task_of_few_names_reads_learns_and_evaluates(llama, tokenizer, tmp_path):
    names = [name for name in vars(Lines) if not name.startswith("_")]
    assert len(names) <= MOST, names
    file = tmp_path / "rows.jsonl"
    rows = [{"text": f"row {n}", "number": n % 3} for n in range(12)]
    write_rows(file, rows)
    attach(llama, LoRA(rank=4))
    heard: list[Event] = []
    data = DataConfig(train=str(file))
    task = LinesConfig().on(llama, tokenizer, data, on_event=heard.append)
    encoded = task.load(str(file))
    assert [event.summary for event in heard if isinstance(event, Table)] == [
        f"{file}: 12 rows read, 0 cut, 0 dropped"
    ]
    before = task.metrics(llama, encoded)
    config = TrainConfig(output_dir=tmp_path / "run", max_steps=20, learning_rate=0.02)
    result = fit(llama, task, encoded, encoded, config, on_event=heard.append)
    after = task.metrics(llama, encoded)
    assert after["loss"] < 0.8 * before["loss"]
    assert after["distance"] < before["distance"]
    assert "distance" in next(e for e in heard if isinstance(e, StepDone)).figures
    assert abs(result.metrics["eval_loss"] - after["loss"]) < 1e-5
