"""Everything wrong with a recipe is told at once, in plain words, with its place."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from peftkit.config.schema import MAX_BYTES, from_dict, load
from peftkit.errors import ConfigError
from peftkit.run.config import Recipe
from peftkit.train.config import TrainConfig
from tests.small_recipe import DATA, Whole, read, refuse


def test_every_error_is_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
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
        "recipe.yaml:1: method.rank: must be greater than 0; found 0",
        "recipe.yaml:1: method.tragets: unknown key. Did you mean 'targets'?",
        "recipe.yaml:3: data.train: expected a path; found 3. Put it in quotes if text is meant",
        "recipe.yaml:4: data.packing: expected true or false; found the text 'yes'. "
        "Write true or false",
        "recipe.yaml:6: train.lr: unknown key. Did you mean 'learning_rate'?",
        "recipe.yaml:8: train.epochs: is given twice, first at line 7; keep one",
        "recipe.yaml:9: train.batch_size: expected a whole number; found 3.0. Write 3",
        "recipe.yaml:10: train.num_train_epochs: unknown key. Did you mean 'epochs'?",
        "recipe.yaml:11: train.rank: unknown key. Did you mean 'method.rank'?",
        "recipe.yaml:12: trian: unknown key. Did you mean 'train'?",
    ]


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("method: {rank: 4}", "method.type: is required and missing; expected one of low, decom"),
        ("method: {type: lwo}", "method.type: expected one of low, decomposed; found the text 'lw"),
        ("method: {type: lwo}", "Did you mean 'low'?"),
        ("method: {type: null}", "method.type: expected one of low, decomposed; found nothing"),
        ("method: {type: 3}", "method.type: expected one of low, decomposed; found 3"),
        ("method: {type: [low]}", "method.type: expected one of low, decomposed; found a list"),
        ("method: low", "method: expected a section (keys with values); found the text 'low'"),
        ("method: {type: low, rank: true}", "method.rank: expected a whole number; found true"),
        ("method: {type: low, rank: '8'}", "Write the number without quotes or underscores: 8"),
        ("method: {type: low, rank: 1_0}", "Write the number without quotes or underscores: 10"),
        ("method: {type: low, alpha: .inf}", "method.alpha: must be a finite number; found inf"),
        ("method: {type: low, alpha: x}", "method.alpha: expected a number; found the text 'x'"),
        ("method: {type: low, targets: [q, 3]}", "method.targets[1]: expected text; found 3"),
        ("method: {type: low, targets: 3}", "method.targets: expected a list of text or text;"),
        ("method: {type: low, init: pisa}", "found the text 'pisa'. Did you mean 'pissa'?"),
        ("method: {type: low, pattern: {q: x}}", "method.pattern.q: expected a whole number; fou"),
        (
            "method: {type: low, magnitude: true}",
            "unknown key here; it belongs to the type decomposed",
        ),
        ("train: {learning_rate: .nan}", "train.learning_rate: must be a finite number"),
        ("train: {learning_rate: true}", "train.learning_rate: expected a number; found true"),
        ("train: {learning_rate: 2.0e-4f}", "expected a number; found the text '2.0e-4f'"),
        ("train: {epochs: 1001}", "train.epochs: must be less than or equal to 1000; found 1001"),
        ("train: {epochs: 9" + "9" * 5000 + "}", "train.epochs: expected a whole number; found"),
        ("train: {max_steps: 0}", "train.max_steps: must be greater than 0; found 0"),
        ("train: {max_steps: x}", "train.max_steps: expected a whole number or auto or null; fo"),
        ("train: {max_steps: 13}", "train: 13 is no number of steps. Take 12."),
        ("train: {checkpointing: on}", "expected auto or true or false; found the text 'on'. Wri"),
        ("train: {log_to: wandb}", "expected a list of one of wandb, trackio; found the text 'wa"),
        ("train: {log_to: wandb}", "Write a list: [wandb]"),
        ("train: {log_to: [wandbb]}", "train.log_to[0]: expected one of wandb, trackio; found the"),
        (
            "train: {schedule: ''}",
            "train.schedule: must have at least 1 character; found the text ''",
        ),
        ("train: [1]", "train: expected a section (keys with values); found a list"),
        ("train:", "train: expected a section (keys with values); found nothing (null)"),
        ("<<: {a: 1}", "<<: unknown key. Known here: task, method, data, train"),
        ("1: x", "1: a key must be text; put it in quotes: '1'"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(tmp_path: Path, section: str, told: str) -> None:
    (line,) = refuse(tmp_path, f"{DATA}{section}\n")
    assert line.startswith("recipe.yaml:2: ")
    assert told in line


def test_a_missing_section_is_told_with_the_file(tmp_path: Path) -> None:
    assert refuse(tmp_path, "task: causal_lm") == [
        "recipe.yaml: data: is required and missing; expected a section (keys with values)"
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\n\tb: 2", "2: not valid YAML: .*'\\\\t'"),
        ("a:\n\t- b", "2: not valid YAML: .*'\\\\t'"),
        ("a: [1,\n2\nb: 2", "3: .*flow sequence from line 1: expected ',' or '\\]'"),
        ("\na: {b: 1\nc: 2", "3: .*flow mapping from line 2: expected ',' or '}'"),
        ("a: 1\nb: 'x\nc: 2", "3: .*quoted scalar from line 2: found unexpected end"),
        ("a: b: c", "1: .*mapping values are not allowed here"),
        ("a: 1\n b: 2", "2: .*mapping values are not allowed here"),
        ("a:\n  b: 1\n c: 2", "3: .*block mapping from line 1: expected <block end>"),
        ("a: @b", "1: .*character '@'"),
        ("a\nb: 1", "2: .*mapping values are not allowed here"),
        ("a: 1\nb: \x07", "2: character U.0007"),
        ("a: 1\nb: x\u2028y", "2: character U.2028"),
        ("{a: 1}}", "1: .*expected '<document start>', but found '}'"),
        ("a: {{ name }}", "1: a: a list, a section"),
        ("- a", "1: expected keys with values, such as .*; found a list"),
        ("word", "1: expected keys with values, such as .*; found a single value"),
        ("# nothing", "1: expected keys with values, such as .*; found nothing"),
    ],
)
def test_text_that_is_no_yaml_is_told_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    (line,) = refuse(tmp_path, text)
    assert re.match(f"recipe.yaml:{told}", line)


def test_anchors_aliases_tags_and_second_documents_are_refused(tmp_path: Path) -> None:
    text = "data: &a {train: x}\nmethod: *a\ntask: !!python/name:os.system causal_lm\n---\nb: 1"
    told = "\n".join(refuse(tmp_path, text))
    assert "recipe.yaml:1: anchor '&a'" in told
    assert "recipe.yaml:2: alias '*a'; write the value out instead" in told
    assert "recipe.yaml:3: tag 'tag:yaml.org,2002:python/name:os.system'" in told
    assert "recipe.yaml:4: not valid YAML: expected a single document" in told
    assert len(told.splitlines()) == 4


def test_hostile_sizes_are_refused_in_bounded_time(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 200)
    )
    start = time.perf_counter()
    assert "alias '*a0'" in "\n".join(refuse(tmp_path, bomb))
    assert "nested deeper than 50 levels" in refuse(tmp_path, "[" * 500_000)[0]
    assert "nested deeper than 50 levels" in refuse(tmp_path, "- " * 400_000)[0]
    assert "nested deeper than 50 levels" in refuse(tmp_path, '{"a":' * 100_000)[0]
    assert "50" in refuse(tmp_path, "a: 1\n" * 2000)[-1]
    # Seconds on any machine; without the limits minutes, or a crash.
    assert time.perf_counter() - start < 30
    with pytest.raises(ConfigError, match="at most 1,000,000 bytes"):
        read(tmp_path, "#" * (MAX_BYTES + 1))


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    (line,) = refuse(tmp_path, DATA + 'train: {"a\\e[31m": "b"}')
    assert "\x1b" not in line
    assert r"train.a\x1b[31m: unknown key" in line


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text(DATA)
    for path, told in [
        (tmp_path / "none.yaml", "no such file.\n  .* holds: real.yaml"),
        (tmp_path, "it is a folder.\n  .* holds: real.yaml"),
        (tmp_path / "no" / "none.yaml", "no such file."),
        (tmp_path / "real.yaml" / "x", "Not a directory"),
        (Path("a\0b"), "embedded null byte"),
    ]:
        with pytest.raises(ConfigError, match=told):
            load(Whole, path)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    for raw, told in [
        (b"", "the file is empty"),
        (b" \n\n", "the file is empty"),
        (b"a: 1\nb: \xff", "not UTF-8 text.\n  Line 2 holds the byte 0xff"),
        ("a: 1".encode("utf-16"), "not UTF-8 text"),
    ]:
        with pytest.raises(ConfigError, match=told):
            read(tmp_path, raw)


def test_errors_of_overrides_name_the_override_and_stand_after_the_file(tmp_path: Path) -> None:
    told = refuse(
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
    assert told == [
        "recipe.yaml:2: train.epochs: must be greater than or equal to 1; found 0",
        "--set train.lr=3: train.lr: unknown key. Did you mean 'learning_rate'?",
        "--set train.batch_size=2.0: train.batch_size: expected a whole number; found 2.0. Write 2",
        "--set task.x=1: task: expected causal_lm; found a section (keys with values)",
        "--set nonsense: expected section.key=value",
        "--set =3: expected section.key=value",
        "--set data.train=a #b: data.train: ' #' begins a comment in YAML; put the value in quotes",
        "--set train.schedule=@x: train.schedule: not valid YAML: while scanning for the "
        "next token: found character '@' that cannot start any token",
    ]


def test_short_names_mean_the_first_field_with_these_initials() -> None:
    with pytest.raises(ConfigError, match=r"train\.lr: .*'learning_rate'"):
        from_dict(Recipe, {"train": {"lr": 3}}, "recipe.yaml")


def test_zero_of_what_may_be_null_is_told_to_be_null() -> None:
    with pytest.raises(ConfigError, match=r"eval_generate: .* found 0\. Write null"):
        TrainConfig(eval_generate=0)
