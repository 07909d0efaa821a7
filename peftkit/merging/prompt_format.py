"""The prompt format of a merged model: the chat template in its folder, and formats without one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peftkit.data.chat_template import own_template, shortened, with_system
from peftkit.data.style import ALPACA, ALPACA_INPUT, Style
from peftkit.errors import BaseError
from peftkit.files import disk

TEMPLATE = "chat_template.jinja"
OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates")
"""A file and a folder that transformers also reads; some of its classes prefer them."""
CONFIGS = ("tokenizer_config.json", "processor_config.json")
"""Files that may hold a "chat_template", which llama.cpp's converter prefers."""
MAX_CONFIG_BYTES = 64 << 20


def write_template(style: Style | None, folder: Path) -> None:
    """Write the chat template of training into a model's folder, replacing the base's.

    Args:
        style: The adapter's prompt style; without a template or system prompt nothing changes.

    Raises:
        BaseError: A config of the tokenizer is damaged.
    """
    template = None if style is None else style.chat_template
    if style is not None and style.system and (whole := template or _template_in(folder)):
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
        config = _read(folder / name)
        if config.pop("chat_template", None) is not None:
            disk.write_json(config, folder / name)
    disk.write_text(template, folder / TEMPLATE)


def set_added_tokens(folder: Path, *, bos: bool) -> None:
    """Set whether a folder's tokenizer adds BOS to texts; EOS is never added.

    Raises:
        BaseError: The tokenizer's config is damaged.
    """
    path = folder / CONFIGS[0]
    config = _read(path) if path.is_file() else {}
    disk.write_json(config | {"add_bos_token": bos, "add_eos_token": False}, path)


def _template_in(folder: Path) -> str:
    """Return the chat template in a model's folder, or ""."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    path = folder / CONFIGS[0]
    if not path.is_file():
        return ""
    templates = _read(path).get("chat_template")
    if isinstance(templates, list):  # a list of named templates
        templates = {one["name"]: one["template"] for one in templates}
    return own_template(SimpleNamespace(chat_template=templates))


def _read(path: Path) -> dict[str, Any]:
    """Return a tokenizer's config, in which "no limit" may be a number beyond 64 bits.

    Raises:
        BaseError: It is not a JSON object, or it is too large.
    """
    try:
        with disk.open_regular(path, error=BaseError) as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise BaseError(f"cannot read {path} as JSON", found=str(error)) from error
    if not isinstance(config, dict):
        raise BaseError(f"cannot read {path}", found=f"It holds a {type(config).__name__}.")
    return config


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
