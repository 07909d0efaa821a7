"""Pieces of HTML. Every text of a run goes through `text` on its way into a page."""

from __future__ import annotations

import html
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path


def text(value: object) -> str:
    """Return a value as HTML text or as an attribute's value, without what no HTML file can hold:
    lone surrogates and control characters."""
    known = str(value).encode("utf-8", "replace").decode("utf-8")
    clean = (c if c in "\n\t" or ord(c) >= 32 else "\N{REPLACEMENT CHARACTER}" for c in known)
    return html.escape("".join(clean))


def table(
    columns: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: bool = False
) -> str:
    """Return a table of texts, in a box that scrolls by itself where the page is narrow.

    Args:
        numbers: All columns but the first are aligned to the right.
    """
    head = "".join(f"<th>{text(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    kind = ' class="numbers"' if numbers else ""
    top = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    return f'<div class="scroll"><table{kind}>{top}<tbody>{body}</tbody></table></div>'


def paragraph(value: object, kind: str = "soft") -> str:
    """Return a paragraph of text; nothing if there is none."""
    return f'<p class="{kind}">{text(value)}</p>' if value else ""


def code(value: object) -> str:
    """Return a block of code or of a file's text."""
    return f"<pre><code>{text(value)}</code></pre>"


def shell_word(word: str | Path) -> str:
    """Return a word as a shell takes it."""
    return shlex.quote(str(word))
