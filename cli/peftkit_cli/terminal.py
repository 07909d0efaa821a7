"""Editing of what is typed into a terminal."""

from __future__ import annotations

from contextlib import suppress


def edit_several_lines() -> None:
    """Let `input` edit what is typed: pasted lines are one text, and Alt-Enter begins a line.

    Python's readline leaves bracketed paste off. libedit, on a Mac, has neither of the two.
    """
    with suppress(ImportError):  # Windows has none
        import readline

        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")
            readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')
