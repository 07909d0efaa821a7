"""Columns that a recipe names are a user's message and its answer, if the base has a template."""

import copy
from pathlib import Path
from typing import Any

import pytest

from peftkit.data.generation import prompt_ids
from peftkit.data.style import Style
from peftkit.events import Notice
from peftkit.settings import DataConfig
from peftkit.tasks.tokens import CausalLM, CausalLMConfig
from tests.helpers.folders import write_rows

ROW = {"Customer Message": "what is the fox?", "Agent Reply": "the dog"}
NAMED = CausalLMConfig(prompt="Customer Message", completion="Agent Reply")


def read(
    model: Any,
    tokenizer: Any,
    file: Path,
    config: CausalLMConfig | None = None,
    style: Style | None = None,
    **data: Any,
) -> tuple[list[int], Style, list[str]]:
    """Return the first row's tokens, the style of generation, and the notices."""
    notices: list[str] = []

    def on_event(event: Any) -> None:
        if isinstance(event, Notice):
            notices.append(event.text)

    settings = DataConfig(train=str(file), max_length=128, packing=False, **data)
    task = CausalLM(model, tokenizer, settings, config, style=style, on_event=on_event)
    row = task.load(str(file))[0]
    return list(row.input_ids), task.rows.prompt_style, notices


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.jsonl", [ROW])
    return tmp_path / "rows.jsonl"


def test_named_columns_are_turns_on_a_chat_base(llama, tokenizer, file):
    ids, style, _ = read(llama, tokenizer, file, NAMED)
    prompt = prompt_ids(tokenizer, ROW["Customer Message"], Style("chat"))
    assert style.kind == "chat"
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode(ids[len(prompt) :]).startswith("the dog<|im_end|>")


def test_recipe_adapter_or_base_can_make_them_plain(llama, tokenizer, file):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    for text, style, _ in (
        read(llama, tokenizer, file, NAMED, format="prompt_completion"),
        read(llama, tokenizer, file, NAMED, Style("plain")),
        read(llama, bare, file, NAMED),
    ):
        assert style.kind == "plain"
        assert tokenizer.decode(text).startswith("what is the fox?the dog")


def test_prompt_and_completion_skip_templates(llama, tokenizer, tmp_path):
    path = tmp_path / "plain.jsonl"
    write_rows(path, [{"prompt": "the fox", "completion": " jumps"}])
    _, style, (notice,) = read(llama, tokenizer, path)
    assert style.kind == "plain"
    assert "task: {type: causal_lm, prompt: prompt, completion: completion}" in notice
    assert read(llama, tokenizer, path, format="prompt_completion")[2] == []
    names = CausalLMConfig(prompt="prompt", completion="completion")
    assert read(llama, tokenizer, path, names)[1:] == (Style("chat"), [])


CHATML = "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n"
STANFORD = "### Instruction:\nwhy?\n\n### Response:\nso"


@pytest.mark.parametrize(("text", "mark"), [(CHATML, "<|im_start|>user"), (STANFORD, "###")])
def test_texts_that_contain_turns_are_reported(text, mark, llama, tokenizer, tmp_path):
    path = tmp_path / "texts.jsonl"
    write_rows(path, [{"text": text}])
    notice = read(llama, tokenizer, path)[2][-1]
    assert notice.startswith(f"The rows are texts with turn markers ({mark}")
    assert "For a loss over answers only" in notice
    assert read(llama, tokenizer, path, format="text")[2] == []
    write_rows(path, [{"text": "The fox is a user of the assistant."}])
    assert read(llama, tokenizer, path)[2] == []
