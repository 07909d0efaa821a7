"""A merged model is prompted as its adapter was trained, or its card says how."""

import json
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from peftkit.data.chat_template import CHATML
from peftkit.data.generation import prompt_ids
from peftkit.data.style import ALPACA, Style
from peftkit.events import Event, Notice
from peftkit.formats.peft.folder import save_adapter
from peftkit.formats.peft.load import load_adapter, read_adapter
from peftkit.merging.merge import merge
from peftkit.merging.prompt_format import write_template
from tests.helpers.families import FAMILIES
from tests.helpers.folders import change_json
from tests.helpers.merging import Saver

OTHER = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def set_style(saver: Saver, style: Style) -> None:
    """Record a prompt style with the adapter."""
    provenance = replace(read_adapter(saver.adapter).provenance, prompt_style=style)
    adapter = load_adapter(FAMILIES["llama"](), saver.adapter)
    save_adapter(adapter, saver.adapter, provenance)


@pytest.mark.parametrize("from_quantized", [False, True])
def test_the_merged_model_has_the_training_template(saved, from_quantized):
    saved(quantize="nf4" if from_quantized else "none")
    no_limit = int(1e30)  # as transformers writes it
    given = {"chat_template": OTHER, "model_max_length": no_limit}
    change_json(saved.base / "tokenizer_config.json", **given)
    (saved.base / "chat_template.jinja").write_text(OTHER)
    style = Style("chat", "{%- set calm = true -%}" + CHATML)
    set_style(saved, style)
    merge(saved.adapter, saved.out, verify=False, from_quantized=from_quantized)
    trained, merged = (AutoTokenizer.from_pretrained(path) for path in (saved.base, saved.out))
    turns = [{"role": "user", "content": "the quick fox"}]
    ids = merged.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert ids == prompt_ids(trained, "the quick fox", style)
    assert OTHER not in (saved.out / "tokenizer_config.json").read_text()
    assert merged.model_max_length == no_limit


@pytest.mark.parametrize("in_config", [False, True])
def test_a_merged_model_has_the_training_system_prompt(saved, in_config):
    saved()
    if in_config:
        (saved.base / "chat_template.jinja").unlink(missing_ok=True)
        named = [{"name": "default", "template": CHATML}]
        change_json(saved.base / "tokenizer_config.json", chat_template=named)
    style = Style("chat", system='Sell "foxes" {{ 1 }}.\nBe short. 🦊')
    set_style(saved, style)
    merge(saved.adapter, saved.out, verify=False)
    trained, merged = (AutoTokenizer.from_pretrained(path) for path in (saved.base, saved.out))
    turns = [{"role": "user", "content": "the quick fox"}]
    ids = merged.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert ids == prompt_ids(trained, "the quick fox", style)
    assert merged.decode(ids).startswith("<|im_start|>system\nSell")
    other = [{"role": "system", "content": "Be kind."}, *turns]
    text = merged.apply_chat_template(other, tokenize=False)
    assert "foxes" not in text
    assert 'Sell "foxes" {{ 1 }}. Be short.' in (saved.out / "README.md").read_text()


def test_files_that_transformers_prefers_do_not_hide_the_template(tmp_path):
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": OTHER}))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(OTHER)
    write_template(Style("chat"), tmp_path)
    assert not (tmp_path / "chat_template.jinja").exists()  # the tokenizer's own
    write_template(Style("chat", CHATML), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["chat_template.jinja"]


@pytest.mark.parametrize(
    ("kind", "words", "frame"),
    [("alpaca", "style alpaca", ALPACA.format("QUESTION")), ("plain", "style plain", "")],
)
def test_formats_have_their_frame(saved, kind, words, frame):
    saved()
    set_style(saved, Style(kind))
    events: list[Event] = []
    merge(saved.adapter, saved.out, verify=False, on_event=events.append)
    card = (saved.out / "README.md").read_text()
    assert words in card
    assert frame in card
    assert [words in event.text for event in events if isinstance(event, Notice)] == [True]


def test_the_comparison_says_that_training_was_in_another_precision(saved):
    saved(quantize="nf4")
    events: list[Event] = []
    merge(saved.adapter, saved.out, on_event=events.append)
    card = (saved.out / "README.md").read_text()
    assert "against the original base (not in nf4) and the adapter" in card
    (notice,) = (event.text for event in events if isinstance(event, Notice))
    assert "which loads the base in nf4" in notice
