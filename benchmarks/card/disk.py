"""Runs from a checkpoint on disk: a default run's micro-batches, smaller cards, GRPO.

Weights are random; loading, planning, placing and packing are those of `peftkit run`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.card.job import (
    Heard,
    Job,
    Line,
    capped,
    left_clean,
    relative_difference,
    used_bytes,
    verdict,
)
from benchmarks.gpu import peak_of, share_of_peak
from benchmarks.workers import ROOT, work
from peftkit import run_recipe
from peftkit.config.schema import from_dict
from peftkit.events import Event, RolledOut, StepDone
from peftkit.execution.out_of_memory import one_line
from peftkit.kernels.device import gpu_of
from peftkit.recipe import Recipe

GB = 1e9
LOSS_CLOSE = 2e-2
"""Relative difference of losses in 16 bits."""
SECONDS = 900
"""Time limit of writing a checkpoint."""
RANK = 16
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
PACKED: dict[str, dict[str, Any]] = {
    "as planned": {},
    "keep": {"gradient_checkpointing": False},
    "recompute": {"gradient_checkpointing": True},
    "as planned, compiled": {"compile": True},
}
"""Train settings of a default run's micro-batches."""
GRPO_STEPS, GRPO_PROMPTS, GRPO_ANSWERS = 5, 2, 8
LEFT_BYTES = 16 << 20
"""Bytes that may be left between two steps of GRPO: half of a workspace of cuBLAS."""


def job_of(job: Job, target: Path) -> dict[str, Any]:
    """Return the job of the worker that writes the checkpoint."""
    layers = {} if job.large_layers is None else {"num_hidden_layers": job.large_layers}
    dtype = DTYPES[str(job.dtype).removeprefix("torch.")]
    device = job.device.type
    return {
        "shape": job.large,
        "sizes": layers,
        "dtype": dtype,
        "device": device,
        "target": str(target.resolve()),
    }


def checkpoint_of(job: Job) -> Path:
    """Return the folder of the checkpoint, which is written first if it is missing."""
    layers = "" if job.large_layers is None else f"-{job.large_layers}-layers"
    folder = job.checkpoint or job.folder / f"checkpoint-{job.large}{layers}"
    weights = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not any(file.exists() for file in weights):
        job.folder.mkdir(parents=True, exist_ok=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # another process: the memory of its CUDA context would count as used here
        found = work("checkpoint", job_of(job, folder), job.folder, seconds=SECONDS)
        if "failed" in found:
            raise RuntimeError(f"The checkpoint was not written: {found['failed']}")
    return folder.resolve()


def rows_of_chat(job: Job) -> list[list[int]]:
    """Return the token ids of rows whose lengths vary as those of conversations do.

    The longest has the first of `large_lengths`, the shortest an eighth of it; with `fixed`, all
    rows have the same length.
    """
    if job.rows is not None:
        lines = job.rows.read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["input_ids"] for line in lines]
    rng, longest = random.Random(0), job.large_lengths[0]
    rows: list[list[int]] = []
    for _ in range(job.batch_size * job.num_steps):
        size = longest if job.fixed else round(longest * 8 ** -rng.random())
        rows.append([rng.randrange(5, 300) for _ in range(max(size, 4))])
    return rows


def write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as JSON Lines; return the file's absolute name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file.resolve())


def text_rows(job: Job) -> str:
    """Write the rows as texts of the checkpoint's words."""
    texts = ({"text": " ".join(f"w{token}" for token in row)} for row in rows_of_chat(job))
    return write_rows(job.folder / "texts.jsonl", list(texts))


def _recipe(job: Job, rows: str, name: str, **changes: Mapping[str, Any]) -> Recipe:
    """Return a recipe of QLoRA from the checkpoint and a file of rows, with changed sections."""
    number = len(list(job.folder.glob(f"{name}-*")))
    spec: dict[str, dict[str, Any]] = {
        "base": {"model": str(checkpoint_of(job)), "quantize": "nf4", "store": "off"},
        "method": {"type": "lora", "rank": RANK},
        "data": {"train": rows, "max_length": job.large_lengths[0] + 2},
        "train": {
            "output_dir": str(job.folder / f"{name}-{number}"),
            "batch_size": job.batch_size,
            "epochs": 1,
            "learning_rate": 2e-4,
            "save_every": None,
            "eval_every": None,
        },
    }
    for section, values in changes.items():
        spec[section] = {**spec.get(section, {}), **values}
    return from_dict(Recipe, spec, f"the part {name}")


