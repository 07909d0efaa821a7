"""Runs as their files tell them, made up: a report reads no more."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STARTED = {
    "event": "RunStarted",
    "time": 1000.0,
    "num_steps": 40,
    "start_step": 0,
    "num_rows": 640,
    "num_trainable": 4_884_480,
    "num_parameters": 134_500_000,
    "device": "cpu",
    "paths": "attention: grouped",
}


def step(number: int, num_steps: int = 40, **changed: Any) -> dict[str, Any]:
    """A StepDone line: a loss that falls, with a ripple."""
    ripple = 0.1 * math.sin(7.3 * number)
    return {
        "event": "StepDone",
        "time": 1000.0 + number,
        "step": number,
        "num_steps": num_steps,
        "epoch": number / num_steps,
        "loss": 0.3 + 2 * math.exp(-3 * number / num_steps) + ripple,
        "learning_rate": 2e-4 * (1 - number / (num_steps + 1)),
        "grad_norm": 0.5 + ripple,
        "num_tokens": 900 * number,
        "tokens_per_second": 1200.0 + 100 * ripple,
        "peak_bytes": 3 << 30,
        "seconds_left": float(num_steps - number),
        **changed,
    }


def evaluation(number: int, loss: float, **more: float) -> dict[str, Any]:
    return {
        "event": "EvalDone",
        "time": 1000.5 + number,
        "step": number,
        "metrics": {"loss": loss, **more},
        "best": False,
    }


def done(number: int = 40, seconds: float = 42.0) -> dict[str, Any]:
    return {"event": "RunDone", "time": 2000.0, "step": number, "seconds": seconds, "metrics": {}}


FACTS: dict[str, Any] = {
    "recipe": {
        "base": {"model": "smollm2-135m", "quantize": "nf4"},
        "method": {"type": "lora", "rank": 16},
        "data": {"train": "data/train.jsonl", "eval": "data/eval.jsonl"},
        "train": {"learning_rate": 2e-4, "keep_best": False, "output_dir": "runs/a"},
        "task": {"type": "causal_lm"},
    },
    "recipe_yaml": "base: {model: smollm2-135m, quantize: nf4}\n",
    "tables": [
        {
            "title": "Base smollm2-135m",
            "columns": ["part", "weights"],
            "rows": [["nf4", "106.2M"], ["16 bits", "28.3M"]],
        },
        {
            "title": "Data: data/train.jsonl",
            "columns": ["what", "how many"],
            "rows": [["format", "alpaca"], ["rows read", "650"], ["rows kept", "640"]],
            "source": "data/train.jsonl",
            "counts": {"num_read": 650, "num_cut": 3, "num_dropped": 10},
        },
    ],
    "notices": [],
    "lengths": {"train": [[40 + 4 * n, n * n % 37] for n in range(24)]},
    "row_source": "data/train.jsonl:1",
    "row": [["", "<|im_start|>user\nSay yes.<|im_end|>\n"], ["learnt", "yes<|im_end|>"]],
    "machine": {
        "base": "smollm2-135m",
        "fingerprint": "sha256:12ab",
        "versions": {"torch": "2.13"},
    },
    "command": "peftkit chat {folder}",
    "mergeable": True,
}


def write_run(
    folder: Path,
    lines: Iterable[dict[str, Any]] | None = None,
    *,
    facts: dict[str, Any] | None = None,
    samples: Iterable[dict[str, Any]] = (),
) -> Path:
    """Write a run's files; by default a whole run of 40 steps with three evaluations."""
    folder.mkdir(parents=True, exist_ok=True)
    if lines is None:
        lines = [STARTED]
        for number in range(1, 41):
            lines.append(step(number))
            if number in (10, 20, 40):
                lines.append(evaluation(number, 2.0 / number, exact_match=number / 40))
        lines.append(done())
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    (folder / "run.json").write_text(json.dumps(FACTS if facts is None else facts))
    written = "".join(json.dumps(line) + "\n" for line in samples)
    (folder / "samples.jsonl").write_text(written, encoding="utf-8")
    return folder
