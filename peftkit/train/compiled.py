"""Whether compiled blocks compute the loss and the gradients of eager ones.

The first micro-batch goes through the model three times, with the same random numbers: eagerly,
eagerly with rounding noise, and compiled. The noise multiplies each block's output by 1 + eps u,
with random u in [-1, 1] and the eps of the compute dtype: another last bit, as another order of the
same operations gives it (Parker, Monte Carlo arithmetic, 1997). Its effect on a gradient is what
rounding does to this gradient, with this model, dtype and data; it includes tokens that change
their experts. A compiled gradient may differ by MARGIN times as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch
from torch import Tensor

from peftkit.adapter import refresh_copies
from peftkit.execution import rng
from peftkit.execution.out_of_memory import attempt, is_compile_error, is_out_of_memory, one_line
from peftkit.execution.plan import compute_dtype
from peftkit.execution.world import Rows
from peftkit.forward.noise import rounding
from peftkit.kernels.checked import relative_difference
from peftkit.kernels.device import gpu_of
from peftkit.tasks.run_hooks import Run
from peftkit.train.step import Step

MARGIN = 8.0
"""Difference of compiled from eager gradients, in units of the noise: compiled code rounds the
results of about 30 operations of a block differently, in both passes, the noise only one of them,
and errors of n independent roundings grow with sqrt(n)."""

LOSS = "the loss"
Figures = dict[str, Tensor]
"""The loss, and the gradient of each trained tensor, by name."""


def why_refused(run: Run, step: Step) -> str:
    """Compile the blocks, and compare them with eager ones; return why they are refused, or "".

    Generators, buffers, weights, gradients and a GPU's peak memory are as before.
    """
    device = run.world.device
    rows = run.micro_batches(run.rows[: run.config.batch_size])[0]
    try:
        while rows:
            problem = attempt(partial(_difference, run, step, rows), _ran_out)
            if problem is not None:
                return problem
            rows = rows[: len(rows) // 2]
    except Exception as error:
        return one_line(error)
    finally:
        step.optimizer.zero_grad(set_to_none=True)
        if (gpu := gpu_of(device)) is not None:
            gpu.restart(device)
    return "Memory ran out when a row's compiled gradients were compared with its eager ones."


def _ran_out(error: Exception) -> bool:
    return is_out_of_memory(error) and not is_compile_error(error)


def _difference(run: Run, step: Step, rows: Rows) -> str:
    """Return how the compiled figures of rows differ from the eager ones; "" within the noise."""
    blocks, kind = step.blocks, run.world.device.type
    blocks.compile(False)
    with rng.untouched(run.model, run.world.device), _without_zeros(run, step):
        eager = _figures(run, step, rows)
        with run.world.autocast():
            is_mixed = torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind) if is_mixed else compute_dtype(run.model)
        with rounding(blocks.blocks, 0, torch.finfo(dtype).eps):
            noise = _distances(_figures(run, step, rows), eager)
        blocks.compile()
        compiled = _figures(run, step, rows)
    found, typical = _distances(compiled, eager), median(noise.values())
    # of tensors of a few values, the noise of one pass may be small by chance
    allowed = {name: MARGIN * max(noise[name], typical) for name in noise}
    wrong = [
        name
        for name in eager
        if not found[name] <= allowed[name] or bool(compiled[name].any()) != bool(eager[name].any())
    ]
    if not wrong:
        return ""
    worst = max(wrong, key=lambda name: found[name] / max(allowed[name], 1e-30))
    others = f" {len(wrong) - 1} more differ, too." if len(wrong) > 1 else ""
    return (
        f"The compiler of torch {torch.__version__} computes other numbers than eager blocks: "
        f"{worst if worst == LOSS else f'the gradient of {worst}'} differs by {found[worst]:.2g} "
        f"of its norm, where rounding explains {allowed[worst]:.2g}.{others}"
    )


def _distances(figures: Figures, reference: Figures) -> dict[str, float]:
    return {name: relative_difference(figures[name], reference[name]) for name in reference}


def _figures(run: Run, step: Step, rows: Rows) -> Figures:
    step.optimizer.zero_grad(set_to_none=True)
    with rng.untouched(run.model, run.world.device):
        loss = step.loss(rows)
        loss.backward()
    figures = {LOSS: loss.detach()}
    for name, parameter in step.parameters.items():
        grad = parameter.grad
        figures[name] = torch.zeros_like(parameter) if grad is None else grad.detach().clone()
    return figures


@contextmanager
def _without_zeros(run: Run, step: Step) -> Iterator[None]:
    """Move tensors of zeros by up to the learning rate within the context, as the first step does.

    With B = 0, every gradient of A is zero, whether it is computed correctly or not.
    """
    rate = run.config.learning_rate
    zeros = [p for p in step.parameters.values() if not p.any()]
    try:
        with torch.no_grad():
            for parameter in zeros:
                parameter.uniform_(-rate, rate)
        refresh_copies(run.model)
        yield
    finally:
        with torch.no_grad():
            for parameter in zeros:
                parameter.zero_()
        refresh_copies(run.model)
