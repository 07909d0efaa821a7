"""Server-sent events of a response."""

import json
from typing import Any


def named_events(text: str) -> list[dict[str, Any]]:
    """Return the fields of each event; its name is also its type."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        events.append(fields)
    return events
