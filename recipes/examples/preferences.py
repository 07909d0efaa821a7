"""DPO after the quickstart: SmolLM2-135M learns to omit empty fields from its JSON.

The quickstart adapter writes "extras": [] for orders without extras. For these orders, the chosen
answer omits the empty field. The data also has orders with extras, whose chosen answers keep the
field; otherwise the model would learn to omit it everywhere.

Needs: the adapter of recipes/examples/quickstart.py in runs/quickstart, 2 CPU cores or a GPU, 3 GB
of memory, 5 minutes. Without that adapter, training starts from the base, which writes no JSON.
Gives: metrics on held-out orders before and after, and an adapter in runs/preferences.
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
"""Numbers of orders without extras and with extras."""


def without_empty(order: dict[str, Any]) -> dict[str, Any]:
    """Return an order without its empty fields."""
    return {name: value for name, value in order.items() if value not in ([], {}, "", None)}


def make_pair(row: dict[str, str]) -> dict[str, Any]:
    """Return a preference pair; the chosen answer has exactly the non-empty fields."""
    order = json.loads(row["output"])
    chosen = without_empty(order)
    rejected = order if chosen != order else {k: v for k, v in order.items() if k != "extras"}
    return {
        "prompt": [{"role": "user", "content": row["instruction"]}],
        "chosen": [{"role": "assistant", "content": json.dumps(chosen)}],
        "rejected": [{"role": "assistant", "content": json.dumps(rejected)}],
    }


def make_data(folder: Path) -> dict[str, Path]:
    """Write training pairs, held-out pairs with an empty field, and held-out orders.

    Held-out orders come from the quickstart's held-out file, so no training has seen them.
    """
    made = runpy.run_path(str(HERE / "quickstart.py"))["make_data"](folder / "orders")
    parts = []
    for file, (num_empty, num_full) in zip(made, (NUM_TRAIN, NUM_HELD_OUT), strict=True):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        empty = [row for row in rows if not json.loads(row["output"])["extras"]]
        full = [row for row in rows if json.loads(row["output"])["extras"]]
        parts.append((empty[:num_empty], full[:num_full]))
    (empty, full), (held_empty, held_full) = parts
    orders = [
        {**row, "output": json.dumps(without_empty(json.loads(row["output"])))}
        for row in (*held_empty, *held_full)
    ]
    return {
        "train": write(map(make_pair, (*empty, *full)), folder / "train.jsonl"),
        "held_out": write(map(make_pair, held_empty), folder / "held_out.jsonl"),
        "orders": write(orders, folder / "held_out_orders.jsonl"),
    }


def write(rows: Iterable[dict[str, Any]], file: Path) -> Path:
    """Write rows and return their file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def measure(base: Base, data: dict[str, Path], **how: Any) -> dict[str, float]:
    """Return metrics of held-out pairs and of answers to held-out orders.

    A pair is correct if the chosen answer has the higher log-probability. The accuracy of the loss
    cpo measures this, because cpo has no reference model. With dpo, policy and reference are equal
    before training, so all margins are 0.
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
    """Return the JSON object in an answer, or None."""
    try:
        value = json.loads(row.completion)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def is_lean(row: Answer) -> bool:
    """Return whether an answer is a JSON object without empty fields."""
    order = parsed(row)
    return order is not None and without_empty(order) == order


def share(found: Iterable[bool]) -> float:
    """Return the fraction of true values."""
    all_found = list(found)
    return sum(all_found) / len(all_found)


def main() -> None:
    """Create the data, evaluate the start, train, evaluate again."""
    began = time.monotonic()
    OUT.mkdir(parents=True, exist_ok=True)
    data = make_data(OUT / "data")
    continues = (START / "adapter_config.json").is_file()
    start = START if continues else f"the base ({START} does not exist)"
    print(f"Training starts from {start}.", flush=True)
    settings = load_recipe(
        HERE.parent / "preference.yaml",
        [
            f"base.model={BASE}",
            f"method.start_from={START if continues else 'null'}",
            f"data.train={data['train']}",
            f"data.eval={data['held_out']}",
            f"train.output_dir={OUT}",
            "train.gradient_accumulation=1",  # few pairs, small model: more and larger steps
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
