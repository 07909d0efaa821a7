"""HTML elements of a page. All text of a run is escaped by `text`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def text(value: object) -> str:
    """Return a value as HTML text, or as the value of an attribute.

    Lone surrogates and control characters are replaced, since HTML cannot represent them.
    """
    valid = str(value).encode("utf-8", "replace").decode("utf-8")
    clean = (c if c in "\n\t" or ord(c) >= 32 else "\N{REPLACEMENT CHARACTER}" for c in valid)
    return html.escape("".join(clean))


def table(
    columns: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: bool = False
) -> str:
    """Return a table in a box that scrolls horizontally on a narrow page; "" without rows.

    Args:
        numbers: Align all columns but the first to the right.
    """
    head = "".join(f"<th>{text(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    if not body:
        return ""
    kind = ' class="numbers"' if numbers else ""
    top = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    return f'<div class="scroll"><table{kind}>{top}<tbody>{body}</tbody></table></div>'


def paragraph(value: object, kind: str = "soft") -> str:
    """Return a paragraph of text; "" for an empty one."""
    return f'<p class="{kind}">{text(value)}</p>' if value else ""


def code(value: object) -> str:
    """Return a block of code or of a file's text; "" for an empty one."""
    return f"<pre><code>{text(value)}</code></pre>" if value else ""


def histogram(bars: Sequence[tuple[int, int]], label: str) -> str:
    """Return a histogram with a bar for each (lower edge, number), labelled by the edges."""
    highest = max((number for _, number in bars), default=0) or 1
    columns = (
        f'<div title="{edge:,}: {number:,}"><i style="height:{100 * number / highest:.1f}%"></i>'
        f"<span>{edge:,}</span></div>"
        for edge, number in bars
    )
    return f'<div class="bars" role="img" aria-label="{text(label)}">{"".join(columns)}</div>'
