"""Format counts, sizes, durations and metrics for people."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from peftkit.errors import ConfigError

RECENT_STEPS = 10


def loss_name(steps: int = RECENT_STEPS) -> str:
    """Return the label of the training loss (see `recent_mean`) of a run with `steps` steps."""
    number = min(steps, RECENT_STEPS)
    return f"loss (mean of the last {number} steps)" if number > 1 else "loss (of one step)"


def recent_mean(losses: Sequence[float]) -> float | None:
    """Return the mean of the last RECENT_STEPS losses; None for no losses."""
    recent = losses[-RECENT_STEPS:]
    return sum(recent) / len(recent) if recent else None


def count(value: float) -> str:
    """Format a count: 4.88M, 135.2M."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= factor:
            return f"{value / factor:,.{2 if value < 10 * factor else 1}f}{unit}"
    return str(value)


def size(num_bytes: float, decimals: int = 1) -> str:
    """Format a number of bytes: 1.3 GB. 1 GB is 10^9 bytes, as in `train.memory` and on disks."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.{decimals}f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Format seconds: 42 s, 3:07, 1:02:45."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    minutes, left = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def rough_duration(seconds: float) -> str:
    """Format an estimate of seconds to about one digit: 0.3 s, 40 s, 6 min, 1.5 h."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            number = seconds / length
            step = 0.5 if number < 3 else 1 if number < 10 else 5 if number < 40 else 10
            return f"{round(number / step) * step:g} {unit}"
    return f"{float(f'{seconds:.1g}'):g} s"


def metric(name: str, value: float, extra_digits: int = 0) -> str:
    """Format a metric: bytes as a size, counts as integers, the rest with four digits."""
    if name.endswith("_bytes"):
        return size(value, 1 + extra_digits)
    is_count = float(value).is_integer() and abs(value) >= 2
    return f"{value:,.0f}" if is_count else f"{value:.{4 + extra_digits}g}"


_NAMES = {
    "num_tokens": "tokens",
    "num_targets": "target tokens",
    "num_rows": "rows",
    "tokens_per_second": "tokens/s",
    "peak_bytes": "peak memory",
    "drift_95": "95 % quantile of drift",
    "drift_same": "share of unchanged tokens",
}


def metric_name(name: str) -> str:
    """Return the display name of a metric: peak memory, best eval loss."""
    before, of_eval, rest = name.rpartition("eval_")
    return f"{before}{of_eval}".replace("_", " ") + _NAMES.get(rest, rest.replace("_", " "))


LOWER_IS_BETTER = re.compile(r"(^|_)((loss|perplexity|mse|wer|cer|kl)(_|$)|drift(_95)?$)")
"""Metrics of which a lower value is better, by name."""


def score_of(metrics: Mapping[str, float], name: str) -> float:
    """Return a metric as a score, the lowest the best; raises ConfigError for an unknown one."""
    if name not in metrics:
        found = f"An evaluation of this task has: {', '.join(metrics)}."
        raise ConfigError(f"there is no metric {name!r} for train.best_metric", found=found)
    return metrics[name] if LOWER_IS_BETTER.search(name) else -metrics[name]


def not_better(name: str, lowest: float) -> str:
    """Describe evaluations without a better score (`score_of`) than the lowest so far."""
    if lowest == math.inf:
        return f"{name} was not finite"
    if LOWER_IS_BETTER.search(name):
        return f"{name} did not fall below {lowest:.4g}"
    return f"{name} did not rise above {-lowest:.4g}"


def short(value: float | None) -> str:
    """Format a loss or a score with four digits; "-" for None."""
    return "-" if value is None else f"{value:.4g}"


def dtype_name(dtype: object) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
