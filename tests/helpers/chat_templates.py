"""Chat templates as the hub's models have them, shortened, and tools."""

from typing import Any

_TURN = "'<|im_start|>' + m.role + '\\n' + m.content"
_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


TEMPLATES = {
    # ends a turn with a token and a line break (ChatML)
    "chatml": "{% for m in messages %}{{ " + _TURN + " + '<|im_end|>\\n' }}{% endfor %}" + _ASK,
    # speaks for the system where the row does not (SmolLM2, OLMo)
    "default_system": "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\\nBe good.<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ " + _TURN + " + '<|im_end|>\\n' }}{% endfor %}" + _ASK,
    # trims what is said, begins with bos (Gemma, Llama 3)
    "trims": "{{ bos_token }}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' + (m.content | trim) + '<|im_end|>\\n' }}"
    "{% endfor %}" + _ASK,
    # strips earlier turns' thinking, adds an empty one to the last turn (Qwen3)
    "thinks": "{% for m in messages %}{% set c = m.content %}{% set t = '' %}"
    "{% if '</think>' in c %}{% set t = c.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if loop.last and m.role == 'assistant' %}{{ '<think>\\n' + t + '\\n</think>\\n\\n' }}"
    "{% endif %}{{ c + '<|im_end|>\\n' }}{% endfor %}" + _ASK,
    # ends a whole conversation with one token more (Phi-3)
    "closes": "{% for m in messages %}{{ " + _TURN + " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% else %}{{ '<pad>' }}"
    "{% endif %}",
    # ends the last turn with another token than earlier ones (gpt-oss, OLMo)
    "returns": "{% for m in messages %}{{ " + _TURN + " }}"
    "{% if loop.last and m.role == 'assistant' %}{{ '<|im_end|>' }}{% else %}{{ '<pad>\\n' }}"
    "{% endif %}{% endfor %}" + _ASK,
    # has no generation prompt (Llama 2, Mistral)
    "inst": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}"
    "{% endif %}{% endfor %}",
    # asks without the space that the answer begins with (Vicuna)
    "vicuna": "{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + '\\n' }}"
    "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    # opens thinking in the generation prompt alone (DeepSeek-R1)
    "opens_think": "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant:<think>\\n' }}{% endif %}",
    # calls the assistant otherwise, writes the system prompt into the first message (Gemma)
    "folds": "{{ bos_token }}{% set system = '' %}{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content + '\\n\\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}"
    "{{ '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}"
    "{{ (system if loop.first else '') + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}",
    # ends no turn at all (GLM)
    "endless": "{% for m in messages %}{{ " + _TURN + " }}{% endfor %}" + _ASK,
}


# reads reasoning_content, strips that of earlier turns, can be told not to think (Qwen3)
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + c.function.name + (c.function.arguments | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
]
