"""The renderer of the recipe for verifiers; stand-ins have the fields of that package's."""

import json
import runpy
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from peftkit.data.tokens import tokens
from peftkit_cli.start.recipes import recipes_folder
from tests.helpers.chat_templates import TOOLS

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Lima"}}\n</tool_call>'


class Status:
    OK = "ok"


@pytest.fixture
def renderer(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    names = ("ParsedResponse", "ParsedToolCall", "RenderedTokens")
    base, configs = ModuleType("renderers.base"), ModuleType("renderers.configs")
    vars(base).update({**dict.fromkeys(names, SimpleNamespace), "ToolCallParseStatus": Status})
    vars(configs).update(BaseRendererConfig=SimpleNamespace)
    for name, module in {"base": base, "configs": configs}.items():
        monkeypatch.setitem(sys.modules, f"renderers.{name}", module)
    monkeypatch.setitem(sys.modules, "renderers", ModuleType("renderers"))
    made = runpy.run_path(str(recipes_folder() / "examples" / "verifiers" / "renderer.py"))
    return made["TemplateRenderer"](tokenizer, SimpleNamespace(template="chatml"))


def test_a_reply_is_parsed_and_continued_as_generated(renderer, tokenizer):
    asked = [{"role": "user", "content": [{"type": "text", "text": "Where is it hot?"}]}]
    prompt = renderer.render(asked, tools=TOOLS, add_generation_prompt=True).token_ids
    said = [*tokens(tokenizer, f"I  look.\n{CALL}"), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert said[-1] in renderer.get_stop_token_ids()
    read = renderer.parse_response(said, tools=TOOLS, prompt_ids=prompt)
    assert (read.content, read.reasoning_content) == ("I  look.", None)
    assert [(call.name, call.arguments) for call in read.tool_calls] == [
        ("weather", {"city": "Lima"})
    ]
    reply = {"role": "tool", "tool_call_id": "call_of_the_client", "content": "19 degrees"}
    bridged = renderer.bridge_to_next_turn(prompt, said, [reply], tools=TOOLS)
    assert bridged.token_ids[: len(prompt) + len(said)] == [*prompt, *said]
    call = {"function": {"name": "weather", "arguments": json.dumps({"city": "Lima"})}}
    answer = {"role": "assistant", "content": "I  look.", "tool_calls": [call]}
    whole = renderer.render_ids([*asked, answer, reply], tools=TOOLS, add_generation_prompt=True)
    assert bridged.token_ids == whole
    assert len(bridged.message_indices) == len(whole)
    assert renderer.bridge_to_next_turn(prompt, said[:-1], [reply], tools=TOOLS) is None
