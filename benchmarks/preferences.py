"""Compare preference losses and the speed of DPO with TRL.

    python -m benchmarks.preferences --peers PEERS/bin/python          # each loss, 10 steps in fp32
    python -m benchmarks.preferences --peers PEERS/bin/python --speed  # DPO in bf16, SmolLM2-135M

The first command uses a small Llama with random weights, unless --model names another, and exits 1
if a loss differs by more than 1e-4. KTO has few rows, all in each step: TRL pairs prompts with
other completions of the batch, peftkit of the file. The losses of ORPO and CPO are means over the
tokens of a batch in TRL and over pairs here: TRL receives its pairs one by one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.limits import Sizes, limits
from benchmarks.orders import make_rows
from benchmarks.report import table
from benchmarks.workers import work
from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.base.locate import locate
from peftkit.base.pretrained import load_tokenizer
from peftkit.events import ignore
from peftkit.formats.peft.folder import save_adapter
from peftkit.methods.lora import LoRA
from peftkit.train.batches import StatelessSampler
from tests.helpers.folders import write_rows

NAME = "smollm2-135m"
TOLERANCE = 1e-4
LOSSES = ("dpo", "ipo", "robust", "hinge", "orpo", "simpo", "cpo", "kto")
STEPS, BATCH_SIZE = 10, 4
NAMES = {"ours": "peftkit", "trl": "TRL + PEFT"}
SHAPES = {"long prompts": (6, 1), "long answers": (1, 4)}
"""Orders per prompt and completion."""


def pairs(folder: Path, count: int, asked: int = 1, answered: int = 1) -> list[dict[str, Any]]:
    """Return orders, their JSON, and another order's JSON."""
    lines = make_rows(folder, count * max(asked, answered) + 1).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    made = []
    for n in range(count):
        some = rows[n * max(asked, answered) :]
        prompt = " ".join(row["instruction"] for row in some[:asked]) + "\n"
        chosen, rejected = (
            " ".join(row["output"] for row in some[at : at + answered]) for at in (0, 1)
        )
        made.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return made


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one completion of each pair, alternately chosen and rejected."""
    sides = (("chosen", True), ("rejected", False))
    return [
        {"prompt": row["prompt"], "completion": row[sides[n % 2][0]], "label": sides[n % 2][1]}
        for n, row in enumerate(rows)
    ]


def write(rows: Sequence[dict[str, Any]], file: Path) -> str:
    write_rows(file, rows)
    return str(file)


def job_of(args: argparse.Namespace, rows: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Return the settings of both sides."""
    steps = len(rows) // BATCH_SIZE
    order = StatelessSampler(len(rows), BATCH_SIZE, 0)
    ordered = [rows[index] for step in range(steps) for index in order.step_indices(step)]
    return {
        "source": locate(args.model).source,
        "file": write(rows, folder / "rows.jsonl"),
        "ordered": write(ordered, folder / "ordered.jsonl"),
        "batch_size": BATCH_SIZE,
        "steps": steps,
        "max_length": 1024,
        "settings": {},
    }


