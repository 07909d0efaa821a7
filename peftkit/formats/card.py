"""The model card: what an adapter is, how it was made, how to load it anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peftkit.files import write_text

CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Card:
    """The facts of a card; whatever is not known is left out of it.

    Attributes:
        title: First line.
        base: Hub id or path of the base.
        facts: Name and value of each row of the table.
        metrics: Name to value, from the last evaluation.
        recipe: The YAML that made it.
        usage: Heading and shell or Python lines of each way to load it.
        notes: Sentences the reader must know.
    """

    title: str
    base: str | None
    facts: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    recipe: str = ""
    usage: Sequence[tuple[str, str, str]] = ()
    notes: Sequence[str] = ()
    library: str = "peft"


def adapter_usage(base: str | None, folder: str) -> list[tuple[str, str, str]]:
    """Return how an adapter is loaded in peftkit, PEFT and vLLM: heading, language, code."""
    model = base or "BASE"
    return [
        ("peftkit", "bash", f"peftkit chat {folder}\npeftkit merge {folder} --out merged"),
        (
            "PEFT",
            "python",
            "from peft import PeftModel\n"
            "from transformers import AutoModelForCausalLM\n\n"
            f'base = AutoModelForCausalLM.from_pretrained("{model}")\n'
            f'model = PeftModel.from_pretrained(base, "{folder}")',
        ),
        (
            "vLLM",
            "bash",
            f"vllm serve {model} --enable-lora --max-lora-rank 64 --lora-modules adapter={folder}",
        ),
    ]


def render_card(card: Card) -> str:
    """Return the card as Markdown with the front matter that model hubs read."""
    front = ["---", f"library_name: {card.library}", "tags:", "- peftkit"]
    if card.base and not card.base.startswith(("/", ".", "~")):
        front.insert(1, f"base_model: {card.base}")
    lines = [*front, "---", "", f"# {card.title}", ""]
    if card.facts:
        lines += ["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in card.facts.items()), ""]
    for note in card.notes:
        lines += [note, ""]
    if card.metrics:
        lines += ["## Measured", "", "| metric | value |", "|---|---|"]
        lines += [f"| {name} | {value:.4g} |" for name, value in card.metrics.items()] + [""]
    if card.usage:
        lines += ["## Use", ""]
        for heading, language, code in card.usage:
            lines += [f"{heading}:", f"```{language}", code, "```", ""]
    if card.recipe:
        lines += ["## Recipe", "", "```yaml", card.recipe.rstrip(), "```", ""]
    return "\n".join(lines)


def write_card(card: Card, folder: Path) -> None:
    """Write the card beside the files it describes."""
    write_text(render_card(card), folder / CARD)
