"""The same work on the CPU and on the simulated card."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import shapes
from peftkit.adapter import Adapter, attach
from peftkit.data.pack import Row
from peftkit.events import EvalDone, Event, Notice, RunStarted, StepDone
from peftkit.methods.base import Method
from peftkit.methods.lora import LoRA
from peftkit.quant.quantize import quantize_model
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.tokens import CausalLM
from peftkit.train.loop import fit
from tests.helpers.families import FAMILIES
from tests.simulated_gpu.simulation import on_cpu

CLOSE = 2e-5
"""Of losses of about 6: float32 sums in another order, for on a card rows are padded."""
SIZES = (12, 30, 7, 22)


@dataclass
class Heard:
    """What a run said."""

    losses: list[float] = field(default_factory=list)
    evals: list[float] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    paths: str = ""
    device: str = ""

    def __call__(self, event: Event) -> None:
        """Listen."""
        if isinstance(event, StepDone):
            self.losses.append(event.loss)
        elif isinstance(event, EvalDone):
            self.evals.append(event.metrics["loss"])
        elif isinstance(event, Notice):
            self.notices.append(event.text)
        elif isinstance(event, RunStarted):
            self.paths, self.device = event.paths, event.device

    @property
    def figures(self) -> list[float]:
        """All losses."""
        return [*self.losses, *self.evals]


def make_rows(packed: bool = False, count: int = 8) -> list[Row]:
    """Return rows of several lengths, or of two documents each."""
    generator, rows = torch.Generator().manual_seed(1), []
    for number in range(count):
        size = SIZES[number % len(SIZES)]
        ids = tuple(torch.randint(5, 300, (size,), generator=generator).tolist())
        labels = (-100, *ids[1:])
        parts = 2 if packed else 1
        rows.append(Row(ids * parts, labels * parts, (size,) * parts, f"r.jsonl:{number + 1}"))
    return rows


def make_model(
    device: str, quantize: str = "none", method: Method | None = None, family: str = "llama"
) -> tuple[Any, Adapter]:
    """Return the same model anywhere: made on the CPU, quantised where it stays."""
    torch.manual_seed(0)
    model: nn.Module = FAMILIES[family]().requires_grad_(False)
    model.to(device)
    if quantize != "none":
        quantize_model(model, quantize, compute_dtype=torch.float32)
    return model, attach(model, method or LoRA(rank=4, alpha=8))


def train(
    device: str,
    folder: Path,
    *,
    quantize: str = "none",
    method: Method | None = None,
    packed: bool = False,
    family: str = "llama",
    look: Any = None,
    resume: bool = False,
    **settings: Any,
) -> tuple[Heard, dict[str, Tensor]]:
    """Train two steps; return what was said and the trained tensors, on the CPU.

    Passes are not recorded, which rows of float32 are not anyway.

    Args:
        look: Called with the model before the run; its `read` after it.
        resume: Go on in the folder.
    """
    model, adapter = make_model(device, quantize, method, family)
    if look is not None:
        look(model)
    data = DataConfig(train="", packing=packed, max_length=64)
    task = CausalLM(model, shapes.tokenizer(), data)
    rows, heard = make_rows(packed), Heard()
    config: dict[str, Any] = {
        "output_dir": folder / device.split(":")[0],
        "max_steps": 2,
        "batch_size": 4,
        "gradient_accumulation": 2,
        "learning_rate": 0.02,
        "save_every": None,
        "compile": False,
        "record": False,
        **settings,
    }
    how = {"resume": resume, "overwrite": not resume}
    fit(model, task, rows, rows[:3], TrainConfig(**config), on_event=heard, **how)
    if look is not None:
        look.read()
    return heard, {n: on_cpu(t).clone() for n, t in adapter.state().items()}
