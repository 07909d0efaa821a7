"""Runs on a card: training, generation, varying lengths, a released shape, the test suite."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor

from benchmarks.card.decode import NO_END
from benchmarks.card.job import (
    LIMITS,
    Heard,
    Job,
    Line,
    apart,
    capped,
    judged,
    left_clean,
    made,
    made_large,
    random_rows,
    relative_difference,
    rows_of,
    train,
    verdict,
)
from benchmarks.gpu import peak_of, share_of_peak
from benchmarks.plan import Measured, planned, reckoner_of
from benchmarks.workers import ROOT, run_group
from peftkit.errors import PeftkitError
from peftkit.execution.plan import Activations
from peftkit.forward.blocks import Blocks
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Limits
from peftkit.inference.open_engine import open_engine
from peftkit.inference.sampling import Sampling
from peftkit.kernels.device import gpu_of

LOSS_CLOSE = 2e-3
"""Relative difference in float32: other kernels sum in another order."""
LOSS_CLOSE_16_BIT = 2e-2
GRADIENTS_CLOSE = {torch.float32: 1e-2, torch.float16: 0.2, torch.bfloat16: 0.2}
"""Relative difference of an adapter's gradients: the optimizer's first steps amplify rounding."""
MODES: tuple[Activations, ...] = ("keep", "selective", "recompute", "offload")
ANSWER_ROWS = (1, 8, 64)
SUITE = ("tests/simulated_gpu/test_*.py",)
SUITE_SECONDS = 180
"""Time limit of a file."""
NO_TESTS = 5
"""pytest's exit code of a file whose tests are all deselected."""
GB = 1e9


