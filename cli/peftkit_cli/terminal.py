"""Line editing in a terminal."""

from __future__ import annotations

from contextlib import suppress


def edit_several_lines() -> None:
    """Enable multi-line `input`: pasted lines are one text, and Alt-Enter inserts a line break.

    Python's readline disables bracketed paste. libedit (macOS) supports neither.
    """
    with suppress(ImportError):  # no readline on Windows
        import readline

        if "libedit" not in (readline.__doc__ or ""):
            readline.parse_and_bind("set enable-bracketed-paste on")
            readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')
