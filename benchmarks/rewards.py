"""Compare losses, step time and memory of GRPO with TRL.

    python -m benchmarks.rewards --peers PEERS/bin/python          # each loss, fp32, given answers
    python -m benchmarks.rewards --peers PEERS/bin/python --speed  # steps of GRPO, SmolLM2-135M

The first command uses a small Llama with random weights and a changed adapter. The old
log-probabilities of its completions differ from the current ones, and ratios are clipped. It exits
1 if a loss differs by more than 1e-4. The second generates rollouts and trains, separately on both
sides; seconds are processor time of one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.limits import Sizes, limits
from benchmarks.orders import make_rows
from benchmarks.preferences import NAME, NAMES, TOLERANCE, small_model, write
from benchmarks.report import table
from benchmarks.workers import work
from peftkit.adapter import attach
from peftkit.base.load import load_base
from peftkit.base.locate import locate
from peftkit.formats.peft.folder import save_adapter
from peftkit.methods.lora import LoRA

LOSSES = ("dapo", "grpo", "dr_grpo", "gspo", "cispo", "luspo", "sapo", "vespo")
"""RLOO is a separate trainer in TRL, with another formula for the ratio."""
ANSWERS, MAX_NEW_TOKENS = 8, 32


def make_groups(vocabulary: int) -> list[dict[str, Any]]:
    """Return prompts, each with completions and their advantages."""
    rng, groups = random.Random(0), []
    for prompt_length in (11, 5, 23):
        prompt = [rng.randrange(10, vocabulary) for _ in range(prompt_length)]
        answers = [
            [rng.randrange(10, vocabulary) for _ in range(rng.randint(2, MAX_NEW_TOKENS))]
            for _ in range(4)
        ]
        worth = [rng.uniform(-1.5, 1.5) for _ in answers]
        groups.append({"prompt": prompt, "answers": answers, "worth": worth})
    return groups


def parity(args: argparse.Namespace, folder: Path) -> int:
    """Compare each loss of the same completions; return 1 if one differs."""
    args.model = args.model or small_model(folder / "model")
    base = load_base(args.model, dtype="fp32")
    adapter = attach(base.model, LoRA(rank=8, alpha=16))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    save_adapter(adapter, folder / "start")
    job = {
        "source": locate(args.model).source,
        "adapter": str(folder / "start"),
        "groups": make_groups(len(base.tokenizer)),
        "losses": LOSSES,
        "max_new_tokens": MAX_NEW_TOKENS,
    }
    ours = work("ours_rewards", job, folder)
    theirs = work("trl_rewards", job | {"old": ours["old"]}, folder, python=args.peers)
    worst = 0.0
    lines = []
    for loss in LOSSES:
        a, b = ours[loss], theirs[loss]
        worst = max(worst, abs(a - b))
        lines.append((loss, f"{a:.7f}", f"{b:.7f}", f"{abs(a - b):.1e}"))
    print(table(("loss", "peftkit", "TRL", "difference"), lines))
    print(f"largest difference {worst:.1e}, allowed {TOLERANCE:.0e}")
    return int(worst > TOLERANCE)


def speed(args: argparse.Namespace, folder: Path) -> int:
    """Compare processor seconds and peak memory of steps with rollouts."""
    lines = make_rows(folder, args.steps * args.prompts).read_text().splitlines()
    prompts = [{"prompt": json.loads(line)["instruction"]} for line in lines]
    job = {
        "source": locate(args.model or NAME).source,
        "file": write(prompts, folder / "prompts.jsonl"),
        "prompts": args.prompts,
        "answers": ANSWERS,
        "max_new_tokens": args.max_new_tokens,
        "steps": args.steps,
        "rank": 16,
        "dtype": args.dtype,
        "environ": {"OMP_NUM_THREADS": "1"},
    }
    lines = []
    for side, python in (("ours", None), ("trl", args.peers)):
        kwargs = {} if python is None else {"python": python}
        found = work(f"{side}_rewards", job, folder, **kwargs)
        seconds, tokens = found["cpu_seconds"][1:], found["new_tokens"][1:]
        each, made = sum(seconds) / len(seconds), sum(tokens) / len(tokens)
        peak = found["peak_bytes"] / 1e6
        figures = (f"{each:.1f}", f"{made:.0f}", f"{made / each:.1f}", f"{peak:,.0f}")
        lines.append((NAMES[side], *figures))
        if python is None:
            told = share(args, [row["prompt"] for row in prompts], made, each)
    columns = ("by", "processor s a step", "new tokens a step", "tokens/s", "peak MB")
    print(table(columns, lines))
    print(told)
    return 0


def share(args: argparse.Namespace, prompts: list[str], num_new: float, seconds: float) -> str:
    """Return the time of a step at the limits of one thread, as a share of its measured time."""
    torch.set_num_threads(1)
    base, best = load_base(args.model or NAME, dtype=args.dtype), limits()
    sizes = Sizes.of(base.model, 16)
    tokens = [len(base.tokenizer(text)["input_ids"]) for text in prompts[: args.prompts]]
    rows = args.prompts * ANSWERS
    answers = sizes.answer_seconds(tokens, num_new, rows, best, args.dtype)
    lengths = [round(length + num_new / rows) for length in tokens for _ in range(ANSWERS)]
    learning = sizes.step_flop(lengths, round(sum(tokens) + num_new), round(num_new))
    least = answers + learning / getattr(best, args.dtype)
    limit = f"the machine's limit in this run: {best.show()}"
    return f"{limit}; peftkit's step is at {least / seconds:.0%} of it"


def main() -> int:
    """Run the requested comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", required=True, help="python of an environment with trl and peft")
    parser.add_argument("--model")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return (speed if args.speed else parity)(args, Path(folder))


if __name__ == "__main__":
    raise SystemExit(main())