def _gradients(model: Any, rows: Sequence[Tensor]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    for ids in rows:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


def activations(job: Job) -> Iterator[Line]:
    """Gradients of rows of changing lengths: activations kept, recomputed and offloaded."""
    yield "activations", "base", "dtype", "largest difference", "peak MB", "MB after", "well"
    gpu = gpu_of(job.device)
    sizes = [job.length, max(job.length // 3, 5), max(job.length - 1, 4), max(job.length // 2, 6)]
    for quantize, dtype in (("none", torch.float32), ("none", job.dtype), ("nf4", job.dtype)):
        with left_clean():
            model = made(job, job.device, quantize, dtype).train()
            rows = [torch.arange(size, device=job.device)[None] % 300 for size in sizes]
            kept: list[Tensor] = []
            for mode in MODES:
                blocks = Blocks(model)
                blocks.set_activations(mode)
                if gpu is not None:
                    gpu.restart(job.device)
                gradients = _gradients(model, rows)
                blocks.restore()
                kept = kept or gradients
                worst = max(apart(a, b) for a, b in zip(gradients, kept, strict=True))
                peak = 0 if gpu is None else gpu.peak(job.device)
                after = 0 if gpu is None else gpu.used(job.device)
                shown, well = judged(worst, LIMITS[dtype])
                figures = (shown, f"{peak / 1e6:.1f}", f"{after / 1e6:.1f}", well)
                yield mode, quantize, str(dtype).removeprefix("torch."), *figures
            del model, kept, gradients


def losses_on_cpu(job: Job, quantize: str, dtype: torch.dtype = torch.float32) -> list[float]:
    """Return the losses that a short run has on the CPU."""
    return train(made(job, "cpu", quantize, dtype), rows_of(job)).losses


def training(job: Job) -> Iterator[Line]:
    """A short run here and on the CPU: the same losses."""
    yield "base", "dtype", "losses here", "on the CPU", "computed by", "well"
    bases = [("none", job.dtype), ("nf4", job.dtype)]
    for quantize, dtype in [*bases, *((kind, torch.float32) for kind in ("none", "nf4", "int8"))]:
        with left_clean():
            heard = train(made(job, job.device, quantize, dtype), rows_of(job))
            there = losses_on_cpu(job, quantize, dtype)
            limit = LOSS_CLOSE if dtype == torch.float32 else LOSS_CLOSE_16_BIT
            shown = [" ".join(f"{loss:.4f}" for loss in each) for each in (heard.losses, there)]
            well = verdict(relative_difference(heard.losses, there) <= limit)
            yield quantize, str(dtype).removeprefix("torch."), *shown, heard.paths[:60], well


def compiled(job: Job) -> Iterator[Line]:
    """Compiled blocks compared with eager ones: losses, gradients of the last step, its speed."""
    settings = {"compile": "auto" if job.device.type == "cpu" else True}
    yield from _beside_plain(job, "compiled", settings, (torch.float32, job.dtype))


def recorded(job: Job) -> Iterator[Line]:
    """Passes recorded as CUDA graphs compared with eager ones, in the same manner."""
    yield from _beside_plain(job, "recorded", {"record": True}, (job.dtype,), max_steps=24)


def _beside_plain(
    job: Job, name: str, settings: dict[str, Any], dtypes: Sequence[torch.dtype], **more: Any
) -> Iterator[Line]:
    yield "blocks", "dtype", "losses", "gradients apart", "tokens/s", "notices", "well"
    for dtype in dict.fromkeys(dtypes):
        curves: dict[str, Heard] = {}
        for side, changes in (("plain", {"compile": False, "record": False}), (name, settings)):
            with left_clean():
                model = made(job, job.device, "none", dtype)
                curves[side] = train(model, rows_of(job), **{"record": False, **changes, **more})
        limit = LOSS_CLOSE if dtype == torch.float32 else LOSS_CLOSE_16_BIT
        difference = relative_difference(curves[name].losses, curves["plain"].losses)
        furthest = gradients_apart(curves[name].gradients, curves["plain"].gradients)
        well = verdict(difference <= limit and furthest <= GRADIENTS_CLOSE[dtype])
        for side, heard in curves.items():
            losses = " ".join(f"{loss:.4f}" for loss in heard.losses[-3:])
            figures = (f"{furthest:.2g}", f"{heard.speeds[-1]:.0f}", " ".join(heard.notices)[:200])
            yield side, str(dtype).removeprefix("torch."), losses, *figures, well


def gradients_apart(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative difference of a gradient's norm; 1 if gradients are lost."""
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


@contextmanager
def _engine(model: Any, rows: int, *, records: bool) -> Iterator[CachedEngine]:
    with open_engine(model, NO_END, Limits(rows=rows)) as engine:
        assert isinstance(engine, CachedEngine)
        engine.graphs.records &= records
        yield engine


def _answers(engine: CachedEngine, prompts: Sequence[Sequence[int]], new: Sequence[int]) -> Any:
    settings = [Sampling(max_new_tokens=number) for number in new]
    answers = engine.answers(prompts, settings, log_probs=False)
    return [one.ids for (one,) in answers]


def decoding(job: Job) -> Iterator[Line]:
    """Completions of many lengths, which join and leave: equal without CUDA graphs, and speed."""
    yield "answers at once", "tokens/s eager", "recorded", "graphs", "alike", "cache MB", "well"
    model = made(job, job.device, "none", job.dtype).eval()
    gpu = gpu_of(job.device)
    for rows in ANSWER_ROWS:
        count = 2 * rows
        prompts = [row.input_ids for row in random_rows([8 + 5 * (n % 7) for n in range(count)])]
        new = [4 + 3 * (n % 9) for n in range(count)]
        texts, speeds, graphs = [], [], 0
        held = 0 if gpu is None else gpu.used(job.device)
        if gpu is not None:
            gpu.restart(job.device)
        for records in (False, True):
            with left_clean(), _engine(model, rows, records=records) as engine:
                _answers(engine, prompts[:2], [2, 2])
                began = time.perf_counter()
                texts.append(_answers(engine, prompts, new))
                speeds.append(sum(new) / (time.perf_counter() - began))
                graphs = engine.graphs.num_recorded
        pairs = [
            a == b
            for one, other in zip(*texts, strict=True)
            for a, b in zip(one, other, strict=True)
        ]
        alike = sum(pairs) / len(pairs)
        cache = 0 if gpu is None else max(gpu.peak(job.device) - held, 0)
        # in 16 bits sums in another order choose another token here and there
        well = alike == 1 if job.dtype == torch.float32 else alike > 0.8
        shown = (*(f"{speed:.0f}" for speed in speeds), str(graphs), f"{alike:.1%}")
        yield str(rows), *shown, f"{cache / 1e6:.1f}", verdict(well)


def _pinned_bytes() -> int:
    """Return the main memory that torch holds pinned; 0 without CUDA."""
    try:
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
    except RuntimeError:
        return 0


def large(job: Job) -> Iterator[Line]:
    """A released shape in nf4, one row a step: speed, share of the peak, memory and its plan."""
    columns = ("activations", "tokens", "tokens/s", "of the peak", "allocated GB", "plan GB")
    yield *columns, "reserved GB", "pinned GB", "loss", "well"
    gpu = gpu_of(job.device)
    if gpu is None:
        yield ("-", "needs a GPU", *[""] * 7, "yes")
        return
    model = made_large(job)
    name = gpu.name(job.device)
    rate = peak_of(name)
    steps = reckoner_of(model.config, "nf4", on_gpu=True)
    measured, first = Measured.around(model, job.device), dict[int, float]()
    for mode in MODES:
        for length in job.large_lengths:
            shown = (mode, f"{length:,}")
            plan = planned(steps, mode, length)
            if plan > 0.9 * gpu.total(job.device):
                yield (*shown, "not tried", "", "", f"{plan / GB:.2f}", *[""] * 3, "yes")
                continue
            with left_clean(), measured.steps(mode, length) as step:
                gpu.restart(job.device)
                losses, seconds = _timed(step)
                peak, reserved = gpu.peak(job.device), _reserved_bytes(job.device)
            speed = length / min(seconds)
            share = f"{share_of_peak(job.large, length, 16, speed, rate):.0%}" if rate else ""
            # kept activations are compared with the others': the same loss of the same row
            first = first if length in first else {**first, length: losses[0]}
            alike = relative_difference(losses[:1], [first[length]]) <= LOSS_CLOSE_16_BIT
            well = alike and 0.8 < plan / peak < 1.25
            memory = (f"{peak / GB:.2f}", f"{plan / GB:.2f}", f"{reserved / GB:.2f}")
            pinned = f"{_pinned_bytes() / GB:.2f}"
            loss = f"{losses[-1]:.3f}"
            yield (*shown, f"{speed:.0f}", share, *memory, pinned, loss, verdict(well))


def _timed(step: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Return losses and seconds of some steps; each synchronises with the device."""
    losses, seconds = [], []
    for _ in range(3):
        began = time.perf_counter()
        losses.append(float(step().loss))
        seconds.append(time.perf_counter() - began)
    return losses, seconds


def _reserved_bytes(device: torch.device) -> int:
    """Return the peak bytes that torch reserved."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def memory(job: Job) -> Iterator[Line]:
    """The same run under decreasing memory caps, with train.memory on auto."""
    yield "cap MB", "plan", "notices", "retries", "MB after", "ended", "well"
    gpu = gpu_of(job.device)
    if job.device.type != "cuda" or gpu is None:
        yield "-", "only CUDA's memory can be capped", "", "", "", "-", "yes"
        return
    with left_clean():
        before = gpu.used(job.device)
        model = made(job, job.device)
        weights = gpu.used(job.device) - before
        gpu.restart(job.device)
        whole = train(model, rows_of(job), gradient_checkpointing=False)
        rest = gpu.peak(job.device) - weights
        del model
    before = gpu.used(job.device)
    for share in (1.2, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        heard, ended = Heard(), "well"
        cap = weights + share * rest
        with capped(job.device, cap):
            try:
                with left_clean():
                    heard = train(made(job, job.device), rows_of(job))
            except PeftkitError as error:
                ended = f"refused: {str(error).splitlines()[0][:60]}"
            except Exception as error:
                ended = f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"
        gc.collect()
        after = gpu.used(job.device)
        # the same losses, or our error that not even one row fits
        same = ended == "well" and relative_difference(heard.losses, whole.losses) <= LOSS_CLOSE
        well = (same or ended.startswith("refused")) and after <= before + (1 << 25)
        facts = (f"{gpu.retries(job.device)}", f"{after / 1e6:.1f}", ended, verdict(well))
        yield f"{cap / 1e6:.1f}", heard.plan, " ".join(heard.notices)[:60], *facts


def suite(job: Job) -> Iterator[Line]:
    """The simulated card's tests on this one, file by file; reports in the folder `junit`."""
    yield "file", "tests", "failed", "skipped", "seconds", "problem", "well"
    reports = job.folder / "junit"
    reports.mkdir(parents=True, exist_ok=True)
    # torch without CUDA: this card is simulated, like the card of the tests
    real = {"PEFTKIT_REAL_CARD": "1" if torch.version.cuda else ""}
    for file in sorted(path for pattern in SUITE for path in ROOT.glob(pattern)):
        report = (reports / f"{file.stem}.xml").resolve()
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider"]
        command += ["-m", "not slow", "--junitxml", str(report), str(file)]
        began, problem = time.perf_counter(), ""
        try:
            status, out, err = run_group(command, {**os.environ, **real}, SUITE_SECONDS)
            if status not in (0, NO_TESTS):
                problem = _last_line(out.decode(errors="replace") or err.decode(errors="replace"))
        except subprocess.TimeoutExpired:
            problem = f"stopped after {SUITE_SECONDS} s"
        seconds = f"{time.perf_counter() - began:.0f}"
        counts, failures = _counts(report)
        yield file.stem, *counts, seconds, problem[:100], verdict(not problem)
        for failure in failures:
            yield failure[:120], *[""] * 5, verdict(False)


def _last_line(text: str) -> str:
    return (text.strip() or "nothing was printed").splitlines()[-1]


def _counts(report: Path) -> tuple[tuple[str, str, str], list[str]]:
    """Return the numbers of tests, failures and skipped tests of a report; failures by name."""
    if not report.exists():
        return ("", "", ""), []
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    failed = sum(int(one.get("failures", 0)) + int(one.get("errors", 0)) for one in suites)
    tests, skipped = (sum(int(one.get(key, 0)) for one in suites) for key in ("tests", "skipped"))
    failures = [
        f"{case.get('name')}: {(problem.get('message') or '').partition(chr(10))[0]}"
        for one in suites
        for case in one.iter("testcase")
        for problem in (*case.findall("failure"), *case.findall("error"))
    ]
    return (str(tests), str(failed), str(skipped)), failures
