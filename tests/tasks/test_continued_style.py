"""An adapter goes on in the prompt style that it learnt, unless another one is asked for."""

from pathlib import Path
from typing import Any

import pytest

from peftkit.errors import DataError
from peftkit.events import Event, Notice
from peftkit.run import prepare
from tests.helpers.command_line import turn
from tests.helpers.finished import Finished, finished, recipe, sections
from tests.helpers.folders import write_rows

GRPO = {"type": "grpo", "rewards": [{"use": "length", "max_chars": 9}], "max_new_tokens": 8}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Finished:
    """An adapter of rows of prompt and completion."""
    folder = tmp_path_factory.mktemp("plain")
    rows = [{"prompt": "the dog ", "completion": "and the fox"}] * 4
    told = sections(folder, model_folder, write_rows(folder / "sft.jsonl", rows), "causal_lm")
    return finished(told, train={"max_steps": 1, "compile": False})


def continued(plain: Finished, events: list[Event] | None = None, **sections: Any) -> Any:
    """Prepare a run that goes on from it."""
    told = plain.told | {"method": {"start_from": str(plain.folder)}}
    told = {**told, "train": {**told["train"], "output_dir": str(plain.folder.parent / "next")}}
    told |= {name: {**told[name], **section} for name, section in sections.items()}
    if "task" in sections:
        told["task"] = sections["task"]
    return prepare(recipe(told), on_event=(events if events is not None else []).append)


def test_prompts_alone_are_formatted_as_the_adapter_learnt(plain, tmp_path):
    file = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "the dog "}] * 4)
    data = {"train": file}
    record = continued(plain, task=GRPO, data=data)
    assert record.task.rows.style.kind == "plain"
    assert record.task.spans(record.train[0]) == [("prompt", "the dog ")]
    events: list[Event] = []
    record = continued(plain, events, task=GRPO, data={**data, "chat_template": "chatml"})
    assert record.task.rows.style.kind == "chat"
    assert "changes the prompt style" in str([e.text for e in events if isinstance(e, Notice)])


def test_rows_of_another_style_are_refused_with_the_cure(plain, tmp_path):
    file = write_rows(tmp_path / "chat.jsonl", [turn("the dog", "and the fox")] * 4)
    with pytest.raises(DataError) as refused:
        continued(plain, data={"train": file})
    assert "'chat', the adapter was trained on 'plain'" in str(refused.value)
    assert "data.format" in str(refused.value)


def test_another_style_that_is_asked_for_is_told(plain, tmp_path):
    file = write_rows(tmp_path / "chat.jsonl", [turn("the dog", "and the fox")] * 4)
    events: list[Event] = []
    record = continued(plain, events, data={"train": file, "format": "messages"})
    assert record.task.rows.style.kind == "chat"
    texts = [event.text for event in events if isinstance(event, Notice)]
    assert [text for text in texts if text.endswith("chat instead of plain.")]


def test_rows_of_the_same_style_go_on_without_a_word(plain):
    events: list[Event] = []
    assert continued(plain, events).task.rows.style.kind == "plain"
    assert not [e for e in events if isinstance(e, Notice) and "style" in e.text]
