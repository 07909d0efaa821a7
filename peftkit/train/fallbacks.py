"""The fallbacks of a run, reported before its first step: padding, kernels, mixers, generation.

Compilation (train/memory.py) and failures during the run (train/loop.py) are reported where they
occur.
"""

from __future__ import annotations

import torch

from peftkit.data.rows.lazy import tokens_of_each
from peftkit.events import Fallback
from peftkit.forward.attention import TrainingAttention
from peftkit.forward.fused import why_unfused
from peftkit.forward.row_lengths import limits_of
from peftkit.kernels.fused import TRITON
from peftkit.train.memory import SAMPLE
from peftkit.train.step import Trainer


def fallbacks_of(trainer: Trainer, wrong_groups: str = "") -> list[Fallback]:
    """Return the fallbacks of a prepared run; all processes call it.

    Args:
        wrong_groups: What `separate_wrong_groups` returned.
    """
    return [
        *_groups(wrong_groups),
        *_padding(trainer),
        *_kernels(trainer),
        *_mixers(trainer),
        *_generation(trainer),
    ]


def _groups(cause: str) -> list[Fallback]:
    if not cause:
        return []
    return [
        Fallback(
            path="Adapter layers with one input are computed separately",
            cause=f"With torch {torch.__version__}, {cause}",
            cost="A step takes longer.",
            fix="Install the versions of constraints.txt, and report this.",
        )
    ]


def _padding(trainer: Trainer) -> list[Fallback]:
    layout = getattr(trainer.task, "layout", None)
    if layout is None:
        return []
    if layout.attention is not None:
        return _long_rows(trainer, layout.attention)
    if not (cause := layout.why_padded):
        return []
    return [
        Fallback(
            path="Rows are padded",
            cause=cause,
            cost="Each row costs as much as the longest row of its batch.",
            fix="A smaller train.tokens_per_batch pads less.",
        )
    ]


def _long_rows(trainer: Trainer, attention: TrainingAttention) -> list[Fallback]:
    """Return why batches with long rows are padded, if the run can have such batches."""
    rows, plan = trainer.run.rows, trainer.plan
    longest = length = int(tokens_of_each(rows).max())
    if documents := [max(getattr(rows[n], "lengths", (0,))) for n in range(min(SAMPLE, len(rows)))]:
        length = max(documents) or longest
    most = longest * min(plan.rows, len(rows))
    most = most if plan.tokens is None else min(most, max(plan.tokens, longest))
    if attention.can_share(length, most):
        return []
    limits = limits_of(trainer.model)
    bounds = {"rows": limits.document, "batches": limits.sequence}
    found = [f"{kind} up to {n:,} tokens" for kind, n in bounds.items() if n is not None]
    return [
        Fallback(
            path="Batches with long rows are padded",
            cause=f"{type(trainer.model).__name__} isolates documents only in {', '.join(found)}.",
            cost="Each row of such a batch costs as much as its longest row.",
            fix="A lower data.max_length or train.tokens_per_batch avoids it.",
        )
    ]


def _kernels(trainer: Trainer) -> list[Fallback]:
    if not trainer.plan.fused_kernels:
        return []
    if (missing := TRITON.missing) is not None:
        return [missing]
    if not (cause := why_unfused(trainer.model)):
        return []
    return [
        Fallback(
            path="Some modules run without fused kernels",
            cause=cause,
            cost="torch computes them by several kernels, with more memory traffic.",
            fix="If the library was updated, install the versions of constraints.txt.",
        )
    ]


def _mixers(trainer: Trainer) -> list[Fallback]:
    """Return which packages a GPU lacks for linear attention, state spaces and convolutions."""
    if not trainer.plan.on_gpu:
        return []
    from peftkit.forward.mixer_kernels import missing_kernels

    if not (names := missing_kernels(trainer.model)):
        return []
    return [
        Fallback(
            path="Mixers of this model run without their GPU kernels",
            cause=f"Not installed: {', '.join(names)}.",
            cost="transformers computes them in PyTorch, which takes several times as long.",
            fix=f"Install them: pip install --no-build-isolation {' '.join(names)}",
        )
    ]


def _generation(trainer: Trainer) -> list[Fallback]:
    """Return why completions during the run are slower, if it generates any."""
    from peftkit.tasks.completions import CompletingTask

    config, task = trainer.run.config, trainer.task
    samples = config.sample_every is not None or config.eval_generate
    if not (isinstance(task, CompletingTask) and (samples or hasattr(task, "sampler"))):
        return []
    from peftkit.inference.open_engine import generation_fallbacks

    if (layout := getattr(task, "layout", None)) is not None:
        layout.forget()  # the trial of the engine must not use the layout of a training batch
    return generation_fallbacks(trainer.model, task.tokenizer)
