"""Chat templates that write tool calls as the families do, in few lines each."""

import copy
from typing import Any

from peftkit.data.chat_template import CHATML

_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_TOOLS = "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
_HEAD = _TOOLS + "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
_SAID = "{{ m.content or '' }}"
_CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_ARGUMENTS = "{% for k, v in f.arguments | items %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_END = "{{ '<|im_end|>\n' }}{% endfor %}" + _ASK
SHORT = (
    CHATML[: CHATML.index("{{- '# Tools")]
    + "{%- for tool in tools %}{{- tool.function.name }}{%- endfor %}{{- '<|im_end|>\\n' }}"
    + CHATML[CHATML.index("{%- endif %}\n{%- for message") :]
)
"""Renders only the names of tools: the tiny models have a short context."""


def _turns(calls: str) -> str:
    return _HEAD + _SAID + calls + _END


def with_calls(call: str) -> str:
    """Return a template of turns that writes each call, whose function is f, in this way."""
    return _turns(_CALLS + call + "{% endfor %}")


TEMPLATES: dict[str, str] = {
    "hermes": CHATML,
    "coder": _turns(
        _CALLS + "{{ '<tool_call>\n<function=' + f.name + '>\n' }}" + _ARGUMENTS
        + "{{ '<parameter=' + k + '>\n' }}" + _VALUE + "{{ '\n</parameter>\n' }}{% endfor %}"
        "{{ '</function>\n</tool_call>' }}{% endfor %}"
    ),
    # ends an answer with what opens the next turn, as GLM's
    "observed": "{% for m in messages %}{% if m.role == 'tool' %}{{ '<|observation|>' }}{% else %}"
    "{{ '<|' + m.role + '|>' }}{% endif %}{{ '\n' }}" + _SAID + _CALLS
    + "{{ '<tool_call>{\"name\": \"' + f.name + '\", \"arguments\": ' }}"
    "{{ (f.arguments | tojson) + '}</tool_call>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    "mistral": _turns(
        "{% if m.tool_calls %}{{ '[TOOL_CALLS] [' }}" + _CALLS
        + "{{ '{\"name\": \"' + f.name + '\", \"arguments\": ' + (f.arguments | tojson) }}"
        "{{ ', \"id\": \"' + c.id + '\"}' + ('' if loop.last else ', ') }}{% endfor %}{{ ']' }}"
        "{% endif %}"
    ),
    "mistral_v11": _turns(
        _CALLS + "{{ '[TOOL_CALLS]' + f.name + '[CALL_ID]' + c.id + '[ARGS]' }}"
        "{{ f.arguments | tojson }}{% endfor %}"
    ),
    # requires arguments as text
    "as_text": _turns(
        _CALLS + "{{ '<tool_call>\n{\"name\": \"' + f.name + '\", \"arguments\": ' + f.arguments }}"
        "{{ '}\n</tool_call>' }}{% endfor %}"
    ),
    "harmony": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' }}"
    "{{ m.reasoning_content + '<|end|>' }}{% endif %}{% if m.tool_calls %}"
    "{% set f = m.tool_calls[0].function %}{{ '<|start|>assistant to=functions.' + f.name }}"
    "{{ '<|channel|>commentary json<|message|>' + (f.arguments | tojson) + '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{% endif %}{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
    # writes no content beside a call, and takes one call a turn
    "llama": _HEAD + "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}{% set f = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' + (f.arguments | tojson) + '}' }}"
    "{% else %}" + _SAID + "{% endif %}" + _END,
}  # fmt: skip
FORM_OF = {"mistral_v11": "mistral", "observed": "hermes", "as_text": "hermes"}
"""Formats of templates that are not named after theirs."""
ONE_CALL = ("llama", "harmony")
"""Templates that write one call a turn."""

_SPECIAL = (
    *("<|observation|>", "<|user|>", "<|assistant|>", "<|call|>", "<|end|>", "<|start|>"),
    *("<|channel|>", "<|message|>", "[TOOL_CALLS]"),
)


def with_template(tokenizer: Any, template: str) -> Any:
    """Return a copy of a tokenizer with a chat template and the families' special tokens."""
    changed = copy.deepcopy(tokenizer)
    changed.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *_SPECIAL]})
    changed.chat_template = template
    return changed
