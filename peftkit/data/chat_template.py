"""Chat templates: ChatML, the template of `data.chat_template`, and the tokenizer's template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

from peftkit.errors import BaseError, DataError, did_you_mean
from peftkit.files import disk
from peftkit.files.strict_json import Json

TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
MAX_CONFIG_BYTES = 64 << 20

# ChatML; tools and calls in the format of Qwen2.5 and Hermes
CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more of these functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nTo call a function, write a JSON object with its name and arguments:\\n' }}
{{- '<tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def choose_template(
    tokenizer: object, choice: str | None, variables: Mapping[str, object] | None = None
) -> str | None:
    """Return the template of `data.chat_template`; None: the tokenizer's template, if any.

    Args:
        variables: Defaults for the template's variables. The returned template sets them in its
            first lines, so generation uses the same values as training.

    Raises:
        DataError: The file does not exist, or the template does not read one of the variables.
    """
    template = None if choice is None else _named_template(choice)
    if not variables:
        return template
    text = own_template(tokenizer) if template is None else template
    for name in variables:
        if not name.isidentifier() or not re.search(rf"\b{name}\b", text):
            raise DataError(
                f"Cannot use data.chat_template_kwargs: {name}.",
                found="The chat template does not read it." if text else "There is no template.",
                fix="Remove it, or set data.chat_template to a template that reads it.",
            )
    lines = [
        f"{{%- set {name} = {name} if {name} is defined else "
        f"{json.dumps(value, ensure_ascii=False)} -%}}\n"  # jinja2 reads no pairs of surrogates
        for name, value in variables.items()
    ]
    return "".join(lines) + text


def own_template(tokenizer: object) -> str:
    """Return the text of a tokenizer's or processor's template, "" if it has none."""
    for owner in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        if template := getattr(owner, "chat_template", None):
            return str(template.get("default", "") if isinstance(template, Mapping) else template)
    return ""


def shortened(text: str, length: int = 44) -> str:
    """Return the beginning of a text, in quotes and on one line."""
    line = " ".join(text.split())
    return f'"{line if len(line) <= length else line[: length - 3] + "..."}"'


def with_system(template: str, system: str) -> str:
    """Return a template that adds this system turn to conversations without one."""
    # `role[:6]`, because `Chat` searches the template for the word "developer"
    line = (
        "{%- if messages[0].role[:6] not in ('system', 'develo') -%}"
        "{%- set messages = [{'role': 'system', 'content': SYSTEM}] + (messages | list) -%}"
        "{%- endif -%}\n"
    )
    return line.replace("SYSTEM", json.dumps(system, ensure_ascii=False)) + template


def template_in(folder: Path) -> str:
    """Return the chat template in a folder, or ""; raises BaseError for a damaged config."""
    if (folder / TEMPLATE).is_file():
        return (folder / TEMPLATE).read_text(encoding="utf-8")
    templates = read_tokenizer_config(folder / TOKENIZER_CONFIG).get("chat_template")
    if isinstance(templates, list):  # a list of named templates
        templates = {one["name"]: one["template"] for one in templates}
    return own_template(SimpleNamespace(chat_template=templates))


def eos_in(folder: Path) -> str:
    """Return the end token of the tokenizer in a folder, or ""; errors as `template_in`."""
    token = read_tokenizer_config(folder / TOKENIZER_CONFIG).get("eos_token")
    return str(token.get("content", "") if isinstance(token, Mapping) else token or "")


def read_tokenizer_config(path: Path) -> Json:
    """Return a tokenizer's config, in which "no limit" may be a number beyond 64 bits; or {}.

    Raises:
        BaseError: It is not a JSON object, or it is too large.
    """
    if not path.is_file():
        return {}
    try:
        with disk.open_regular(path, error=BaseError) as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise BaseError(f"cannot read {path} as JSON", found=str(error)) from error
    if not isinstance(config, dict):
        raise BaseError(f"cannot read {path}", found=f"It holds a {type(config).__name__}.")
    return config


def _named_template(choice: str) -> str:
    if choice == "chatml":
        return CHATML
    path = Path(choice).expanduser()
    summary = f"Cannot use data.chat_template '{choice}'."
    if path.suffix not in {".jinja", ".j2"}:
        hint = did_you_mean(choice, ["chatml"])
        raise DataError(summary, found=hint, fix='Give "chatml" or the path of a .jinja file.')
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise DataError(summary, found=str(problem)) from None
