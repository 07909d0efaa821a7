"""Preferences after the quickstart: SmolLM2-135M learns to leave empty fields out of its JSON.

The quickstart's answers hold "extras": [] where an order has none. Of two answers to such an order
the one without the empty field is chosen. Orders with extras are there too, so that not all extras
are lost: their chosen answer keeps them.

Needs: the adapter of recipes/quickstart.py in runs/quickstart, 2 CPU cores or a GPU, 3 GB of
memory, 5 minutes. Without that adapter it begins with the base, which writes no JSON.
Gives: figures of held-out orders before and after, and an adapter in runs/preferences.
"""

from __future__ import annotations

import json
import runpy
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peftkit import (
    Answer,
    Base,
    PreferenceConfig,
    answer,
    evaluate,
    load_base,
    load_recipe,
    open_adapter,
    run_recipe,
)
from peftkit_cli.render import Renderer

HERE = Path(__file__).parent
START, OUT = Path("runs/quickstart"), Path("runs/preferences")
BASE = "smollm2-135m"
NUM_TRAIN, NUM_HELD_OUT = (96, 48), (16, 16)
"""Orders without extras, and with them."""


def without_empty(order: dict[str, Any]) -> dict[str, Any]:
    """Return an order without the fields that hold nothing."""
    return {name: value for name, value in order.items() if value not in ([], {}, "", None)}


def make_pair(row: dict[str, str]) -> dict[str, Any]:
    """Return a quickstart's row as a pair: the fields that hold something, all and no others."""
    order = json.loads(row["output"])
    chosen = without_empty(order)
    rejected = order if chosen != order else {k: v for k, v in order.items() if k != "extras"}
    return {
        "prompt": [{"role": "user", "content": row["instruction"]}],
        "chosen": [{"role": "assistant", "content": json.dumps(chosen)}],
        "rejected": [{"role": "assistant", "content": json.dumps(rejected)}],
    }


def make_data(folder: Path) -> dict[str, Path]:
    """Write pairs to learn from, held-out pairs with an empty field, and held-out orders.

    The orders are the quickstart's, held-out ones too: it has seen none of them in training.
    """
    made = runpy.run_path(str(HERE / "quickstart.py"))["make_data"](folder / "orders")
    parts = []
    for file, (num_empty, num_full) in zip(made, (NUM_TRAIN, NUM_HELD_OUT), strict=True):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        empty = [row for row in rows if not json.loads(row["output"])["extras"]]
        full = [row for row in rows if json.loads(row["output"])["extras"]]
        parts.append((empty[:num_empty], full[:num_full]))
    (empty, full), (held_empty, held_full) = parts
    asked = [
        {**row, "output": json.dumps(without_empty(json.loads(row["output"])))}
        for row in (*held_empty, *held_full)
    ]
    return {
        "train": write(map(make_pair, (*empty, *full)), folder / "train.jsonl"),
        "held_out": write(map(make_pair, held_empty), folder / "held_out.jsonl"),
        "orders": write(asked, folder / "held_out_orders.jsonl"),
    }


def write(rows: Iterable[dict[str, Any]], file: Path) -> Path:
    """Write rows and return their file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def measure(base: Base, data: dict[str, Path], **how: Any) -> dict[str, float]:
    """Return shares of held-out pairs and of answers to held-out orders.

    A pair is right if the chosen answer is the more probable one as a whole. The loss cpo has no
    reference, so that its accuracy is just that; dpo's compares with the start, where all are 0.
    """
    pairs = evaluate(base, data["held_out"], task=PreferenceConfig(loss="cpo"), **how)
    answers = answer(base, data["orders"], **how)
    empty, full = answers[: NUM_HELD_OUT[0]], answers[NUM_HELD_OUT[0] :]
    return {
        "pairs whose chosen answer is more probable": pairs["accuracy"],
        "answers that are valid JSON": share(parsed(row) is not None for row in answers),
        "answers without empty fields, where there are no extras": share(map(is_lean, empty)),
        "answers exactly right, where there are no extras": share(row.is_exact for row in empty),
        "answers exactly right, where there are extras": share(row.is_exact for row in full),
    }


def parsed(row: Answer) -> dict[str, Any] | None:
    """Return the object that an answer is, None if it is none."""
    try:
        value = json.loads(row.completion)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def is_lean(row: Answer) -> bool:
    """Return whether an answer is valid JSON in which no field is empty."""
    order = parsed(row)
    return order is not None and without_empty(order) == order


def share(found: Iterable[bool]) -> float:
    """Return how many of all are true."""
    all_found = list(found)
    return sum(all_found) / len(all_found)


def main() -> None:
    """Make the data, measure the start, train, measure again."""
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    data = make_data(OUT / "data")
    continues = (START / "adapter_config.json").is_file()
    print(f"Begins with {START if continues else 'the base: no quickstart was run'}.", flush=True)
    settings = load_recipe(
        HERE / "preference.yaml",
        [
            f"base.model={BASE}",
            f"method.start_from={START if continues else 'null'}",
            f"data.train={data['train']}",
            f"data.eval={data['held_out']}",
            f"train.output_dir={OUT}",
            "train.gradient_accumulation=1",  # few pairs and a small model: more, larger steps
            "train.learning_rate=1.0e-4",
        ],
    )
    with Renderer() as on_event:
        if continues:
            opened = open_adapter(START, on_event=on_event)
            before = measure(opened.base, data, style=opened.style, on_event=on_event)
            del opened
        else:
            base = load_base(BASE, quantize=settings.base.quantize, on_event=on_event)
            before = measure(base, data, on_event=on_event)
            del base
        run_recipe(settings, overwrite=True, on_event=on_event)
        opened = open_adapter(OUT, on_event=on_event)
        after = measure(opened.base, data, style=opened.style, on_event=on_event)
    print(f"\n{NUM_HELD_OUT[0]} held-out pairs, {sum(NUM_HELD_OUT)} held-out orders:")
    for name, value in before.items():
        print(f"  {name}: {value:.0%} -> {after[name]:.0%}")
    print(f"The adapter is in {OUT}; {(time.monotonic() - began) / 60:.1f} minutes.", flush=True)


if __name__ == "__main__":
    main()
