"""Compare the recipe of `peftkit init` with variants of it on small data sets.

    python -m benchmarks.defaults --out runs/defaults [--only format]

Generates three data sets: a format (100 rows), a style (300) and a classification by generated text
(1,000), each with 64 held-out rows. The words that decide the class of a held-out row occur in no
training row. Each data set trains the recipe of `peftkit.defaults`, variants with one setting
changed, and the recipe before these rules (packed, 16 rows, 2e-4). A score is the share of the
held-out answers that are exactly right. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from peftkit.base.load import load_base
from peftkit.defaults import Defaults, defaults_for
from peftkit.events import EvalDone, Event, Listener
from peftkit.recipe import Recipe
from peftkit.run import run

NAME, WIDTH = "smollm2-135m", 576
HELD_OUT = 64
LENGTH = 256
CHANGES: dict[str, Callable[[Defaults], Defaults]] = {
    "of the rules": lambda rules: rules,
    "a third of the learning rate": lambda rules: _with_rate(rules, 1 / 3),
    "three times the learning rate": lambda rules: _with_rate(rules, 3.0),
    "twice the rows of a step": lambda rules: replace(rules, batch_size=2 * rules.batch_size),
    "four times the rank": lambda rules: replace(rules, rank=4 * rules.rank),
}
ITEMS = ("pizza", "burger", "salad", "taco", "wrap", "curry", "soup", "pie", "bagel", "dumpling")
SIZES = ("small", "medium", "large")
STREETS = ("Oak", "Pine", "Mill", "River", "Church", "Garden", "Market", "Castle", "Bridge")
STYLES = {
    "Where is order {n}?": "Hello! Order {n} is on its way. Your Team North",
    "Can I return order {n}?": "Hello! Send order {n} back within 14 days. Your Team North",
    "Order {n} arrived broken.": "Hello! We replace order {n} at once. Your Team North",
    "How do I pay for order {n}?": "Hello! Pay for order {n} by card or invoice. Your Team North",
    "Please cancel order {n}.": "Hello! Order {n} is cancelled. Your Team North",
}
CLASSES = {
    "billing": ("invoice", "refund", "charge", "payment", "receipt", "bill", "bank transfer"),
    "delivery": (
        "parcel",
        "courier",
        "tracking",
        "address",
        "shipment",
        "package",
        "delivery date",
    ),
    "login": ("password", "account", "sign-in", "username", "code", "PIN", "login page"),
    "repair": ("screen", "battery", "hinge", "fan", "cable", "keyboard", "broken lamp"),
    "sales": ("quote", "discount", "licence", "offer", "order form", "price list", "new contract"),
}
NEW_WORDS = 2
"""The last words of each class occur only in held-out rows."""
SENTENCES = (
    "I have a question about my {word}, since {day}.",
    "The {word} is wrong again, please look at it before {day}.",
    "Who can help me with a {word}? It is for {day}.",
    "{day}: the {word} does not do what it should.",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
Row = dict[str, str]


def a_format(rng: random.Random, is_held_out: bool) -> Row:
    """Return a sentence with an order, and its fields in one line."""
    item, size, count = rng.choice(ITEMS), rng.choice(SIZES), rng.randint(2, 9)
    street, house = rng.choice(STREETS), rng.randint(1, 99)
    return {
        "instruction": f"{count} {size} {item}s to {house} {street} Street, please.",
        "output": f"{item}|{size}|{count}|{street} Street {house}",
    }


def a_style(rng: random.Random, is_held_out: bool) -> Row:
    """Return a customer's question, and the answer as one team words it."""
    asked, answer = rng.choice(list(STYLES.items()))
    number = rng.randint(100, 9_999)
    return {"instruction": asked.format(n=number), "output": answer.format(n=number)}


def a_class(rng: random.Random, is_held_out: bool) -> Row:
    """Return a message, and the team that it is for."""
    team, words = rng.choice(list(CLASSES.items()))
    words = words[-NEW_WORDS:] if is_held_out else words[:-NEW_WORDS]
    sentence = rng.choice(SENTENCES).format(word=rng.choice(words), day=rng.choice(DAYS))
    return {"instruction": sentence, "output": team}


