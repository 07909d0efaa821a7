"""Requests to the chat APIs of clients: /v1/messages and /v1/responses."""

import json
from typing import Any, NamedTuple


class ChatApi(NamedTuple):
    """An endpoint, and the fields of a minimal request to it."""

    path: str
    asked: dict[str, Any]

    def create(self, client: Any, **fields: Any) -> dict[str, Any]:
        """Return the response to a request with further fields."""
        done = client.post(self.path, json={**self.asked, **fields})
        assert done.status_code == 200, done.text
        return dict(done.json())

    def stream(self, client: Any, **fields: Any) -> list[dict[str, Any]]:
        """Return the events of a streamed response."""
        done = client.post(self.path, json={**self.asked, **fields, "stream": True})
        assert done.headers["content-type"].startswith("text/event-stream"), done.text
        return named_events(done.text)


def named_events(text: str) -> list[dict[str, Any]]:
    """Return the fields of each server-sent event; its name is also its type."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        events.append(fields)
    return events


def call(name: str, n: int) -> str:
    """Return the text of a model that calls a function."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"n": {n}}}}}\n</tool_call>'


def without(value: Any, *changing: str) -> Any:
    """Return a response without the fields that differ each time, at any depth."""
    if isinstance(value, list):
        return [without(each, *changing) for each in value]
    if not isinstance(value, dict):
        return value
    return {key: without(each, *changing) for key, each in value.items() if key not in changing}
