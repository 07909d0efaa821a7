"""Everything wrong with a recipe is told at once, in plain words, with its place."""

import re
from pathlib import Path

import pytest

from peftkit.config.schema import MAX_BYTES, from_dict, load
from peftkit.errors import ConfigError
from peftkit.recipe import Recipe
from tests.helpers.small_recipe import DATA, Whole, read, refuse


def test_every_error_is_told_at_once_in_the_order_of_the_file(tmp_path):
    text = """\
method: {type: low, rank: 0, tragets: [q]}
data:
  train: 3
  packing: yes
train:
  lr: 1e-4
  epochs: "8"
  epochs: 2
  batch_size: 3.0
  num_train_epochs: 3
  rank: 4
trian: {}
"""
    assert refuse(tmp_path, text) == [
        "recipe.yaml:1: method.rank: should be greater than 0; found 0",
        "recipe.yaml:1: method.tragets: unknown key. Did you mean 'targets'?",
        "recipe.yaml:3: data.train: should be a path; found 3",
        "recipe.yaml:4: data.packing: should be true or false; found the text 'yes'",
        "recipe.yaml:6: train.lr: unknown key. Did you mean 'learning_rate'?",
        "recipe.yaml:8: train.epochs: is given twice, first in line 7; keep one",
        "recipe.yaml:9: train.batch_size: should be a valid integer; found 3.0",
        "recipe.yaml:10: train.num_train_epochs: unknown key. Did you mean 'epochs'?",
        "recipe.yaml:11: train.rank: unknown key. Did you mean 'method.rank'?",
        "recipe.yaml:12: trian: unknown key. Did you mean 'train'?",
    ]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("method: {rank: 4}", "method.type: is required and missing"),
        (
            "method: {type: lwo}",
            "method.type: should be one of 'low', 'decomposed'; found the text",
        ),
        ("method: {type: lwo}", "Did you mean 'low'?"),
        (
            "method: {type: [low]}",
            "method.type: should be one of 'low', 'decomposed'; found a list",
        ),
        ("method: low", "method: should be a section (keys with values)"),
        ("method: {type: low, rank: true}", "method.rank: should be a valid integer; found true"),
        ("method: {type: low, targets: [q, 3]}", "method.targets[1]: should be text; found 3"),
        ("method: {type: low, targets: 3}", "method.targets: should be a list or text; found 3"),
        ("method: {type: low, init: pisa}", "found the text 'pisa'. Did you mean 'pissa'?"),
        ("method: {type: low, pattern: {q: x}}", "method.pattern.q: should be a valid integer"),
        ("method: {type: low, magnitude: true}", "method.magnitude: unknown key"),
        ("train: {learning_rate: .nan}", "train.learning_rate: should be a finite number"),
        ("train: {epochs: 9" + "9" * 5000 + "}", "train.epochs: should be a valid integer; found"),
        ("train: {max_steps: x}", "train.max_steps: should be a valid integer or 'auto'"),
        ("train: {max_steps: 13}", "train: 13 is no number of steps. Take 12."),
        ("train: {log_to: [wandbb]}", "train.log_to[0]: should be 'wandb' or 'trackio'; found the"),
        ("train: {schedule: ''}", "should have at least 1 character; found the text ''"),
        ("train:", "train: should be a section (keys with values); found nothing (null)"),
        ("<<: {a: 1}", "<<: unknown key. Keys of this section: task, method, data, train"),
        ("'1': x\n1: x", "1: a key must be text; put it in quotes: '1'"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(tmp_path, section, message):
    lines = refuse(tmp_path, f"{DATA}{section}\n")
    assert any(message in line for line in lines)
    assert re.match(r"recipe.yaml:[23]: ", lines[0])


def test_a_missing_section_is_told_with_the_file(tmp_path):
    assert refuse(tmp_path, "task: causal_lm") == ["recipe.yaml: data: is required and missing"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n\tb: 2", "2: not valid YAML: .*'\\\\t'"),
        ("a: [1,\n2\nb: 2", "3: .*flow sequence from line 1, expected ',' or '\\]'"),
        ("a: 1\nb: \x07", "1: .*character #x0007"),
        ("a: {{ name }}", "1: .*a list or a section cannot be a key"),
        ("- a", "1: expected keys with values, such as"),
        ("# nothing", "1: expected keys with values, such as"),
        ("data: &a {train: x}\nmethod: *a", "1: .*anchor or alias 'a'"),
        ("task: !!python/name:os.system x", "1: .*tag 'tag:yaml.org,2002:python/name:os.system'"),
        ("a: 1\n---\nb: 1", "2: not valid YAML: expected a single document"),
        ("[" * 500_000, "1: nested too deeply"),
    ],
)
def test_invalid_recipes_report_their_line(tmp_path, text, message):
    (line,) = refuse(tmp_path, text)
    assert re.match(f"recipe.yaml:{message}", line)


