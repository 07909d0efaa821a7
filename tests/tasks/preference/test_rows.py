"""Comparisons as tokens: a prompt once, answers cut alike, nothing left empty."""

import pytest

from peftkit.data.pack import IGNORE
from peftkit.errors import ConfigError, DataError
from peftkit.events import Table
from tests.helpers.pair_cases import settings, task_on, write, write_pairs, write_verdicts

LONG = "the quick brown fox jumps over the lazy dog and the other dog " * 2


def test_both_documents_are_prompt_and_completion_with_eos(llama, tokenizer, tmp_path):
    task, rows = task_on(llama, tokenizer, settings("dpo"), write_pairs(tmp_path / "a.jsonl"))
    for row in rows:
        chosen, rejected = row.documents
        for document in (chosen, rejected):
            assert set(document.labels[: row.common]) == {IGNORE}
            assert document.labels[-1] == tokenizer.eos_token_id
        assert chosen.input_ids[: row.common] == rejected.input_ids[: row.common]
        assert chosen.labels[row.common] != IGNORE
    assert "".join(text for _, text in task.spans(rows[0])).count("quick brown fox") == 2
    assert [name for name, _ in task.spans(rows[0])] == ["", "chosen", "", "rejected"]


def test_the_prompt_of_plain_texts_is_their_common_token_prefix(llama, tokenizer, tmp_path):
    both = {"chosen": "the quick brown fox", "rejected": "the quick brown dog and the dog"}
    _, (row,) = task_on(llama, tokenizer, settings("dpo"), write(tmp_path / "a.jsonl", [both]))
    shared = tokenizer.decode(row.input_ids[: row.common])
    assert "the quick brown" in shared
    assert all(document.labels[row.common] != IGNORE for document in row.documents)


def test_answers_are_cut_alike_and_pairs_that_do_not_fit_are_dropped_and_counted(
    llama, tokenizer, tmp_path
):
    file = write(
        tmp_path / "a.jsonl",
        [
            {"prompt": "the dog ", "chosen": LONG, "rejected": "pizza " * 30},
            {"prompt": LONG + LONG, "chosen": "a", "rejected": "b"},  # the prompt alone is longer
            {"prompt": "a ", "chosen": LONG + "a", "rejected": LONG + "b"},  # differ after it
            {"prompt": "the dog ", "chosen": "and", "rejected": "or"},
        ],
    )
    events: list[object] = []
    data = {"max_length": 24, "max_dropped": 0.5}
    task, rows = task_on(llama, tokenizer, settings("dpo"), file, **data)
    assert [row.source.rpartition(":")[2] for row in rows] == ["1", "4"]
    assert rows[0].lengths == (24, 24)
    assert [row.is_cut for row in rows] == [True, False]
    task.rows.on_event = events.append
    task.load(file)
    (table,) = [event for event in events if isinstance(event, Table)]
    assert ("cut at 24 tokens", "1") in table.rows
    assert any(line[0].startswith("dropped") and line[1].startswith("2") for line in table.rows)
    with pytest.raises(DataError, match=r"a\.jsonl:2, .*a\.jsonl:3"):
        task_on(llama, tokenizer, settings("dpo"), file, max_length=24)


def test_a_verdict_is_compared_with_the_row_before(llama, tokenizer, tmp_path):
    file = write_verdicts(tmp_path / "a.jsonl")
    _, rows = task_on(llama, tokenizer, settings("kto"), file)
    assert [row.wanted for row in rows] == [True, False] * 5
    answers = [tuple(label for label in row.documents[0].labels if label != IGNORE) for row in rows]
    others = [tuple(label for label in row.documents[1].labels if label != IGNORE) for row in rows]
    assert others == [answers[-1], *answers[:-1]]


@pytest.mark.parametrize(("loss", "field"), [("dpo", "gamma"), ("kto", "nll_weight")])
def test_a_field_that_the_loss_does_not_use_is_refused(loss, field):
    with pytest.raises(ConfigError, match=f"task.{field} is not used by the loss {loss}"):
        settings(loss, **{field: 0.1})


def test_robust_without_a_share_of_wrong_pairs_is_refused():
    with pytest.raises(ConfigError, match=r"needs task\.label_smoothing"):
        settings("robust", label_smoothing=0.0)
