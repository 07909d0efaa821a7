"""Adapt a small CTC model to a new voice with 6,704 trained parameters.

espeak-ng speaks three digits at a time. A Wav2Vec2-BERT with 0.5 million parameters is trained from
scratch on a male voice. An adapter of rank 1 (hear-digits.yaml) is then trained on a female voice.
The held-out sentences are in neither training set.

Needs: a CPU core, 4 minutes; pip install -e ".[audio]", and the program espeak-ng (packaged by
Debian and others).
Gives: word error rates of both voices before and after, and an adapter in runs/hear-digits/adapter.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers

from peftkit import (
    CTCConfig,
    DataConfig,
    evaluate,
    load_base,
    load_recipe,
    open_adapter,
    run_recipe,
)
from peftkit_cli.render import Renderer

HERE = Path(__file__).parent
OUT = Path("runs/hear-digits")
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
FIRST, OTHER = "en-us+m3", "en-us+f2"
"""Voices of espeak-ng: male and female."""
NUM_BASE, NUM_TRAIN, NUM_HELD_OUT = 480, 320, 80
BASE_STEPS, BATCH, RATE = 500, 16, 2e-3
WORDS_PER_MINUTE = "200"


def choose(seed: int) -> dict[str, list[str]]:
    """Return disjoint sentences of three words for the base, the adapter and the evaluation."""
    every = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS]
    drawn = random.Random(seed).sample(every, NUM_BASE + NUM_TRAIN + NUM_HELD_OUT)
    return {
        "base": drawn[:NUM_BASE],
        "train": drawn[NUM_BASE:-NUM_HELD_OUT],
        "held_out": drawn[-NUM_HELD_OUT:],
    }


def speak(sentences: Sequence[str], voice: str, name: str) -> Path:
    """Synthesize each sentence to a file, and write the rows with their transcripts."""
    folder, rows = OUT / name, []
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(sentences):
        file = folder / f"{number:03}.wav"
        arguments = ["-v", voice, "-s", WORDS_PER_MINUTE, "-w", str(file), text]
        subprocess.run(["espeak-ng", *arguments], check=True)
        rows.append(json.dumps({"audio": f"{name}/{file.name}", "text": text}) + "\n")
    path = OUT / f"{name}.jsonl"
    path.write_text("".join(rows), encoding="utf-8")
    return path


def new_model(
    seed: int,
) -> tuple[transformers.Wav2Vec2BertForCTC, transformers.Wav2Vec2BertProcessor]:
    """Return a model with random weights for 40 mel bins, and its processor."""
    torch.manual_seed(seed)
    tokens = ("<pad>", "<unk>", "|", *sorted(set("".join(WORDS))))  # the first is the blank
    vocabulary = OUT / "vocab.json"
    vocabulary.write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(vocabulary), bos_token=None, eos_token=None)
    config = transformers.Wav2Vec2BertConfig(
        vocab_size=len(tokenizer),
        pad_token_id=0,
        feature_projection_input_dim=80,  # two frames of 40 bins
        hidden_size=96,
        output_hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=256,
        conv_depthwise_kernel_size=15,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )
    extractor = transformers.SeamlessM4TFeatureExtractor(feature_size=40, num_mel_bins=40)
    processor = transformers.Wav2Vec2BertProcessor(extractor, tokenizer)
    return transformers.Wav2Vec2BertForCTC(config), processor


def train_base(rows: Path, seed: int) -> None:
    """Train all weights of a new model, and save it with its processor."""
    model, processor = new_model(seed)
    task = CTCConfig().on(model, processor, DataConfig(train=""))
    read = list(task.load(str(rows)))
    batches = [task.collate(read[start : start + BATCH]) for start in range(0, len(read), BATCH)]
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=BASE_STEPS, pct_start=0.1
    )
    model.train()
    for step in range(BASE_STEPS):
        batch = batches[step % len(batches)]
        loss = task.loss(model, batch)[0] / task.num_targets(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 99:
            say(f"base, step {step + 1}: loss {loss.item():.3f}")
    for part in (model, processor):
        part.save_pretrained(OUT / "base")


def main() -> None:
    """Create the sounds and the base, evaluate both voices, train, evaluate again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    if shutil.which("espeak-ng") is None:
        sys.exit("espeak-ng is not installed: apt-get install espeak-ng")
    began = time.monotonic()
    sentences = choose(seed)
    train_base(speak(sentences["base"], FIRST, "base_voice"), seed)
    speak(sentences["train"], OTHER, "train")
    held_out = {
        "first voice": speak(sentences["held_out"], FIRST, "held_out_first"),
        "other voice": speak(sentences["held_out"], OTHER, "held_out"),
    }
    say(f"Base and sounds are ready after {time.monotonic() - began:.0f} s.")

    settings = load_recipe(HERE.parent / "hear-digits.yaml")
    settings = settings.model_copy(
        update={"train": settings.train.model_copy(update={"seed": seed})}
    )
    task = CTCConfig()
    with Renderer() as on_event:
        base = load_base(str(OUT / "base"), dtype="fp32", purpose=task.purpose, on_event=on_event)
        before = {voice: evaluate(base, rows, task=task) for voice, rows in held_out.items()}
        run_recipe(settings, overwrite=True, on_event=on_event)
        opened = open_adapter(settings.train.output_dir, on_event=on_event)
        after = {
            voice: evaluate(opened.base, rows, task=opened.task) for voice, rows in held_out.items()
        }
    for voice in held_out:
        rates = error_rates(before[voice], after[voice])
        say(f"{NUM_HELD_OUT} held-out sentences, {voice}: {rates}")
    say(f"Total time: {time.monotonic() - began:.0f} s.")


def error_rates(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Format the word and character error rates before and after training."""
    names = {"WER": "wer", "CER": "cer"}
    return ", ".join(f"{label} {before[n]:.1%} -> {after[n]:.1%}" for label, n in names.items())


def say(text: str) -> None:
    """Print a line and flush it."""
    print(text, flush=True)


if __name__ == "__main__":
    main()
