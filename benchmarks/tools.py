"""Rollouts of three turns with tools: tokens/s compared with TRL and with separate requests.

    python -m benchmarks.tools --peers PEERS/bin/python

SmolLM2-135M is first trained on 48 dialogues to multiply, then to add, then to answer, and merged.
Both sides use this model, the same chat template and functions, and complete the same prompts eight
times each; TRL trains on four of the eight at a time, to need less memory. Seconds are processor
time of the rollouts, without training, on one thread; tokens are generated ones. `anew`: peftkit,
with a separate request for each turn.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.utils.chat_template_utils import get_json_schema

from benchmarks.limits import Sizes, limits
from benchmarks.report import heading, table, versions
from benchmarks.workers import work
from benchmarks.workers.sums import add, multiply
from peftkit import load_recipe, merge, run_recipe
from peftkit.base.load import load_base
from peftkit.base.locate import locate
from peftkit.data.chat_template import CHATML
from tests.helpers.folders import write_rows

NAME, NUM_SHOWN, ANSWERS = "smollm2-135m", 48, 8
SUMS = "benchmarks/workers/sums.py"
NAMES = {"ours": "peftkit", "anew": "peftkit, beginnings anew", "trl": "TRL + PEFT"}


def problems() -> Iterator[tuple[str, list[int]]]:
    """Yield questions and their three numbers."""
    draw = random.Random(0)
    while True:
        numbers = [draw.randint(112, 989), draw.randint(12, 99), draw.randint(112, 989)]
        yield "Multiply {} by {}, then add {}.".format(*numbers), numbers


def shown(question: str, numbers: list[int]) -> dict[str, Any]:
    """Return a dialogue of three turns."""
    a, b, c = numbers
    steps = (("multiply", {"a": a, "b": b}, a * b), ("add", {"a": a * b, "b": c}, a * b + c))
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for name, given, result in steps:
        call = {"type": "function", "function": {"name": name, "arguments": given}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": name, "content": str(result)})
    messages.append({"role": "assistant", "content": f"It is {a * b + c}."})
    return {"messages": messages, "tools": [get_json_schema(multiply), get_json_schema(add)]}


def write(rows: list[dict[str, Any]], file: Path) -> str:
    """Write rows; return their file."""
    write_rows(file, rows)
    return str(file)


def taught(folder: Path, made: Iterator[tuple[str, list[int]]]) -> str:
    """Return the folder of a model that calls both functions."""
    rows = [shown(*next(made)) for _ in range(NUM_SHOWN)]
    settings = load_recipe(
        Path(__file__).parent.parent / "recipes" / "quickstart.yaml",
        [
            f"base={{model: {NAME}}}",
            "method={type: lora, rank: 16, alpha: 32, targets: all-linear}",
            f"data={{train: {write(rows, folder / 'shown.jsonl')}, chat_template: chatml}}",
            f"train.output_dir={folder / 'shown'}",
            *("train.epochs=2", "train.batch_size=1", "train.learning_rate=6.0e-4"),
            *("train.save_every=null", "train.eval_every=null", "train.compile=false"),
        ],
    )
    run_recipe(settings)
    merge(folder / "shown", folder / "model", verify=False)
    return str(folder / "model")


def main() -> None:
    """Train a model, run the rollouts of each side, and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", required=True, help="python of an environment with trl and peft")
    parser.add_argument("--model", help="folder of a model from an earlier run")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, made = Path(name), problems()
        model = asked.model or taught(folder, made)
        rows = [{"prompt": next(made)[0]} for _ in range(asked.steps * asked.prompts)]
        job = {
            "source": locate(model).source,
            "file": write(rows, folder / "prompts.jsonl"),
            "prompts": asked.prompts,
            "answers": ANSWERS,
            "max_new_tokens": 192,
            "steps": asked.steps,
            "rank": 16,
            "dtype": "fp32",
            "template": CHATML,
            "tools": SUMS,
            "environ": {"OMP_NUM_THREADS": "1"},
        }
        found = {
            "ours": work("ours_rewards", job, folder),
            "anew": work("ours_rewards", job | {"anew": True}, folder),
            "trl": work("trl_rewards", job | {"parts": 2}, folder, python=asked.peers),
        }
        if broken := {side: facts["failed"] for side, facts in found.items() if "failed" in facts}:
            raise SystemExit(f"failed: {broken}")
        told = share(model, [row["prompt"] for row in rows], found["ours"])
    print(heading({"ours": versions(), "trl": found["trl"]["versions"]}) + "\n")
    print(table(COLUMNS, [cells(name, found) for name in NAMES]))
    print(told)


COLUMNS = ("by", "calls an answer", "tokens a rollout", "processor s", "tokens/s", "times TRL's")


def cells(side: str, found: dict[str, Any]) -> tuple[str, ...]:
    """Return a row; the first rollout of a run is left out."""
    seconds, tokens = (sum(found[side][key][1:]) for key in ("rollout_seconds", "new_tokens"))
    of_trl = sum(found["trl"]["new_tokens"][1:]) / sum(found["trl"]["rollout_seconds"][1:])
    calls, number = found[side]["calls"][1:], len(found[side]["calls"][1:])
    return (
        NAMES[side],
        f"{sum(calls) / number:.2f}",
        f"{tokens / number:.0f}",
        f"{seconds / number:.1f}",
        f"{tokens / seconds:.1f}",
        f"{tokens / seconds / of_trl:.1f} x",
    )


def share(model: str, questions: list[str], found: dict[str, Any]) -> str:
    """Return the time of our rollouts at the limits of one thread, as a share of the measured time.

    Each prompt is read once for all of its completions; output of tools is not counted.
    """
    torch.set_num_threads(1)
    base, best = load_base(model, dtype="fp32"), limits()
    tools = [get_json_schema(multiply), get_json_schema(add)]
    lengths = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        given: dict[str, Any] = {"tools": tools, "chat_template": CHATML, "tokenize": False}
        text = base.tokenizer.apply_chat_template(messages, add_generation_prompt=True, **given)
        lengths.append(len(base.tokenizer(text, add_special_tokens=False)["input_ids"]))
    later = lengths[len(lengths) // len(found["new_tokens"]) :]  # the first rollout is left out
    num_new, seconds = (sum(found[key][1:]) for key in ("new_tokens", "rollout_seconds"))
    sizes = Sizes.of(base.model, 16)
    rows = ANSWERS * len(later) // len(found["new_tokens"][1:])
    least = sizes.answer_seconds(later, num_new, rows, best, "fp32")
    limit = f"the machine's limit in this run: {best.show()}"
    return f"{limit}; peftkit's rollouts are at {least / seconds:.0%} of it"


if __name__ == "__main__":
    main()
