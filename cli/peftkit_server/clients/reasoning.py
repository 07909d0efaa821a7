"""`reasoning_effort` as a variable of the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from peftkit.data.chat_template import own_template
from peftkit.data.style import Style
from peftkit_server.refusals import RequestError
from peftkit_server.requests import ChatBody


def template_variables(body: ChatBody, tokenizer: Any, style: Style) -> Mapping[str, Any] | None:
    """Return the variables of a request for the chat template; None: those of training.

    Raises:
        RequestError: The request has an effort, and the template no variable for it.
    """
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    effort = body.reasoning_effort
    template = (style.chat_template or own_template(tokenizer)) if style.kind == "chat" else ""
    variables: dict[str, Any] = {}
    if re.search(r"\benable_thinking\b", template):
        variables["enable_thinking"] = effort != "none"
    if re.search(r"\breasoning_effort\b", template):
        variables["reasoning_effort"] = effort
    if not variables:
        raise RequestError(
            "this model does not support reasoning_effort.",
            found="Its chat template has no variable reasoning_effort or enable_thinking.",
            fix="Remove the field.",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return {**variables, **(body.chat_template_kwargs or {})}
