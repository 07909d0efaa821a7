"""The source of the first non-finite number of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peftkit.errors import PeftkitError, RunError, first_few
from peftkit.execution.world import Part, Rows
from peftkit.files.disk import write_json
from peftkit.files.tensors import non_finite

DIAGNOSIS = "diagnosis.json"
_few = partial(first_few, limit=6, separator=", ")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The content of diagnosis.json.

    Attributes:
        step: Counted from 1; the weights are those before it.
        loss: As text, since JSON knows no NaN.
        grad_norm: Likewise.
        rows: Sources of the step's rows.
        module: Path of the first module whose output is not finite; None: all outputs are finite.
        module_type: Its class.
        module_rows: Sources of the rows in its batch.
        gradients: Names of parameters with non-finite gradients.
        parameters: Names of non-finite parameters, frozen ones included.
    """

    step: int
    loss: str
    grad_norm: str
    rows: list[str]
    module: str | None
    module_type: str | None
    module_rows: list[str]
    gradients: list[str]
    parameters: list[str]

    def summary(self) -> str:
        """Return the lines for an error message."""
        lines = []
        if self.module is not None:
            lines.append(f"First non-finite output: {self.module} ({self.module_type})")
        lines.append(f"On the rows: {_few(self.rows if self.module is None else self.module_rows)}")
        if self.parameters:
            lines.append(f"Non-finite before the step already: {_few(self.parameters)}")
        elif self.gradients:
            lines.append(f"Non-finite gradients: {_few(self.gradients)}")
        return "\n".join(lines)


class NonFiniteError(Exception):
    """A step's loss or gradient is not finite; the weights are unchanged."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        super().__init__(diagnosis.summary())
        self.diagnosis = diagnosis


def diagnose(
    model: nn.Module,
    run_batch: Callable[[Rows], Tensor],
    passes: Sequence[tuple[Part, bool]],
    *,
    step: int,
    loss: float,
    grad_norm: float,
    to_the_end: bool = False,
) -> Diagnosis:
    """Run a step's rows once more, with a hook on every module.

    Args:
        run_batch: Computes the summed loss of rows; the generators are already restored.
        passes: The rows of the step, as `Parallel.align` returned them.
        to_the_end: Run all passes: other processes wait for this one in each.
    """
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    module, module_rows = None, list[Any]()
    for rows, is_real in passes:
        with _first_non_finite(model) as seen, torch.no_grad():
            total = run_batch(rows)
        if is_real and module is None and (seen or not torch.isfinite(total)):
            module = seen[0] if seen else ("the loss", "of the task")
            module_rows = list(rows)
            if not to_the_end:
                break
    return Diagnosis(
        step=step,
        loss=repr(loss),
        grad_norm=repr(grad_norm),
        rows=sources([row for rows, is_real in passes if is_real for row in rows]),
        module=module[0] if module else None,
        module_type=module[1] if module else None,
        module_rows=sources(module_rows),
        gradients=non_finite(gradients),
        parameters=non_finite(dict(model.named_parameters())),
    )


def sources(rows: Rows) -> list[str]:
    """Return each row's source, such as train.jsonl:7."""
    return [str(getattr(row, "source", f"row {row!r:.40}")) for row in rows]


@contextlib.contextmanager
def _first_non_finite(model: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """Yield a list that gets the (path, class) of the first module with a non-finite output."""
    seen: list[tuple[str, str]] = []

    def hook_of(path: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            floats = (tensor for tensor in _tensors(output) if tensor.is_floating_point())
            if not seen and not all(bool(torch.isfinite(tensor).all()) for tensor in floats):
                seen.append((path or "(the model)", type(module).__name__))

        return hook

    handles = [m.register_forward_hook(hook_of(path)) for path, m in model.named_modules()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def written_error(diagnosis: Diagnosis, folder: Path, rank: str, last: Path | None) -> RunError:
    """Write diagnosis.json and return the error that ends the run.

    Args:
        rank: Prefix of the file's name.
        last: The newest checkpoint.
    """
    path = folder / f"{rank}{DIAGNOSIS}"
    try:
        write_json(asdict(diagnosis), path)
        details = f"Details: {path}"
    except PeftkitError as problem:
        details = f"The details could not be written: {problem}"
    return RunError(
        f"step {diagnosis.step} has a loss of {diagnosis.loss} and a gradient norm of "
        f"{diagnosis.grad_norm}: stopped before the weights were changed",
        found=f"{diagnosis.summary()}\n{details}\n"
        + (f"Last good checkpoint: {last}" if last else "No checkpoint was saved before."),
        fix="Check these rows, lower train.learning_rate, or try base.dtype: fp32.",
    )
