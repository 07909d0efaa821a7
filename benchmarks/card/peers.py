"""Training next to TRL + PEFT and Unsloth on one card, from one checkpoint of random weights.

All sides train the same rows in the same order with the same rank, learning rate and AdamW, each
in a process of its own, in turn, several times. Tokens are real ones, without padding.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.card.disk import DTYPES, RANK, checkpoint_of, rows_of_chat
from benchmarks.card.job import Job, Line, verdict
from benchmarks.report import Spread, disagreement
from benchmarks.train import LOSS_TOLERANCE, tokens_of_steps
from benchmarks.workers import WorkerFailed, work

SECONDS = 400
"""Time limit of one run, loading included."""
QUIET = {"UNSLOTH_DISABLE_STATISTICS": "1"}
"""Unsloth otherwise reports its use over the network."""


class Side(NamedTuple):
    """A way to train: a worker, the packages of its environment, and changes of the job."""

    worker: str
    needs: tuple[str, ...]
    changes: Mapping[str, Any]


TRL, LIGER, UNSLOTH = ("trl", "peft"), ("trl", "peft", "liger_kernel"), ("unsloth",)
FLASH = {"attention": "flash_attention_2", "padding_free": True}
SIDES: dict[str, Side] = {
    "ours": Side("ours", (), {}),
    "unsloth": Side("unsloth", UNSLOTH, {"checkpointing": "unsloth", "environ": QUIET}),
    "trl": Side("trl", TRL, {"recompute": True}),
    "trl-liger": Side("trl", LIGER, {"recompute": True, "liger": True}),
    "ours-keep": Side("ours", (), {"train": {"gradient_checkpointing": False}}),
    "ours-recompute": Side("ours", (), {"train": {"gradient_checkpointing": True}}),
    "ours-compiled": Side("ours", (), {"train": {"compile": True}}),
    "ours-eager": Side("ours", (), {"train": {"record": False}}),
    "unsloth-torch": Side("unsloth", UNSLOTH, {"checkpointing": True, "environ": QUIET}),
    "unsloth-keep": Side("unsloth", UNSLOTH, {"checkpointing": False, "environ": QUIET}),
    "unsloth-packed": Side(
        "unsloth", UNSLOTH, {"checkpointing": "unsloth", "packing": True, "environ": QUIET}
    ),
    "trl-flash-liger": Side(
        "trl", (*LIGER, "flash_attn"), {"recompute": True, "liger": True, **FLASH}
    ),
    "trl-keep": Side("trl", TRL, {}),
}
"""The defaults first: if time runs out, they are measured."""


def missing(python: str, packages: Sequence[str]) -> str:
    """Return what an environment lacks, or ""."""
    if not packages:
        return ""
    if not python:
        return f"no Python with {', '.join(packages)} is given"
    code = (
        "import sys, importlib.util as u; print(*(n for n in sys.argv[1:] if not u.find_spec(n)))"
    )
    try:
        found = subprocess.run(
            [python, "-c", code, *packages], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{python} does not run: {type(error).__name__}"
    lacking = found.stdout.split()
    return f"not installed in {python}: {', '.join(lacking)}" if lacking else ""


def peers(job: Job) -> Iterator[Line]:
    """Unsloth, TRL + PEFT with and without Liger, and peftkit in nf4 on the same rows."""
    yield "side", "run", "tokens/s", "allocated GB", "reserved GB", "losses", "ratio", "well"
    pythons = {"ours": sys.executable, "trl": job.peers, "unsloth": job.unsloth or ""}
    sides: dict[str, Side] = {}
    for name, side in SIDES.items():
        if job.sides and name not in job.sides:
            continue
        if lacking := missing(pythons[side.worker], side.needs):
            yield name, "skipped", "", "", "", lacking, "", "-"
        else:
            sides[name] = side
    rows = [{"input_ids": ids, "labels": ids} for ids in rows_of_chat(job)]
    asked = {
        "source": str(checkpoint_of(job)),
        "task": "causal_lm",
        "quantize": "nf4",
        "dtype": DTYPES[str(job.dtype).removeprefix("torch.")],
        "device": job.device.type,
        "rank": RANK,
        "batch_size": job.batch_size,
        "learning_rate": 2e-4,
        "rows": rows,
    }
    tokens = tokens_of_steps(rows, job.batch_size)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for repeat in range(1, job.repeats + 1):
        for name, side in sides.items():
            if any("failed" in facts for facts in runs[name]):
                continue
            facts = _run(asked | dict(side.changes), side.worker, pythons[side.worker], job)
            runs[name].append(facts)
            yield name, str(repeat), *_figures(facts, tokens), "", ""
    for name, results in runs.items():
        yield name, "all", *_summary(name, results, runs.get("ours", []), tokens)


def _run(asked: Mapping[str, Any], worker: str, python: str, job: Job) -> dict[str, Any]:
    try:
        return work(worker, asked, job.folder, python=python, seconds=SECONDS)
    except WorkerFailed as error:
        return {"failed": str(error).strip().splitlines()[-1]}


def speed(facts: Mapping[str, Any], tokens: Sequence[int]) -> float:
    """Return tokens/s after the first step; of all steps if rows were packed into others."""
    seconds = facts["step_seconds"]
    if len(seconds) != len(tokens) or len(seconds) == 1:
        return sum(tokens) / sum(seconds)
    return sum(tokens[1:]) / sum(seconds[1:])


def _figures(facts: Mapping[str, Any], tokens: Sequence[int]) -> tuple[str, str, str, str]:
    if "failed" in facts:
        return "", "", "", f"failed: {facts['failed'][:160]}"
    memory = (facts.get(name, 0) / 1e9 for name in ("peak_bytes", "peak_reserved_bytes"))
    losses = " ".join(f"{loss:.3f}" for loss in facts["losses"])
    return f"{speed(facts, tokens):.0f}", *(f"{value:.2f}" for value in memory), losses


def _summary(
    name: str,
    results: Sequence[Mapping[str, Any]],
    ours: Sequence[Mapping[str, Any]],
    tokens: Sequence[int],
) -> Line:
    """Return a side's median and range, how far its losses are, and ours relative to its speed."""
    is_ours = name.startswith("ours")
    failed = next((facts["failed"] for facts in results if "failed" in facts), "")
    if failed or not results:
        return "", "", "", f"failed: {failed[:160]}", "", verdict(False) if is_ours else "-"
    speeds = Spread.of([speed(facts, tokens) for facts in results])
    allocated, reserved = (
        median(facts.get(key, 0) for facts in results) / 1e9
        for key in ("peak_bytes", "peak_reserved_bytes")
    )
    told, ratio, is_well = "", "", True
    if name != "ours" and ours and "failed" not in ours[0]:
        same_steps = len(results[0]["losses"]) == len(ours[0]["losses"])
        told = "other steps: losses are not compared"
        if same_steps:
            apart = disagreement(ours[0]["losses"], results[0]["losses"])
            told, is_well = f"{apart:.2%} apart", apart <= LOSS_TOLERANCE
        if results[0]["num_trainable"] != ours[0]["num_trainable"]:
            told, is_well = f"{told}; trains another number of values", False
        if is_well:
            of_ours = median(speed(facts, tokens) for facts in ours if "failed" not in facts)
            ratio = f"ours is {of_ours / speeds.median:.2f} x"
    memory = (f"{allocated:.2f}", f"{reserved:.2f}")
    return speeds.show(), *memory, told, ratio, verdict(is_well)