def test_many_errors_are_counted_and_large_files_refused(tmp_path):
    assert "1,951 more" in refuse(tmp_path, "a: 1\n" * 2000)[-1]
    with pytest.raises(ConfigError, match="at most 1,000,000 bytes"):
        read(tmp_path, "#" * (MAX_BYTES + 1))


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    (line,) = refuse(tmp_path, DATA + 'train: {"a\\e[31m": "b"}')
    assert "\x1b" not in line
    assert r"train.a\x1b[31m: unknown key" in line


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "real.yaml").write_text(DATA)
    for path, message in [
        (tmp_path / "none.yaml", "No such file or directory.\n  .* contains: real.yaml"),
        (tmp_path, "Is a directory.\n  .* contains: real.yaml"),
        (Path("a\0b"), "embedded null byte"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load(Whole, path)


def test_bytes_that_are_no_text_are_named(tmp_path):
    for raw, message in [
        (b" \n\n", "the file is empty"),
        (b"a: 1\nb: \xff", "not UTF-8.*\n.*0xff"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read(tmp_path, raw)


def test_a_bound_says_that_null_would_do(tmp_path):
    (line,) = refuse(tmp_path, DATA, "train.max_steps=0")
    assert line.endswith("should be greater than 0 or 'auto', or null; found 0")


def test_errors_of_overrides_name_the_override_and_stand_after_the_file(tmp_path):
    lines = refuse(
        tmp_path,
        DATA + "train: {epochs: 0, batch_size: x}",
        "train.lr=3",
        "train.batch_size=2.0",
        "task.x=1",
        "nonsense",
        "=3",
        "data.train=a #b",
        "train.schedule=@x",
    )
    assert lines == [
        "recipe.yaml:2: train.epochs: should be greater than or equal to 1; found 0",
        "--set train.lr=3: train.lr: unknown key. Did you mean 'learning_rate'?",
        "--set train.batch_size=2.0: train.batch_size: should be a valid integer; found 2.0",
        "--set task.x=1: task: should be 'causal_lm'; found a section (keys with values)",
        "--set nonsense: expected section.key=value",
        "--set =3: expected section.key=value",
        "--set data.train=a #b: data.train: ' #' begins a comment in YAML; put the value in quotes",
        "--set train.schedule=@x: train.schedule: not valid YAML: while scanning for the "
        "next token, found character '@' that cannot start any token",
    ]


def test_short_names_mean_the_first_field_with_these_initials():
    with pytest.raises(ConfigError, match=r"train\.lr: .*'learning_rate'"):
        from_dict(Recipe, {"train": {"lr": 3}}, "recipe.yaml")


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("checkpoint_every", "save_every"),
        ("save_steps", "save_every"),
        ("per_device_train_batch_size", "batch_size"),
        ("lora_r", "method.rank"),
        ("max_seq_length", "data.max_length"),
        ("warmup_steps", "warmup_ratio"),
        ("bf16", "base.dtype"),
        ("cutoff_len", "data.max_length"),
    ],
)
def test_names_of_other_programs_are_ours(key, ours, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(f"base: {{model: m}}\ndata: {{train: a.jsonl}}\ntrain: {{{key}: 3}}\n")
    with pytest.raises(ConfigError, match=f"train.{key}: unknown key. Did you mean '{ours}'?"):
        load(Recipe, file)
