"""Edits of single values in the text of a recipe; comments and layout stay."""

from __future__ import annotations

from typing import NamedTuple

import yaml

from peftkit.config.strict_yaml import StrictLoader


class Edit(NamedTuple):
    """How to set a value: text[start:end] is replaced by before + the new value + after.

    Attributes:
        value: The value as it is written; "" if the key is not written.
        start, end: In code points.
    """

    value: str
    start: int
    end: int
    before: str = ""
    after: str = ""

    def applied(self, text: str, value: str) -> str:
        """Return the text with another value."""
        return f"{text[: self.start]}{self.before}{value}{self.after}{text[self.end :]}"


def edit_of(text: str, section: str, name: str) -> Edit | None:
    """Return how to set a field of a section; None if the text has no such section with fields."""
    try:
        root = yaml.compose(text, Loader=StrictLoader)
    except (yaml.YAMLError, RecursionError):
        return None
    node = _field(root, section)
    if not isinstance(node, yaml.MappingNode) or not node.value:
        return None
    if (value := _field(node, name)) is not None:
        start = value.start_mark.index
        written = text[start : value.end_mark.index].rstrip()  # a block ends where the next begins
        # a list may begin in the column of its key, another value may not
        is_apart = bool(written) and value.start_mark.column > node.value[0][0].start_mark.column
        return Edit(written, start, start + len(written), "" if is_apart else " ")
    mark = node.value[:2][-1][0].start_mark  # the first key may be the section's type
    after = ", " if node.flow_style else "\n" + " " * mark.column
    return Edit("", mark.index, mark.index, f"{name}: ", after)


def _field(section: yaml.Node | None, name: str) -> yaml.Node | None:
    """Return the value of a key; None if the node has no such key."""
    fields = section.value if isinstance(section, yaml.MappingNode) else []
    return next((value for key, value in fields if key.value == name), None)
