"""The small data sets on which the defaults are shown."""

import json

import pytest

from benchmarks.defaults import CHANGES, CLASSES, HELD_OUT, NEW_WORDS, SETS, make_rows, recipe
from peftkit.defaults import defaults_for


@pytest.mark.parametrize("name", SETS)
def test_held_out_rows_are_of_the_kind_and_unseen(name, tmp_path):
    files = make_rows(name, tmp_path)
    train, held_out = (
        [json.loads(line) for line in file.read_text().splitlines()] for file in files
    )
    number = SETS[name][1]
    assert (len(train), len(held_out)) == (number, HELD_OUT)
    seen = {row["instruction"] for row in train}
    assert not seen & {row["instruction"] for row in held_out}
    rules = defaults_for(number, width=576)
    settings = recipe(files, tmp_path / "run", rules)
    assert settings.train.num_steps(number) == rules.num_steps
    changed = {label: change(rules) for label, change in CHANGES.items()}
    assert len(set(changed.values())) == len(changed), "each changes one thing"
    assert changed["three times the learning rate"].learning_rate == 3e-3


def test_classes_are_told_by_words_that_were_never_learnt(tmp_path):
    train, held_out = (file.read_text() for file in make_rows("classes", tmp_path))
    for words in CLASSES.values():
        assert not any(f"{word} " in train or f"{word}," in train for word in words[-NEW_WORDS:])
        assert any(word in held_out for word in words[-NEW_WORDS:])
