"""The prompt format of a merged model: the chat template in its folder, and formats without one."""

from __future__ import annotations

import shutil
from pathlib import Path

from peftkit.base.new_tokens import Own, saved_tokens
from peftkit.data.chat_template import (
    TEMPLATE,
    TOKENIZER_CONFIG,
    read_tokenizer_config,
    shortened,
    template_in,
    with_system,
)
from peftkit.data.style import ALPACA, ALPACA_INPUT, Style
from peftkit.errors import BaseError
from peftkit.files import disk

GENERATION = "generation_config.json"
OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates")
"""A file and a folder that transformers also reads; some of its classes prefer them."""
CONFIGS = (TOKENIZER_CONFIG, "processor_config.json")
"""Files that may hold a "chat_template", which llama.cpp's converter prefers."""


def write_template(style: Style | None, folder: Path) -> None:
    """Write the chat template of training into a model's folder, replacing the base's.

    Args:
        style: The adapter's prompt style; without a template or system prompt nothing changes.

    Raises:
        BaseError: A config of the tokenizer is damaged.
    """
    template = None if style is None else style.chat_template
    if style is not None and style.system and (whole := template or template_in(folder)):
        template = with_system(whole, style.system)
    if template is None:
        return
    for name in OTHER_TEMPLATES:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
    for name in CONFIGS:
        if not (folder / name).is_file():
            continue
        config = read_tokenizer_config(folder / name)
        if config.pop("chat_template", None) is not None:
            disk.write_json(config, folder / name)
    disk.write_text(template, folder / TEMPLATE)


def write_format(own: Own, config: object, folder: Path) -> None:
    """Write the chat template and the end token of an adapter's tokenizer into a model's folder.

    Args:
        own: What differs from the base's tokenizer.
        config: The model's config.

    Raises:
        BaseError: A config of the tokenizer or of generation is damaged.
    """
    if own.template:
        write_template(Style("chat", own.template), folder)
    ids = [id for id, token in saved_tokens(folder).items() if str(token) == own.eos]
    if not ids:
        return
    path = folder / TOKENIZER_CONFIG
    disk.write_json(read_tokenizer_config(path) | {"eos_token": own.eos}, path)
    path = folder / GENERATION
    fields = disk.read_json(path, error=BaseError) if path.is_file() else {}
    fields.pop("_from_model_config", None)  # transformers would replace the values
    before = fields.get("eos_token_id", getattr(config, "eos_token_id", None)) or []
    stops = [*ids, *(before if isinstance(before, list) else [before])]
    disk.write_json(fields | {"eos_token_id": list(dict.fromkeys(stops))}, path)


def set_added_tokens(folder: Path, *, bos: bool) -> None:
    """Set whether a tokenizer adds BOS, and never EOS; raises BaseError for a damaged config."""
    path = folder / CONFIGS[0]
    config = read_tokenizer_config(path) if path.is_file() else {}
    disk.write_json(config | {"add_bos_token": bos, "add_eos_token": False}, path)


def prompt_note(style: Style | None) -> str:
    """Return a note on prompt requirements that the chat template does not express, or ""."""
    if style is None or style.kind == "chat":
        if style is None or not style.system:
            return ""
        return (
            "If a conversation has no system turn, its chat template adds the one from training: "
            f"{shortened(style.system)}."
        )
    if style.kind == "alpaca":
        return (
            "Trained on Alpaca's prompts (style alpaca), which model files cannot express: insert "
            "each question into the frame below, and complete this text (/v1/completions of a "
            "server), without a chat template."
        )
    return (
        "Trained on the unformatted prompts of the rows (style plain): complete the bare text "
        "(/v1/completions of a server), without a chat template."
    )


def frames(style: Style | None) -> str:
    """Return Alpaca's frames as Markdown, for a card; "" for other styles."""
    if style is None or style.kind != "alpaca":
        return ""
    question, with_input = ALPACA.format("QUESTION"), ALPACA_INPUT.format("QUESTION", "INPUT")
    return f"```text\n{question}```\n\nWith an input:\n\n```text\n{with_input}```"
