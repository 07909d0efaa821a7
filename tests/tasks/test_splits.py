"""Rows of several files, with weights and patterns, and a share of them held out."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from peftkit.data.records import sources_of
from peftkit.data.rows.lazy import fingerprint
from peftkit.errors import ConfigError, DataError
from peftkit.events import Event, Notice
from peftkit.settings import DataConfig, Source
from peftkit.tasks.tokens import CausalLM
from tests.helpers.finished import finished, recipe, sections


def write(path: Path, rows: list[str]) -> str:
    text = "".join(json.dumps({"prompt": row, "completion": " yes"}) + "\n" for row in rows)
    path.write_text(text)
    return str(path)


def task_of(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, data: DataConfig, **more: Any
) -> CausalLM:
    return CausalLM(llama, tokenizer, data, **more)


@pytest.mark.parametrize("packing", [True, False])
def test_a_share_is_held_out_by_what_rows_say(llama, tokenizer, tmp_path, packing):
    names = [f"row {n}" for n in range(200)]
    held = []
    for rows in (names, [*reversed(names), "one more"]):
        train = write(tmp_path / "a.jsonl", rows)
        data = DataConfig(train=train, eval=0.2, max_length=64, packing=packing)
        train_rows, eval_rows = task_of(llama, tokenizer, data).rows.load_splits(data)
        sizes = [sum(len(row.lengths) for row in part) for part in (train_rows, eval_rows)]
        assert sum(sizes) == len(rows)
        assert 20 < sizes[1] < 60
        texts = [tokenizer.decode(row.input_ids, skip_special_tokens=True) for row in eval_rows]
        held.append({text for whole in texts for text in whole.split(" yes")})
    assert held[0] <= held[1]  # whatever else is there


def test_a_share_of_nothing_is_an_error(llama, tokenizer, tmp_path):
    data = DataConfig(train=write(tmp_path / "a.jsonl", ["a"]), eval=1e-9, max_length=64)
    with pytest.raises(DataError, match="No row is held out"):
        task_of(llama, tokenizer, data).rows.load_splits(data)


def test_weights_of_files_and_patterns(llama, tokenizer, tmp_path):
    for name in ("a1", "a2", "b"):
        write(tmp_path / f"{name}.jsonl", [f"{name} {n}" for n in range(4)])
    sources = (Source(path=f"{tmp_path}/a*.jsonl", weight=2.5), Source(path=f"{tmp_path}/b.jsonl"))
    data = DataConfig(train=sources, max_length=64, packing=False)
    rows, _ = task_of(llama, tokenizer, data).rows.load_splits(data)
    found = Counter(Path(row.source.rpartition(":")[0]).stem for row in rows)
    assert found == {"a1": 10, "a2": 10, "b": 4}
    assert Counter(row.source for row in rows)[f"{tmp_path}/a1.jsonl:1"] == 3
    assert list(rows.num_tokens) == [len(row.input_ids) for row in rows]
    assert isinstance(fingerprint(rows), str)
    other = DataConfig(train=(sources[0],), max_length=64, packing=False)
    fewer, _ = task_of(llama, tokenizer, other).rows.load_splits(other)
    assert fingerprint(fewer) != fingerprint(rows)
    with pytest.raises(DataError, match="no file fits"):
        sources_of(DataConfig(train=f"{tmp_path}/c*.jsonl"))


def test_repeated_rows_are_logged(llama, tokenizer, tmp_path):
    train = write(tmp_path / "a.jsonl", ["a", "b", "a", "c"])
    data = DataConfig(train=train, eval=write(tmp_path / "b.jsonl", ["c", "d"]), max_length=64)
    events: list[Event] = []
    task_of(llama, tokenizer, data, on_event=events.append).rows.load_splits(data)
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert any("1 of 4 rows repeat an earlier one" in text for text in notices)
    assert any("1 of 2 rows of" in text and "a.jsonl too" in text for text in notices)
    events.clear()
    same = DataConfig(train=train, eval=train, max_length=64)
    task_of(llama, tokenizer, same, on_event=events.append).rows.load_splits(same)
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert any("4 of 4 rows of" in text and "the same file" in text for text in notices)


def test_a_run_splits_rows_of_several_files(tmp_path, model_folder):
    files = [write(tmp_path / f"{name}.jsonl", [f"{name} {n}" for n in range(40)]) for name in "ab"]
    train = [{"path": files[0], "weight": 2}, {"path": files[1]}]
    told = sections(tmp_path, model_folder, files[0], "causal_lm")
    told["data"] |= {"train": train, "eval": 0.2}
    assert finished(told, train={"max_steps": 1, "batch_size": 2}).metrics["eval_loss"] > 0
    for wrong in ({"eval": 1.5}, {"train": {"path": 3}}, {"train": [{"path": "a", "weight": 0}]}):
        with pytest.raises(ConfigError):
            recipe(told, data=wrong)
    with pytest.raises(DataError, match="names no file"):
        sources_of(DataConfig(train=()))