def packed(job: Job) -> Iterator[Line]:
    """Default runs from the checkpoint in nf4, with packed rows: speed, and equal losses."""
    yield "run", "tokens/s", "of the peak", "peak GB", "losses", "plan", "notices", "ended", "well"
    data, expected = text_rows(job), list[float]()
    for name, settings in PACKED.items():
        if "compile" in settings and job.device.type != "cuda":
            settings = {"compile": "auto"}
        heard, ended = Heard(), "well"
        with left_clean():
            try:
                run_recipe(_recipe(job, data, "packed", train=settings), on_event=heard)
            except Exception as error:
                ended = one_line(error)[:160]
        figures = _figures(job, heard)
        expected = expected or heard.losses
        is_same = ended == "well" and relative_difference(heard.losses, expected) <= LOSS_CLOSE
        well = verdict(is_same)
        yield name, *figures, heard.plan, " ".join(heard.notices)[:160], ended, well


def _figures(job: Job, heard: Heard) -> tuple[str, str, str, str]:
    if not heard.losses:
        return "", "", "", ""
    speed, rate = median(heard.speeds), peak_of(job.device_name)
    share = share_of_peak(job.large, job.large_lengths[0], RANK, speed, rate) if rate else 0.0
    losses = f"{heard.losses[0]:.3f} to {heard.losses[-1]:.3f}"
    return f"{speed:.0f}", f"{share:.0%}" if rate else "", f"{heard.peak / GB:.2f}", losses


def caps(job: Job) -> Iterator[Line]:
    """The same run with the total and the used memory of smaller cards, as planned for them."""
    columns = ("tokens/s", "of the peak", "peak GB", "losses", "plan", "notices", "ended", "well")
    yield "card GB", *columns
    gpu = gpu_of(job.device)
    if job.device.type != "cuda" or gpu is None:
        yield "-", *[""] * 4, "only CUDA's memory can be capped", "", "-", "yes"
        return
    data = text_rows(job)
    for cap in job.caps:
        if cap * GB > gpu.total(job.device):
            continue
        heard, ended = Heard(), "well"
        with capped(job.device, cap * GB):
            try:
                with left_clean():
                    gpu.restart(job.device)
                    run_recipe(_recipe(job, data, "caps"), on_event=heard)
            except Exception as error:
                ended = one_line(error)[:160]
        peak = gpu.peak(job.device)
        told = (heard.plan, " ".join(heard.notices)[:160], ended)
        well = verdict(ended == "well" and peak <= cap * GB)
        yield f"{cap:g}", *_figures(job, heard), *told, well


def grpo(job: Job) -> Iterator[Line]:
    """Five steps of GRPO: memory after each is that after the second, and the plan stays."""
    yield "step", "seconds", "rollouts", "answer tokens", "used GB after it", "notices", "well"
    rows = [{"prompt": " ".join(["w7"] * 8 + [f"w{n + 5}"])} for n in range(32)]
    data = write_rows(job.folder / "prompts.jsonl", rows)
    heard, lines, before = Heard(), list[list[Any]](), time.perf_counter()
    rolled: list[RolledOut] = []

    def listen(event: Event) -> None:
        nonlocal before
        heard(event)
        if isinstance(event, RolledOut):
            rolled.append(event)
        elif isinstance(event, StepDone):
            now = time.perf_counter()
            length = event.figures.get("length", 0.0)
            lines.append([now - before, rolled[-1].seconds, length, used_bytes(job)])
            before = now

    task = {
        "type": "grpo",
        "rewards": [{"use": f"{ROOT / 'benchmarks/workers/varied.py'}:varied"}],
        "answers": GRPO_ANSWERS,
        "max_new_tokens": job.new_tokens,
        "mask_cut": False,
    }
    train = {"max_steps": GRPO_STEPS, "batch_size": GRPO_PROMPTS}
    longest = {"max_length": 64 + job.new_tokens}
    ended = "well"
    try:
        recipe = _recipe(job, data, "grpo", task=task, train=train, data=longest)
        run_recipe(recipe, on_event=listen)
    except Exception as error:
        ended = one_line(error)[:160]
    for number, (seconds, sampling, length, used) in enumerate(lines, start=1):
        well = number < 2 or used <= lines[1][3] + LEFT_BYTES
        figures = (f"{seconds:.1f}", f"{sampling:.1f} s", f"{length:.0f}", f"{used / GB:.3f}")
        yield str(number), *figures, "", verdict(well)
    notices = " ".join(heard.notices)
    well = ended == "well" and len(lines) == GRPO_STEPS and "ran out" not in notices
    yield "run", ended, heard.plan, "", "", notices[:160], verdict(well)
