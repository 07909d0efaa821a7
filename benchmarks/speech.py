"""Whisper in peftkit and in a loop over transformers and PEFT: losses, clips/s, memory.

    python -m benchmarks.speech

A Whisper with the sizes of tiny (random weights, the tests' vocabulary) trains on clips of 5 s,
padded to 6 s, with LoRA on q and v in float32: the same base, adapter, rows, batches and AdamW.
Each side runs in a separate process, one after the other, on one thread. Exits 1 if a loss differs
by more than 1e-4.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.events import Event, StepDone
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter
from peftkit.formats.peft.notes import Provenance
from peftkit.methods.lora import LoRA
from peftkit.settings import DataConfig, TrainConfig
from peftkit.tasks.media.transcription import TranscriptionConfig
from peftkit.train.batches import StatelessSampler
from peftkit.train.loop import fit
from tests.helpers.speech import saved, whisper, write_speech_rows

STEPS, BATCH, RATE = 10, 4, 1e-3
TOLERANCE = 1e-4
TASK = TranscriptionConfig(language="english")
TINY = {
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
    "init_std": 0.02,
}
WORDS = ("the", "quick", "brown", "fox", "answer", "question", "dog", "lazy")


def prepare(folder: Path) -> None:
    """Write a base, an initial adapter, and audio clips."""
    draw = random.Random(0)
    rows = [
        {
            "audio": [draw.uniform(200.0, 3000.0) for _ in range(50)],
            "text": " ".join(draw.choices(WORDS, k=12)),
        }
        for _ in range(STEPS * BATCH)
    ]
    write_speech_rows(folder, rows)
    base = saved(folder / "base", whisper(seconds=6, **TINY))
    model = load_base(str(base), dtype="fp32", purpose=TASK.purpose).model
    torch.manual_seed(0)
    adapter = attach(model, LoRA(rank=8, alpha=16, targets=("q", "v", "cross_q", "cross_v")))
    save_adapter(adapter, folder / "adapter", Provenance(task_type=None))


def settings(folder: Path) -> TrainConfig:
    return TrainConfig(
        output_dir=folder / "run",
        max_steps=STEPS,
        batch_size=BATCH,
        learning_rate=RATE,
        schedule="constant",
        warmup_ratio=0.0,
        weight_decay=0.0,
        max_grad_norm=None,
        save_every=None,
        compile=False,
    )


def ours(folder: Path) -> list[float]:
    """Train with peftkit; return the loss of every step."""
    base = load_base(str(folder / "base"), dtype="fp32", purpose=TASK.purpose)
    task: Any = TASK.on(base.model, base.processor, DataConfig(train=""))
    rows, losses = task.load(str(folder / "rows.jsonl")), list[float]()
    load_adapter(base.model, folder / "adapter", trainable=True)

    def listen(event: Event) -> None:
        if isinstance(event, StepDone):
            losses.append(event.loss)

    fit(base.model, task, rows, config=settings(folder), on_event=listen)
    return losses


def theirs(folder: Path) -> list[float]:
    """Train with transformers and PEFT in a plain loop; return the loss of every step."""
    import soundfile

    processor: Any = transformers.WhisperProcessor.from_pretrained(folder / "base")
    processor.tokenizer.set_prefix_tokens(language="english", task="transcribe")
    base = transformers.WhisperForConditionalGeneration.from_pretrained(folder / "base")
    model: Any = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    start = base.config.decoder_start_token_id
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], RATE, weight_decay=0.0
    )
    order, losses = StatelessSampler(len(rows), BATCH, settings(folder).seed), []
    model.train()
    for step in range(STEPS):
        some = [rows[number] for number in order.step_indices(step)]
        heard = [soundfile.read(folder / row["audio"], dtype="float32")[0] for row in some]
        features = processor.feature_extractor(heard, sampling_rate=16_000, return_tensors="pt")
        texts = processor.tokenizer([r["text"] for r in some], padding=True, return_tensors="pt")
        labels = texts.input_ids.masked_fill(texts.attention_mask.ne(1), -100)
        labels = labels[:, 1:] if bool((labels[:, 0] == start).all()) else labels
        loss = model(input_features=features.input_features, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


SIDES = {"peftkit": ours, "transformers + PEFT": theirs}


def one_side(name: str, folder: Path) -> None:
    """Run one side, and print its figures."""
    torch.set_num_threads(1)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    losses = SIDES[name](folder)
    seconds, after = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"losses": losses, "seconds": seconds, "kilobytes": after - before}))


def main(words: Sequence[str]) -> int:
    if words:
        one_side(words[0], Path(words[1]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        found = {}
        for name in SIDES:
            command = [sys.executable, "-m", "benchmarks.speech", name, folder]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[name] = json.loads(said.splitlines()[-1])
    print("| by | sounds / s of one core | peak MB beside the program |\n|---|---:|---:|")
    for name, one in found.items():
        speed, room = STEPS * BATCH / one["seconds"], one["kilobytes"] / 1000
        print(f"| {name} | {speed:.2f} | {room:,.0f} |")
    pairs = zip(*(one["losses"] for one in found.values()), strict=True)
    apart = max(abs(a - b) for a, b in pairs)
    print(f"Losses of {STEPS} steps: {apart:.1e} apart at most.")
    return int(apart > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