SETS: dict[str, tuple[Callable[[random.Random, bool], Row], int]] = {
    "format": (a_format, 100),
    "style": (a_style, 300),
    "classes": (a_class, 1_000),
}


def make_rows(name: str, folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write training and held-out rows; return both files. No question is in both."""
    make, number = SETS[name]
    rng = random.Random(seed)
    held_out = _distinct(make, rng, HELD_OUT, is_held_out=True)
    train = _distinct(make, rng, number, held_out)
    while len(train) < number:  # few sentences: some repeat, as in real data
        train.append(rng.choice(train))
    folder.mkdir(parents=True, exist_ok=True)
    files = folder / "train.jsonl", folder / "held_out.jsonl"
    for file, part in zip(files, (train, held_out), strict=True):
        file.write_text("".join(part), encoding="utf-8")
    return files


def _distinct(
    make: Callable[[random.Random, bool], Row],
    rng: random.Random,
    number: int,
    others: Sequence[str] = (),
    *,
    is_held_out: bool = False,
) -> list[str]:
    """Return rows as lines, with distinct questions that are not in `others`."""
    asked = {json.loads(line)["instruction"] for line in others}
    tries = (make(rng, is_held_out) for _ in range(50 * number))
    rows = {row["instruction"]: row for row in tries if row["instruction"] not in asked}
    return [json.dumps(row) + "\n" for row in rows.values()][:number]


def recipe(files: tuple[Path, Path], out: Path, settings: Defaults) -> Recipe:
    """Return the recipe of these settings."""
    train = {
        "epochs": float(settings.epochs),
        "batch_size": settings.batch_size,
        "learning_rate": settings.learning_rate,
    }
    return _recipe(files, out, {"packing": settings.packing}, train, settings.rank)


def _with_rate(rules: Defaults, times: float) -> Defaults:
    return replace(rules, learning_rate=float(f"{rules.learning_rate * times:.1g}"))


def recipe_before(files: tuple[Path, Path], out: Path) -> Recipe:
    """Return the recipe that init wrote before the rules."""
    train = {"epochs": 5.0, "batch_size": 4, "gradient_accumulation": 4, "learning_rate": 2e-4}
    return _recipe(files, out, {"packing": True, "max_length": 2_048}, train)


def _recipe(files: tuple[Path, Path], out: Path, data: Any, train: Any, rank: int = 16) -> Recipe:
    train_file, held_out = map(str, files)
    return Recipe(
        base={"model": NAME},
        method={"type": "lora", "rank": rank, "alpha": 32, "targets": "all-linear"},
        data={"train": train_file, "eval": held_out, "max_length": LENGTH, **data},
        train={
            "output_dir": out,
            "eval_every": None,
            "save_every": None,
            "eval_generate": HELD_OUT,
            "compile": False,
            **train,
        },
    )


def keeping(evals: list[EvalDone]) -> Listener:
    """Return a listener that keeps the evaluations."""

    def keep(event: Event) -> None:
        if isinstance(event, EvalDone):
            evals.append(event)

    return keep


def main(argv: Sequence[str] | None = None) -> None:
    """Train them all, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--only", nargs="*", choices=SETS, default=list(SETS))
    arguments = parser.parse_args(argv)
    base = load_base(NAME)
    print("| rows | recipe | steps | exactly right | eval loss |")
    print("|---|---|---|---|---|")
    for name in arguments.only:
        files = make_rows(name, arguments.out / name)
        number = SETS[name][1]
        settings = defaults_for(number, width=WIDTH)
        recipes = {"before the rules": recipe_before(files, arguments.out / name / "before")}
        for number_of, (label, change) in enumerate(CHANGES.items()):
            folder = arguments.out / name / str(number_of)
            changed = change(settings)
            if label == "of the rules":
                label += f": {changed.batch_size} rows a step, {changed.learning_rate:g}"
            recipes[label] = recipe(files, folder, changed)
        for label, each in recipes.items():
            evals = list[EvalDone]()
            done = run(each, base=base, overwrite=True, on_event=keeping(evals))
            score, loss = evals[-1].metrics["exact_match"], evals[-1].metrics["loss"]
            cells = (f"{name}, {number:,}", label, f"{done.step}", f"{score:.0%}", f"{loss:.3f}")
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
