"""The reports of a run: its header and fallbacks, metrics.jsonl, and its trackers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from peftkit.adapter import adapter_paths
from peftkit.data.rows.lazy import tokens_of_each
from peftkit.events import (
    ClassReport,
    EvalDone,
    Event,
    Fallback,
    Notice,
    RolledOut,
    RunDone,
    RunStarted,
    RunStopped,
    Sampled,
    Saved,
    StepDone,
    plain,
)
from peftkit.execution.plan import Activations, ExecutionPlan
from peftkit.execution.signals import Interrupted
from peftkit.forward.attention import TrainingAttention
from peftkit.forward.fused import num_fused, why_unfused
from peftkit.kernels.device import gpu_of, peak_resident_bytes
from peftkit.kernels.fused import TRITON
from peftkit.quant.audit import audit
from peftkit.settings import TrainConfig
from peftkit.tasks.run_hooks import Run
from peftkit.train.memory import SAMPLE
from peftkit.train.step import Step

FILE, SAMPLES, ANSWERS = "metrics.jsonl", "samples.jsonl", "answers.jsonl"
RECORDED = (RunStarted, StepDone, EvalDone, Saved, Notice, RunDone, RunStopped)
Complain = Callable[[str], None]
PREFIX = "peftkit_"
"""Prefix of the names of our attention functions."""
IN_BLOCKS: Mapping[Activations, str] = {
    "keep": "",
    "selective": ", feed-forward layers recomputed",
    "recompute": ", recomputed",
    "offload": ", recomputed, inputs offloaded",
}


def lines_of(event: Event) -> tuple[str, list[dict[str, object]]]:
    """Return the file of an event, and its lines; none for events that are only printed.

    metrics.jsonl: {"event": "StepDone", "step": 1, ...} for each event. samples.jsonl: step,
    prompt, completion, reference. answers.jsonl, the answers trained on: step, prompt, completion,
    reward.
    """
    if isinstance(event, Sampled):
        return SAMPLES, [{"step": event.step, **asdict(sample)} for sample in event.samples]
    if isinstance(event, RolledOut):
        return ANSWERS, [{"step": event.step, **plain(asdict(a))} for a in event.answers]
    if isinstance(event, ClassReport):
        event_fields = {"labels": event.labels, "confusion": event.confusion}
        return FILE, [{"event": "ClassReport", "time": round(time.time(), 3), **event_fields}]
    if not isinstance(event, RECORDED):
        return FILE, []
    head = {"event": type(event).__name__, "time": round(time.time(), 3)}
    return FILE, [{**head, **plain(asdict(event))}]


class MetricsFiles:
    """Appends JSON lines for events to the files of a run.

    A resumed run appends to the same files, after a RunStarted line with its `start_step`. If two
    lines have the same step, the later one is valid. A write error ends the file, not the run.
    """

    def __init__(self, output_dir: Path, complain: Complain) -> None:
        self.folder, self._complain = output_dir, complain
        self._broken: set[str] = set()
        names = (FILE, SAMPLES, ANSWERS)
        self._cut_short = {name for name in names if _is_cut_short(output_dir / name)}

    def on_event(self, event: Event) -> None:
        """Write the event to its file, if it has one."""
        name, lines = lines_of(event)
        if not lines or name in self._broken:
            return
        text = "".join(f"{json.dumps(line, default=str)}\n" for line in lines)
        try:
            with open(self.folder / name, "a", encoding="utf-8") as file:
                file.write("\n" * (name in self._cut_short) + text)
            self._cut_short.discard(name)
        except OSError as error:
            self._broken.add(name)
            self._complain(f"{self.folder / name} is no longer written: {error}")


@contextmanager
def recording(run: Run) -> Iterator[None]:
    """Write events to the run's files and trackers within the context, on the main process."""
    if not run.world.is_main:
        yield
        return
    listeners = [*run.listeners]

    def complain(text: str) -> None:
        for listener in listeners:
            listener(Notice(text))

    run.listeners.append(MetricsFiles(run.config.output_dir, complain).on_event)
    if not (run.config.log_to or run.config.trackers):
        yield
        return
    from peftkit.train.trackers import Trackers

    trackers = Trackers(run.config, complain)
    run.listeners.append(trackers.on_event)
    try:
        yield
    finally:
        trackers.finish()


@contextmanager
def reporting_a_stop(run: Run) -> Iterator[None]:
    """Emit RunStopped if the block ends with an error or a signal."""
    try:
        yield
    except BaseException as error:
        by_request = isinstance(error, Interrupted | KeyboardInterrupt | SystemExit)
        run.say(RunStopped(run.state.step, "stopped" if by_request else "failed", str(error)))
        raise


def check_services(config: TrainConfig) -> None:
    """Check the trackers of a run before it starts.

    Raises:
        PeftkitError: A tracker is not installed.
    """
    if config.log_to or config.trackers:
        from peftkit.train.trackers import require, trackers_of

        require(trackers_of(config))


def peak_bytes(device: torch.device) -> int:
    """Return the run's peak memory: torch's allocations on a GPU, or the process's peak RSS.

    Peak RSS includes loading; 0 if the system does not report it.
    """
    gpu = gpu_of(device)
    return peak_resident_bytes() if gpu is None else gpu.peak(device)


def device_name(device: torch.device, num_processes: int) -> str:
    """Return the name of a device: "cpu", "NVIDIA H200", "2 x NVIDIA H200"."""
    gpu = gpu_of(device)
    name = str(device) if gpu is None else gpu.name(device)
    return f"{num_processes} x {name}" if num_processes > 1 else name


