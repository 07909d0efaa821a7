"""Completions on a card: the quickstart, an engine's error, and tokens/s next to PEFT."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks import shapes
from benchmarks.all import figures_in
from benchmarks.card.decode import NO_END, random_prompts
from benchmarks.card.disk import DTYPES, RANK, checkpoint_of
from benchmarks.card.job import Job, Line, left_clean, verdict
from benchmarks.card.peers import TRL, missing
from benchmarks.entries import ENTRIES
from benchmarks.workers import ROOT, WorkerFailed, run_group, work
from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.inference.cached_engine import CachedEngine
from peftkit.inference.engine import Limits, Request
from peftkit.inference.open_engine import open_engine
from peftkit.inference.sampling import Sampling
from peftkit.kernels.device import gpu_of
from peftkit.methods.lora import LoRA

QUICKSTART_SECONDS, PEFT_SECONDS = 400, 300
ENOUGH = 90
"""Percent of exact answers after the quickstart."""
LENGTHS, TOP = (9, 6), 16
"""Tokens of prompts whose log-probabilities are compared, and how many of each token."""
DEPTHS = ((4, 256), (32, 512))
"""Blocks and width of the models of the part `errors`: the error grows with the depth."""
PROMPT = 200
"""Tokens of a prompt of the part `answers`."""


def quickstart(job: Job) -> Iterator[Line]:
    """The quickstart from its command: exact answers before and after, and minutes."""
    yield "what", "before", "after", "minutes", "well"
    environ = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}"}
    command = [sys.executable, str(ROOT / "recipes/examples/quickstart.py")]
    code, out, err = run_group(command, environ, QUICKSTART_SECONDS)
    if code:
        raise RuntimeError(err.decode(errors="replace")[-1000:])
    found = figures_in(ENTRIES["quickstart"], out.decode(errors="replace"))
    well = verdict(float(found["after"].rstrip("%")) >= ENOUGH)
    yield "exact answers", found["before"], found["after"], found["minutes"], well


def errors(job: Job) -> Iterator[Line]:
    """Log-probabilities of the engine and of the model's own forward pass, two tokens a prompt."""
    yield "blocks", "dtype", "cuDNN's attention", "standard deviations of the logits", "well"
    before = torch.backends.cuda.cudnn_sdp_enabled()
    for layers, width in DEPTHS:
        for dtype in dict.fromkeys((torch.float32, job.dtype)):
            sizes = {"num_hidden_layers": layers, "hidden_size": width}
            with left_clean():
                torch.manual_seed(0)
                shape = shapes.SHAPES[job.model]
                model = shapes.build(shape, dtype=dtype, **sizes).eval().to(job.device)
                for with_cudnn in (True, False):
                    torch.backends.cuda.enable_cudnn_sdp(with_cudnn)
                    try:
                        error = engine_error(model)
                    finally:
                        torch.backends.cuda.enable_cudnn_sdp(before)
                    name = str(dtype).removeprefix("torch.")
                    # the engine itself refuses 0.1 of a base in 16 bits
                    well = verdict(error <= (1e-3 if dtype == torch.float32 else 0.1))
                    yield str(layers), name, verdict(with_cudnn).lower(), f"{error:.2g}", well


def engine_error(model: Any) -> float:
    """Return the largest difference of log-probabilities, in standard deviations of the logits."""
    vocab = model.config.vocab_size
    prompts = [[(3 + n) * (7 + size) % vocab for n in range(size)] for size in LENGTHS]
    with CachedEngine(model, shapes.tokenizer(), Limits(prefill=4)) as engine:
        engine.ends = frozenset()
        sampling = Sampling(max_new_tokens=2, top_logprobs=TOP)
        answers = [engine.submit(Request(ids, sampling)) for ids in prompts]
        engine.run()
    worst = 0.0
    for ids, answer in zip(prompts, answers, strict=True):
        for number, chosen in enumerate(answer.chosen):
            so_far = torch.tensor([[*ids, *answer.ids[:number]]], device=model.device)
            with torch.no_grad():
                logits = model(input_ids=so_far, use_cache=False).logits[0, -1].float()
            exact = logits.log_softmax(-1)
            error = max(abs(float(exact[token]) - value) for token, value in chosen.top)
            worst = max(worst, error / float(logits.std()))
    return worst


def answers(job: Job) -> Iterator[Line]:
    """Greedy completions from the checkpoint with a LoRA, prompts included, in bf16 and nf4."""
    yield "base", "rows", "tokens/s", "PEFT's tokens/s", "ratio", "graphs", "peak GB", "well"
    dtype = DTYPES[str(job.dtype).removeprefix("torch.")]
    for quantize in ("none", "nf4"):
        prompts = [random_prompts(rows, PROMPT) for rows in job.answer_rows]
        peer = _peer(job, quantize, dtype, prompts)
        with left_clean():
            base = load_base(
                str(checkpoint_of(job)),
                dtype=dtype,
                quantize=quantize,
                device=job.device,
                store="off",
            )
            attach(base.model, LoRA(rank=RANK))
            for rows, ids, other in zip(job.answer_rows, prompts, peer, strict=True):
                made, speed, graphs, peak = _answered(job, base.model.eval(), ids)
                ratio = f"{speed / other:.1f} x" if other else ""
                shown = (f"{speed:.0f}", f"{other:.0f}" if other else "", ratio, graphs, peak)
                yield quantize, str(rows), *shown, verdict(made == rows * job.new_tokens)


def _peer(
    job: Job, quantize: str, dtype: str, prompts: Sequence[Sequence[Sequence[int]]]
) -> list[float]:
    """Return PEFT's tokens/s of each batch of prompts; 0 where it is missing or fails."""
    asked = {
        "source": str(checkpoint_of(job)),
        "task": "causal_lm",
        "quantize": quantize,
        "dtype": dtype,
        "device": job.device.type,
        "rank": RANK,
        "prompts": prompts,
        "new_tokens": job.new_tokens,
    }
    if missing(job.peers, TRL):
        return [0.0] * len(prompts)
    try:
        facts = work("peft_answers", asked, job.folder, python=job.peers, seconds=PEFT_SECONDS)
    except WorkerFailed as error:
        facts = {"failed": str(error)}
    if "failed" in facts:
        print(facts["failed"], file=sys.stderr)
    return facts.get("speeds", [0.0] * len(prompts))


def _answered(
    job: Job, model: Any, prompts: Sequence[Sequence[int]]
) -> tuple[int, float, str, str]:
    """Return new tokens, tokens/s, the recorded graphs and the peak of the second of two runs."""
    gpu, made, speed, graphs = gpu_of(job.device), 0, 0.0, ""
    for _ in range(2):
        if gpu is not None:
            gpu.restart(job.device)
        with open_engine(model, NO_END, Limits(rows=len(prompts))) as engine:
            settings = Sampling(job.new_tokens, 0.0)
            if isinstance(engine, CachedEngine):
                engine.ends = frozenset()
            began = time.perf_counter()
            running = [engine.submit(Request(ids, settings, n)) for n, ids in enumerate(prompts)]
            engine.run()
            made = sum(len(one.ids) for one in running)
            speed = made / (time.perf_counter() - began)
            recorder = getattr(engine, "recorder", None)
            graphs = "none" if recorder is None else str(recorder.num_recorded)
    return made, speed, graphs, f"{0 if gpu is None else gpu.peak(job.device) / 1e9:.2f}"
