"""The call format of a tokenizer's `response_template` (transformers 5.13).

A response template has the markers around calls and reasoning, as texts or patterns. transformers
uses it to parse calls. The opening and closing texts are the matches of the patterns in a probe
call rendered by the chat template.
"""

from __future__ import annotations

from typing import Any

from peftkit.inference.call_formats import NO_CALLS, Call, CallFormat, NoCall, calls_of

CALLS = "tool_calls"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
UNTYPED = ("xml-inline", "kv-lines")


def shipped_format(template: Any, written: str, name: str) -> CallFormat | None:
    """Return the format of a response template; None if it does not match the probe call.

    Args:
        template: The tokenizer's response template.
        written: The chat template's rendering of the probe call.
        name: Function name in the probe call.
    """
    try:
        from transformers.utils.chat_parsing import ResponseParser
        from transformers.utils.chat_parsing.response_templates import load_response_template
    except ImportError:  # before 5.13
        return None
    try:
        loaded = load_response_template(template)
    except Exception:  # from another version, or invalid
        return None
    field: Any = loaded.fields.get(CALLS)
    begin = field.open_re.search(written) if field and field.open_re else None
    if begin is None:
        return None
    opens = begin.group().partition(name)[0].strip()
    end = field.close_re.search(written, begin.end()) if field.close_re else None
    if not opens or (end is None and field.close_re):
        return None

    def read(text: str) -> list[Call]:
        parser = ResponseParser(loaded, prefix="")
        try:
            parser.feed(text)
            parsed = parser.finalize()[0].get(CALLS) or []
            calls = parsed if isinstance(parsed, list) else [parsed]
            functions = [call["function"] for call in calls]
        except Exception as error:  # its parsers raise any type
            raise NoCall(str(error)) from error
        return calls_of(functions)

    return CallFormat(
        "shipped",
        (opens,),
        end and end.group().strip(),
        read,
        is_untyped=field.content in UNTYPED,
        thought=_thought(loaded),
    )


def _thought(loaded: Any) -> tuple[str, str]:
    """Return the markers around reasoning, such as <think> and </think>."""
    for name in THOUGHTS:
        field = loaded.fields.get(name)
        if field is not None and field.open_literals and field.close_literals:
            return field.open_literals[0].strip(), field.close_literals[0].strip()
    return NO_CALLS.thought