def run_started(run: Run, step: Step) -> RunStarted:
    """Return the header of a run."""
    paths, world = dict(run.task.paths), run.world
    if world.precision is not None:
        scaled = ", loss scaled" * step.fitting.scale.needed
        paths["precision"] = f"{world.precision} by autocast{scaled}"
    return RunStarted(
        num_steps=run.num_steps,
        start_step=run.state.step,
        num_rows=len(run.rows),
        num_trainable=sum(p.numel() for p in step.parameters.values()),
        num_parameters=audit(run.model).num_parameters,
        device=device_name(world.device, world.world_size),
        paths=_execution_paths(run.model, step, paths),
        plan=step.plan.describe(),
    )


def _execution_paths(model: nn.Module, step: Step, task_paths: Mapping[str, str]) -> str:
    """Return "attention: grouped; LoRA: 2 groups of 5 layers; blocks: compiled"."""
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    attention = str(task_paths.get("attention", attention) or "")
    paths = {"attention": attention.removeprefix(PREFIX), **adapter_paths(model)}
    if step.plan.fused_kernels and (fused := num_fused(model)):
        paths["fused"] = f"{fused} norms, gated layers and rotations"
    if (blocks := step.blocks).blocks:
        compiled = "compiled" if blocks.compiled else "not compiled"
        paths["blocks"] = f"{compiled}{IN_BLOCKS[blocks.activations]}"
    paths |= {name: path for name, path in task_paths.items() if name != "attention"}
    return "; ".join(f"{name}: {path}" for name, path in paths.items() if path)


def _is_cut_short(path: Path) -> bool:
    """Return whether a file ends in the middle of a line, as after a killed run."""
    try:
        with open(path, "rb") as file:
            file.seek(-1, 2)
            return file.read(1) != b"\n"
    except OSError:  # absent or empty
        return False


def fallbacks_of(run: Run, plan: ExecutionPlan, wrong_groups: str = "") -> list[Fallback]:
    """Return the fallbacks of a prepared run; all processes call it.

    Compilation (memory.py) and failures during the run (loop.py) are reported where they occur.

    Args:
        wrong_groups: The result of `separate_wrong_groups`.
    """
    found = [
        _groups(wrong_groups) if wrong_groups else None,
        _padding(run, plan),
        _kernels(run.model) if plan.fused_kernels else None,
        _mixers(run.model) if plan.on_gpu else None,
    ]
    samples = run.config.sample_every is not None or run.config.eval_generate
    if samples or hasattr(run.task, "roll_out"):
        found += _generation(run)
    return [*filter(None, found)]


def _groups(cause: str) -> Fallback:
    return Fallback(
        path="Adapter layers with one input are computed separately",
        cause=f"With torch {torch.__version__}, {cause}",
        cost="A step takes longer.",
        fix="Install the versions of constraints.txt, and report this.",
    )


def _padding(run: Run, plan: ExecutionPlan) -> Fallback | None:
    layout = getattr(run.task, "layout", None)
    if layout is None:
        return None
    if layout.attention is not None:
        return _long_rows(run, plan, layout.attention)
    if not (cause := layout.why_padded):
        return None
    return Fallback(
        path="Rows are padded",
        cause=cause,
        cost="Each row costs as much as the longest row of its batch.",
        fix="A smaller train.tokens_per_batch pads less.",
    )


def _long_rows(run: Run, plan: ExecutionPlan, attention: TrainingAttention) -> Fallback | None:
    """Return why batches with long rows are padded, if the run can have such batches."""
    from peftkit.forward.row_lengths import limits_of

    rows = run.rows
    longest = length = int(tokens_of_each(rows).max())
    if documents := [max(getattr(rows[n], "lengths", (0,))) for n in range(min(SAMPLE, len(rows)))]:
        length = max(documents) or longest
    most = longest * min(plan.rows, len(rows))
    most = most if plan.tokens is None else min(most, max(plan.tokens, longest))
    if attention.can_share(length, most):
        return None
    limits = limits_of(run.model)
    bounds = {"rows": limits.document, "batches": limits.sequence}
    found = [f"{kind} up to {n:,} tokens" for kind, n in bounds.items() if n is not None]
    return Fallback(
        path="Batches with long rows are padded",
        cause=f"{type(run.model).__name__} isolates documents only in {', '.join(found)}.",
        cost="Each row of such a batch costs as much as its longest row.",
        fix="A lower data.max_length or train.tokens_per_batch avoids it.",
    )


def _kernels(model: nn.Module) -> Fallback | None:
    if (missing := TRITON.missing) is not None:
        return missing
    if not (cause := why_unfused(model)):
        return None
    return Fallback(
        path="Some modules run without fused kernels",
        cause=cause,
        cost="torch computes them by several kernels, with more memory traffic.",
        fix="If the library was updated, install the versions of constraints.txt.",
    )


def _mixers(model: nn.Module) -> Fallback | None:
    """Return which packages a GPU lacks for linear attention, state spaces and convolutions."""
    from peftkit.forward.mixer_kernels import missing_kernels

    if not (names := missing_kernels(model)):
        return None
    return Fallback(
        path="Mixers of this model run without their GPU kernels",
        cause=f"Not installed: {', '.join(names)}.",
        cost="transformers computes them in PyTorch, which takes several times as long.",
        fix=f"Install them: pip install --no-build-isolation {' '.join(names)}",
    )


def _generation(run: Run) -> list[Fallback]:
    """Return why completions during the run are slower."""
    from peftkit.tasks.completions import CompletingTask

    task = run.task
    if not isinstance(task, CompletingTask):
        return []
    from peftkit.inference.open_engine import generation_fallbacks

    if (layout := getattr(task, "layout", None)) is not None:
        layout.forget()  # the trial of the engine must not use the layout of a training batch
    return generation_fallbacks(run.model, task.tokenizer)
