"""Load a large base in one way, or train one step on it, and measure the main memory."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from peftkit.adapter import attach
from peftkit.base import store
from peftkit.base.build import load_model
from peftkit.base.load import load_base
from peftkit.base.locate import Location
from peftkit.base.purpose import CAUSAL_LM
from peftkit.base.request import request_of
from peftkit.data.pack import Row
from peftkit.events import Event, RunStarted, StepDone
from peftkit.methods.lora import LoRA
from peftkit.quant import layers
from peftkit.quant.quantize import quantize_model
from peftkit.settings import BaseConfig, DataConfig, TrainConfig
from peftkit.tasks.tokens import CausalLM
from peftkit.train.loop import fit

RANK = 16
LOADING = ("whole", "streamed", "first start", "second start")
STEPS = {"step, resident": "device", "step, mapped": "device", "step, streamed": "stream"}
"""base.placement of steps on a base from the cache, which the first start fills."""
DTYPE = torch.bfloat16


class Watch:
    """Peak memory of this process by kind while it is observed, in bytes.

    Attributes:
        anonymous: Memory that cannot be reclaimed. files: Pages of the cache's and libraries'
            files.
        store: Of these, pages of packed bases in the cache.
    """

    def __init__(self) -> None:
        self.anonymous = self.files = self.store = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        turn = 0
        while not self._done.wait(0.01):
            lines = Path("/proc/self/status").read_text().splitlines()
            found = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
            self.anonymous = max(self.anonymous, _bytes(found["RssAnon"]))
            self.files = max(self.files, _bytes(found["RssFile"]))
            if turn % 50 == 0:  # the kernel walks all pages for it
                self.store = max(self.store, mapped_bytes(store.store_folder()))
            turn += 1


def mapped_bytes(folder: Path) -> int:
    """Return the bytes of a folder's files that are mapped into this process's memory."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in name.partition(" ")[0]:
            inside = str(folder.resolve()) in line
        elif inside and name == "Rss":
            found += _bytes(rest)
    return found


def _bytes(text: str) -> int:
    return 1024 * int(text.split()[0])


def work(way: str, folder: Path, num_tokens: int) -> dict[str, float]:
    """Load a base in this process in one way; for a step, also train it.

    Returns:
        seconds: of the loading, or of the step. kept: bytes of the packed base.
        anonymous, files, store: peaks since the start of loading.
    """
    layers.COPY_SHARE = 0.0  # no unpacked copies of weights
    store.MIN_STORED_BYTES = 0
    with Watch() as watch:
        began = time.perf_counter()
        model: Any
        if way == "whole":
            settings = BaseConfig(model=str(folder), dtype="bf16")
            where = Location(str(folder), str(folder))
            model, _ = load_model(request_of(settings, CAUSAL_LM, where, torch.device("cpu")))
            model.requires_grad_(False)
            quantize_model(model, "nf4")
        else:
            kept_in = "off" if way == "streamed" else "auto"
            how = {"placement": STEPS.get(way, "device"), "store": kept_in}
            base = load_base(str(folder), dtype="bf16", quantize="nf4", **how)
            model = base.model
            if way == "step, resident":
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.data = tensor.data.clone()
        seconds = time.perf_counter() - began
        kept = sum(p.nbytes for p in model.parameters())
        if way in STEPS:
            seconds = _step(base, num_tokens)
    return {
        "seconds": seconds,
        "anonymous": watch.anonymous,
        "files": watch.files,
        "store": watch.store,
        "kept": kept,
    }


def _step(base: Any, num_tokens: int) -> float:
    """Train one step of one row, LoRA on all linear layers; return its seconds."""
    attach(base.model, LoRA(rank=RANK))
    task = CausalLM(base.model, base.tokenizer, DataConfig(train="", packing=False))
    ids = tuple(n % 1000 + 5 for n in range(num_tokens))
    row = Row(ids, (-100, *ids[1:]), (num_tokens,), "row 1")
    times: dict[type[Event], float] = {}

    def listen(event: Event) -> None:
        times.setdefault(type(event), time.perf_counter())

    settings: dict[str, Any] = {"gradient_checkpointing": True, "compile": False, "max_steps": 1}
    run: Callable[..., object] = fit
    with tempfile.TemporaryDirectory() as out:
        config = TrainConfig(output_dir=Path(out) / "run", batch_size=1, **settings)
        run(base.model, task, [row], config=config, on_event=listen)
    return times[StepDone] - times[RunStarted]
