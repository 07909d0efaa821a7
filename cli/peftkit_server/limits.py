"""Limits of a server. Each bounds the time, memory or disk of requests before the work starts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from peftkit.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server, and defaults of requests.

    Limits that begin with `key_` apply to each API key separately. docs/limits.md has the units,
    and the effects of an exceeded limit.

    Args:
        max_batch: Most completions that run simultaneously, and most of one request.
        max_waiting: Most prompts that wait; further requests receive HTTP 429.
        max_new_tokens: Default maximum length of a completion.
        temperature: Default temperature; 0 is greedy.
        num_keys: Number of API keys; 0: the server requires none.
    """

    max_batch: int = 32
    max_waiting: int = 64
    max_body: int = 1 << 20
    max_new_tokens: int = 1024
    temperature: float = 0.0
    head_seconds: int = 30
    body_seconds: int = 30
    body_rate: int = 16 << 10
    schema_bytes: int = 1 << 16
    grammar_seconds: int = 2
    grammar_bytes: int = 1 << 30
    lexer_states: int = 50_000
    response_bytes: int = 64 << 20
    upload_bytes: int = 512 << 20
    line_bytes: int = 32 << 20
    row_work: int = 1 << 27
    job_deaths: int = 3
    grader_seconds: int = 60
    graders: int = 4
    tinker_body: int = 16 << 20
    tinker_datums: int = 64 << 20
    tensor_bytes: int = 1 << 28
    operation_bytes: int = 1 << 29
    result_bytes: int = 1 << 28
    tinker_models: int = 256
    metadata_bytes: int = 1 << 16
    key_share: float = 0.75
    key_requests: int = 1024
    key_files: int = 1000
    key_jobs: int = 64
    key_models: int = 10_000
    key_bytes: int = 256 << 30
    key_records: int = 100_000
    num_keys: int = 0

    def share(self, total: int) -> int:
        """Return the part of a common limit that one key may use."""
        return total if self.num_keys < 2 else max(1, int(total * self.key_share))


DEFAULTS = Limits()
OPTIONS = ("max_batch", "max_waiting", "max_new_tokens", "temperature")
"""Fields with an option in `peftkit serve`."""
NAMES = tuple(each.name for each in fields(Limits) if each.name not in (*OPTIONS, "num_keys"))
_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([kMG]?)", re.ASCII)
_SUFFIXES = {"": 1, "k": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_limits(settings: Sequence[str]) -> dict[str, Any]:
    """Return the fields of `Limits` that NAME=VALUE settings change.

    Args:
        settings: For example "key_files=50"; k, M and G multiply by 1,024 and its powers.

    Raises:
        ConfigError: A name is unknown, or a value is not a number in its range.
    """
    values: dict[str, Any] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        name = name.strip().replace("-", "_")
        if name in OPTIONS:
            option = name.replace("_", "-")
            raise ConfigError(f"{name} is not set with --limit.", fix=f"Use --{option} {text}.")
        if name not in NAMES:
            raise ConfigError(
                f"there is no limit '{name[:40]}'.",
                found=f"The limits are: {', '.join(NAMES)}.",
                fix=did_you_mean(name, NAMES) or "Use one of these names: --limit NAME=VALUE.",
            )
        values[name] = _value(name, text.strip())
    return values


def _value(name: str, text: str) -> int | float:
    match = _NUMBER.fullmatch(text)
    value = float(match[1]) * _SUFFIXES[match[2]] if match else 0.0
    fix = "Use a whole number from 1; k, M and G multiply by 1,024 and its powers."
    is_valid = value >= 1 and value.is_integer()
    if name == "key_share":
        is_valid, fix = 0 < value <= 1, "Use a number from 0 to 1, such as 0.5."
    if not is_valid:
        raise ConfigError(f"the limit {name} is '{text[:40]}'.", fix=fix)
    return value if name == "key_share" else int(value)
