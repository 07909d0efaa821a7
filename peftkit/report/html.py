"""HTML as values: every text is escaped unless it is HTML already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path


class Html(str):
    """Text that is HTML."""

    __slots__ = ()


Child = object
"""Html stands as it is, None is left out, lists are joined, all else is escaped text."""


def element(name: str, /, *children: Child, **attributes: object) -> Html:
    """Return an element; of attributes `cls` is class, `_` is written `-`, None is left out."""
    parts = [
        f' {"class" if key == "cls" else key.replace("_", "-")}="{escape(clean(str(value)))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    start = f"<{name}{''.join(parts)}>"
    return Html(start if name in ("meta", "link") else f"{start}{joined(children)}</{name}>")


def joined(children: Iterable[Child]) -> Html:
    """Return children one after the other."""
    return Html("".join(_one(child) for child in children))


def _one(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, list | tuple):
        return joined(child)
    return escape(clean(str(child)))


def clean(text: str) -> str:
    """Return a text without what no HTML file can hold: lone surrogates and control characters."""
    known = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(c if c in "\n\t" or ord(c) >= 32 else "\N{REPLACEMENT CHARACTER}" for c in known)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Child]], *, numbers: bool = False
) -> Html:
    """Return a table in a box that scrolls by itself where the page is narrow.

    Args:
        numbers: All columns but the first stand at the right.
    """
    head = element("thead", element("tr", [element("th", text) for text in columns]))
    body = [element("tr", [element("td", cell) for cell in row]) for row in rows]
    kind = "numbers" if numbers else None
    whole = element("table", head if any(columns) else None, element("tbody", body), cls=kind)
    return element("div", whole, cls="scroll")


def code(text: str) -> Html:
    """Return a block of code or of a file's text."""
    return element("pre", element("code", text))


def shell_word(word: str | Path) -> str:
    """Return a word as a shell takes it."""
    import shlex

    return shlex.quote(str(word))
