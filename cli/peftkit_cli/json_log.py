"""Logs for machines: `--log-format json` writes each event as one line of JSON to stderr.

The lines have the fields of `peftkit.events`; Error and Note are events of the command line.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from peftkit.events import Event, as_line, event_line, logs_json


def write(line: str) -> None:
    """Write one line, or nothing if the reader of stderr has gone."""
    with suppress(OSError):
        sys.stderr.write(line)
        sys.stderr.flush()


def on_event(event: Event) -> None:
    """Write an event."""
    write(event_line(event))


def write_error(kind: str, error: Exception | None, text: str) -> None:
    """Write an error: its class, and of an error of peftkit its three parts."""
    parts = {name: getattr(error, name, "") for name in ("problem", "found", "fix")}
    fields = parts if parts["problem"] else {"problem": text, "found": "", "fix": ""}
    write(as_line("Error", {"kind": kind, "rank": int(os.environ.get("RANK", "0")), **fields}))


def write_note(text: str) -> bool:
    """Write a remark, if the log is JSON; return whether it is."""
    if logs_json():
        write(as_line("Note", {"text": text}))
    return logs_json()
