"""The labels of a classifier in the report: metrics of each, and the confusion matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peftkit.report.html import table, text

SHARES = ("precision", "recall", "f1")


def labels_section(report: Mapping[str, Any]) -> str:
    """Return the metrics of each label and the confusion matrix; "" for other tasks.

    Args:
        report: The last line of the event ClassReport in metrics.jsonl.
    """
    labels: Mapping[str, Mapping[str, float]] = report.get("labels") or {}
    rows = [
        (name, *(f"{metrics[share]:.3f}" for share in SHARES), f"{metrics['rows']:,}")
        for name, metrics in labels.items()
    ]
    parts = [table(("label", "precision", "recall", "F1", "rows"), rows, numbers=True)]
    if confusion := report.get("confusion"):
        title = "Confusion matrix: rows are true labels, columns are predicted labels"
        parts += [f"<h3>{title}</h3>", _heat_map([*labels], confusion)]
    return "".join(parts)


def _heat_map(labels: Sequence[str], confusion: Sequence[Sequence[int]]) -> str:
    """Return a table whose cells are shaded by their share of the true label's rows."""
    head = "".join(f"<th>{text(name)}</th>" for name in labels)
    body = []
    for row, (true, numbers) in enumerate(zip(labels, confusion, strict=True)):
        total = max(sum(numbers), 1)
        cells = (
            f'<td class="{"hit" if row == column else "miss"}" style="--share:{n / total:.0%}" '
            f'title="{text(f"{true} as {labels[column]}: {n / total:.0%}")}">{n:,}</td>'
            for column, n in enumerate(numbers)
        )
        body.append(f"<tr><th>{text(true)}</th>{''.join(cells)}</tr>")
    grid = f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll"><table class="confusion">{grid}</table></div>'
