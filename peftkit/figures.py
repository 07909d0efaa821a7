"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

RECENT_STEPS = 10


def loss_name(steps: int = RECENT_STEPS) -> str:
    """Return what a table calls the training loss of a run of so many steps; see `recent_mean`."""
    number = min(steps, RECENT_STEPS)
    return f"loss (mean of the last {number} steps)" if number > 1 else "loss (of one step)"


def recent_mean(losses: Sequence[float]) -> float | None:
    """Return a run's training loss: the mean of its last RECENT_STEPS steps; None without any."""
    recent = losses[-RECENT_STEPS:]
    return sum(recent) / len(recent) if recent else None


def count(value: float) -> str:
    """Return a count as a text: 4.88M, 135.2M."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= factor:
            return f"{value / factor:,.{2 if value < 10 * factor else 1}f}{unit}"
    return str(value)


def size(num_bytes: float, decimals: int = 1) -> str:
    """Return bytes as a text, 1.3 GB; 1 GB is 10^9 bytes, as in `train.memory` and on disks."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.{decimals}f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Return seconds as a text: 42 s, 3:07, 1:02:45."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    minutes, left = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def rough_duration(seconds: float) -> str:
    """Return an estimate of seconds with about one figure: 0.3 s, 40 s, 6 min, 1.5 h."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= length:
            number = seconds / length
            step = 0.5 if number < 3 else 1 if number < 10 else 5 if number < 40 else 10
            return f"{round(number / step) * step:g} {unit}"
    return f"{float(f'{seconds:.1g}'):g} s"


def metric(name: str, value: float, more: int = 0) -> str:
    """Return a metric's value: bytes as sizes, counts whole, the rest with four figures.

    Args:
        more: Figures, beyond the usual ones.
    """
    if name.endswith("_bytes"):
        return size(value, 1 + more)
    is_count = float(value).is_integer() and abs(value) >= 2
    return f"{value:,.0f}" if is_count else f"{value:.{4 + more}g}"


_NAMES = {
    "num_tokens": "tokens",
    "num_rows": "rows",
    "tokens_per_second": "tokens/s",
    "peak_bytes": "peak memory",
}


def metric_name(name: str) -> str:
    """Return a metric's name as people read it: peak memory, eval loss."""
    return _NAMES.get(name, name.replace("_", " "))


def short(value: float | None) -> str:
    """Return a loss or a score with four figures; "-" for None."""
    return "-" if value is None else f"{value:.4g}"
