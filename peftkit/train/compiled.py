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

import torch

from peftkit.adapter import refresh_copies
from peftkit.execution import rng
from peftkit.execution.out_of_memory import attempt, is_compile_error, is_out_of_memory, one_line
from peftkit.execution.world import Rows
from peftkit.forward.noise import LOSS, Figures, blocks_rounded, difference_of
from peftkit.kernels.device import gpu_of
from peftkit.tasks.run_hooks import Run
from peftkit.train.step import Step


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
    blocks = step.blocks
    blocks.compile(False)
    with rng.untouched(run.model, run.world.device), _without_zeros(run, step):
        eager = _figures(run, step, rows)
        with blocks_rounded(run.model, blocks.blocks):
            noisy = _figures(run, step, rows)
        blocks.compile()
        compiled = _figures(run, step, rows)
    problem = difference_of(compiled, eager, noisy)
    by = f"The compiler of torch {torch.__version__} computes other numbers than eager blocks:"
    return f"{by} {problem}" if problem else ""


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