def small_model(folder: Path) -> str:
    """Write a Llama of four layers with random weights and SmolLM2's tokenizer."""
    tokenizer = load_tokenizer(locate(NAME), ignore)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def parity(args: argparse.Namespace, folder: Path) -> int:
    """Compare the losses of each step; return 1 if one differs."""
    args.model = args.model or small_model(folder / "model")
    base = load_base(args.model, dtype="fp32")
    save_adapter(attach(base.model, LoRA(rank=8, alpha=16)), folder / "start")
    del base
    jobs = []
    for loss in args.losses:
        rows = pairs(folder, STEPS * BATCH_SIZE if loss != "kto" else BATCH_SIZE)
        (folder / loss).mkdir()
        job = job_of(args, verdicts(rows) if loss == "kto" else rows, folder / loss)
        job |= {"loss": loss, "dtype": "fp32", "adapter": str(folder / "start"), "exact": True}
        job |= {"learning_rate": 1e-4, "steps": STEPS, "output": str(folder / "out" / loss)}
        if loss == "robust":
            job["settings"] = {"label_smoothing": 0.1}
        if loss == "kto":  # in the order of the file
            job["ordered"] = job["file"]
        jobs.append(job)
    ours = work("ours_preferences", {"jobs": jobs}, folder)
    theirs = work("trl_preferences", {"jobs": jobs}, folder, python=args.peers)
    worst = 0.0
    lines = []
    for loss in args.losses:
        a, b = ours[loss], theirs[loss]
        differs = max(abs(x - y) for x, y in zip(a, b, strict=True))
        worst = max(worst, differs)
        lines.append((loss, *(f"{value:.6f}" for value in (a[0], a[-1], b[-1])), f"{differs:.1e}"))
    print(table(("loss", "first", "last", "TRL's last", "largest difference"), lines))
    print(f"largest difference {worst:.1e}, allowed {TOLERANCE:.0e}")
    return int(worst > TOLERANCE)


def speed(args: argparse.Namespace, folder: Path) -> int:
    """Compare pairs per second and peak memory of DPO, with precomputed references."""
    args.model = args.model or NAME
    best, measured = limits(), []
    for name, (asked, answered) in SHAPES.items():
        rows = pairs(folder, args.rows, asked, answered)
        job, flop = job_of(args, rows, folder), step_flop(args.model, rows)
        job |= {"loss": "dpo", "dtype": "bf16", "rank": 16, "learning_rate": 1e-5, "exact": False}
        for side, python in (("ours", None), ("trl", args.peers)):
            kwargs = {} if python is None else {"python": python}
            found = work(f"{side}_preferences", job, folder, **kwargs)
            steps = found["step_seconds"][1:]
            rate = BATCH_SIZE * len(steps) / sum(steps)
            whole = args.rows / found["seconds"]
            peak = found["peak_bytes"] / 1e6
            speed = flop * len(steps) / sum(steps)
            figures = (f"{whole:.2f}", f"{peak:,.0f}")
            measured.append((name, NAMES[side], f"{rate:.2f}", speed, *figures))
        best = best.best(limits())
    lines = [(*row[:3], f"{row[3] / best.bf16:.0%}", *row[4:]) for row in measured]
    columns = ("rows", "by", "pairs/s", "of the limit", "with reference, first step", "peak MB")
    print(table(columns, lines))
    print(f"the machine's limit in this run: {best.show()}; of it: what a step's products take")
    return 0


def step_flop(model: str, rows: Sequence[dict[str, Any]]) -> float:
    """Return the FLOP of a mean step's products: a prompt counts once."""
    base = load_base(model, dtype="bf16")
    sizes = Sizes.of(base.model, 16)

    def tokens(row: dict[str, Any], name: str) -> int:
        return len(base.tokenizer(row[name])["input_ids"])

    prompts = [tokens(row, "prompt") for row in rows]
    answers = [[tokens(row, side) for side in ("chosen", "rejected")] for row in rows]
    lengths = [prompt + one for prompt, both in zip(prompts, answers, strict=True) for one in both]
    learnt = sum(map(sum, answers))
    flop = sizes.step_flop(lengths, sum(prompts) + learnt, learnt)
    once = 3.5 * sizes.attention * sum(prompt**2 for prompt in prompts) / 2  # its second time
    return (flop - once) * BATCH_SIZE / len(rows)


def main() -> int:
    """Run the requested comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", required=True, help="python of an environment with trl and peft")
    parser.add_argument("--model")
    parser.add_argument("--losses", type=lambda text: text.split(","), default=LOSSES)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--rows", type=int, default=48)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return (speed if args.speed else parity)(args, Path(folder))


if __name__ == "__main__":
    raise SystemExit(main())
