"""A config is read strictly, and everything wrong with it is told at once, in plain words."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from pydantic import Field, ValidationError, model_validator

from peftkit.config import MAX_BYTES, Config, dump_yaml, from_dict, json_schema, load
from peftkit.errors import ConfigError


class Ranked(Config):
    """What both kinds of method share."""

    rank: Annotated[int, Field(gt=0)] = 8
    """Columns of A."""
    alpha: int | float = 16
    targets: tuple[str, ...] | str = ("q", "v")
    pattern: dict[str, int] = Field(default={})
    init: Literal["default", "gaussian", "pissa"] = "default"


class Low(Ranked):
    """A low-rank update."""

    type: Literal["low"] = "low"


class Decomposed(Ranked):
    """A low-rank update with magnitudes."""

    type: Literal["decomposed"] = "decomposed"
    magnitude: bool = True


class Rows(Config):
    """Where rows come from."""

    train: Path
    more: tuple[Path, ...] = ()
    packing: bool = True


class Loop(Config):
    """How to learn."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    epochs: Annotated[int, Field(ge=1, le=1000)] = 3
    batch_size: int = 8
    max_steps: Annotated[int, Field(gt=0)] | Literal["auto"] | None = None
    checkpointing: Literal["auto"] | bool = "auto"
    log_to: tuple[Literal["wandb", "trackio"], ...] = ()
    schedule: Annotated[str, Field(min_length=1)] = "cosine"

    @model_validator(mode="after")
    def _steps_or_epochs(self) -> Loop:
        if self.max_steps == 13:
            raise ConfigError("13 is no number of steps.", fix="Take 12.")
        return self


class Whole(Config):
    """A recipe in small."""

    task: Literal["causal_lm"] = "causal_lm"
    method: Annotated[Low | Decomposed, Field(discriminator="type")] = Low()
    data: Rows
    train: Loop = Loop()


Reads = Callable[..., Whole]
Refuses = Callable[..., list[str]]


@pytest.fixture
def read(tmp_path: Path) -> Reads:
    """Load a text as `recipe.yaml`, with overrides."""

    def read(text: str | bytes, *overrides: str) -> Whole:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load(Whole, path, overrides)

    return read


@pytest.fixture
def refuse(read: Reads, tmp_path: Path) -> Refuses:
    """Load what must be refused; return the error's lines after the first, the folder cut off."""

    def refuse(text: str | bytes, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            read(text, *overrides)
        assert type(caught.value) is ConfigError
        return str(caught.value).replace(f"{tmp_path}/", "").replace("\n  ", "\n").split("\n")[1:]

    return refuse


DATA = "data: {train: a.jsonl}\n"


# What is read


def test_a_float_may_be_written_in_every_yaml_1_2_form(read: Reads) -> None:
    for text, value in [("2e-4", 2e-4), ("2.0e-4", 2e-4), ("1E-3", 1e-3), (".5", 0.5), ("1.", 1.0)]:
        rate = read(f"{DATA}train: {{learning_rate: {text}}}").train.learning_rate
        assert (type(rate), rate) == (float, value)


def test_an_integer_is_taken_for_a_float_and_stays_one_where_both_are_declared(read: Reads) -> None:
    config = read(DATA + "train: {learning_rate: 1}\nmethod: {type: low, alpha: 32}")
    assert repr(config.train.learning_rate) == "1.0"
    assert repr(config.method.alpha) == "32"


def test_integers_are_those_of_yaml_1_2(read: Reads) -> None:
    for text, value in [("010", 10), ("0o10", 8), ("0x10", 16), ("+3", 3)]:
        assert read(f"{DATA}method: {{type: low, rank: {text}}}").method.rank == value


def test_lists_become_tuples_and_paths_are_paths(read: Reads) -> None:
    config = read("data: {train: a.jsonl, more: [b, c]}\nmethod: {type: low, targets: [k]}")
    assert config.data == Rows(train=Path("a.jsonl"), more=(Path("b"), Path("c")))
    assert config.method.targets == ("k",)


def test_null_is_taken_only_where_declared(read: Reads, refuse: Refuses) -> None:
    assert read(DATA + "train: {max_steps: null}").train.max_steps is None
    assert read(DATA + "train: {max_steps: }").train.max_steps is None
    assert refuse(DATA + "train: {epochs: null}") == [
        "recipe.yaml:2: train.epochs: expected a whole number; found nothing (null). "
        "Leave the key out for its default"
    ]


def test_text_that_looks_like_yaml_1_1_stays_text(read: Reads) -> None:
    config = read("data: {train: no, more: [2024-01-01, 12:30, on, 1_000, y]}")
    assert config.data.train == Path("no")
    assert [str(path) for path in config.data.more] == ["2024-01-01", "12:30", "on", "1_000", "y"]


@pytest.mark.parametrize("text", ["\ufeff" + DATA, DATA.replace("\n", "\r\n"), "---\n" + DATA])
def test_byte_order_mark_crlf_and_a_document_start_are_harmless(read: Reads, text: str) -> None:
    assert read(text).data.train == Path("a.jsonl")


# What is refused


def test_every_error_is_told_at_once_in_the_order_of_the_file(refuse: Refuses) -> None:
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
    assert refuse(text) == [
        "recipe.yaml:1: method.rank: must be greater than 0; found 0",
        "recipe.yaml:1: method.tragets: unknown key. Did you mean 'targets'?",
        "recipe.yaml:3: data.train: expected a path; found 3. Put it in quotes if text is meant",
        "recipe.yaml:4: data.packing: expected true or false; found the text 'yes'. "
        "Write true or false",
        "recipe.yaml:6: train.lr: unknown key. Did you mean 'learning_rate'?",
        "recipe.yaml:8: train.epochs: stands twice, first at line 7; keep one",
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
        ("train: {epochs: 1001}", "train.epochs: must be at most 1000; found 1001"),
        ("train: {epochs: 9" + "9" * 5000 + "}", "train.epochs: expected a whole number; found"),
        ("train: {max_steps: 0}", "train.max_steps: must be greater than 0; found 0"),
        ("train: {max_steps: x}", "train.max_steps: expected a whole number or auto or null; fo"),
        ("train: {max_steps: 13}", "train: 13 is no number of steps. Take 12."),
        ("train: {checkpointing: on}", "expected auto or true or false; found the text 'on'. Wri"),
        ("train: {log_to: wandb}", "expected a list of one of wandb, trackio; found the text 'wa"),
        ("train: {log_to: wandb}", "Write a list: [wandb]"),
        ("train: {log_to: [wandbb]}", "train.log_to[0]: expected one of wandb, trackio; found the"),
        ("train: {schedule: ''}", "train.schedule: must not be empty; found the text ''"),
        ("train: [1]", "train: expected a section (keys with values); found a list"),
        ("train:", "train: expected a section (keys with values); found nothing (null)"),
        ("<<: {a: 1}", "<<: unknown key. Known here: task, method, data, train"),
        ("1: x", "1: a key must be text; put it in quotes: '1'"),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(refuse: Refuses, section: str, told: str) -> None:
    (line,) = refuse(f"{DATA}{section}\n")
    assert line.startswith("recipe.yaml:2: ")
    assert told in line


def test_a_missing_section_is_told_with_the_file(refuse: Refuses) -> None:
    assert refuse("task: causal_lm") == [
        "recipe.yaml: data: is required and missing; expected a section (keys with values)"
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\n\tb: 2", "2: a tab; YAML takes spaces only"),
        ("a:\n\t- b", "2: a tab; YAML takes spaces only"),
        ("a: [1,\n2\nb: 2", "3: the list opened with '[' at line 1 has no ',' or ']' here"),
        ("\na: {b: 1\nc: 2", "3: the section opened with '{' at line 2 has no ',' or '}' here"),
        ("a: 1\nb: 'x\nc: 2", "2: the quote opened on this line is never closed"),
        ("a: b: c", "1: a ':' too many, or an indentation"),
        ("a: 1\n b: 2", "2: a ':' too many, or an indentation"),
        ("a:\n  b: 1\n c: 2", "3: this line's indentation does not fit"),
        ("a: @b", "1: a value cannot begin with '@'; put it in quotes"),
        ("a\nb: 1", "a ':' too many"),
        ("a: 1\nb: \x07", "2: character U+0007 is not allowed in YAML"),
        ("a: 1\nb: x\u2028y", "2: character U+2028 is a line break to some readers"),
        ("{a: 1}}", "1: not valid YAML: expected '<document start>', but found '}'"),
        ("a: {{ name }}", "1: a: a list, a section or an alias stands where a key belongs"),
        ("- a", "1: expected keys with values, such as 'train: {...}'; found a list"),
        ("word", "1: expected keys with values, such as 'train: {...}'; found a single value"),
        ("# nothing", "1: expected keys with values, such as 'train: {...}'; found nothing"),
    ],
)
def test_text_that_is_no_yaml_is_told_with_its_line(refuse: Refuses, text: str, told: str) -> None:
    (line,) = refuse(text)
    assert line.startswith("recipe.yaml:")
    assert told in line


def test_anchors_aliases_tags_and_second_documents_are_refused(refuse: Refuses) -> None:
    text = "data: &a {train: x}\nmethod: *a\ntask: !!python/name:os.system causal_lm\n---\nb: 1"
    told = "\n".join(refuse(text))
    assert "recipe.yaml:1: data: anchor '&a'" in told
    assert "recipe.yaml:2: method: alias '*a'; write the value out instead" in told
    assert "recipe.yaml:3: task: tag 'tag:yaml.org,2002:python/name:os.system'" in told
    assert "recipe.yaml:4: a second document begins" in told
    assert len(told.splitlines()) == 4


def test_hostile_sizes_are_refused_in_bounded_time(refuse: Refuses, read: Reads) -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 200)
    )
    start = time.perf_counter()
    assert "alias '*a0'" in "\n".join(refuse(bomb))
    assert "nested deeper than 50 levels" in refuse("[" * 500_000)[0]
    assert "nested deeper than 50 levels" in refuse("- " * 400_000)[0]
    assert "nested deeper than 50 levels" in refuse('{"a":' * 100_000)[0]
    assert "50" in refuse("a: 1\n" * 2000)[-1]
    # Seconds on any machine; without the limits minutes, or a crash.
    assert time.perf_counter() - start < 30
    with pytest.raises(ConfigError, match="at most 1,000,000 bytes"):
        read("#" * (MAX_BYTES + 1))


def test_control_characters_do_not_reach_the_terminal(refuse: Refuses) -> None:
    (line,) = refuse(DATA + 'train: {"a\\e[31m": "b"}')
    assert "\x1b" not in line
    assert r"train.a\x1b[31m: unknown key" in line


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text(DATA)
    for path, told in [
        (tmp_path / "none.yaml", "no such file.\n  YAML files in .*: real.yaml"),
        (tmp_path, "it is a folder.\n  YAML files in .*: real.yaml"),
        (tmp_path / "no" / "none.yaml", "no such file."),
        (tmp_path / "real.yaml" / "x", "Not a directory"),
        (Path("a\0b"), "embedded null byte"),
    ]:
        with pytest.raises(ConfigError, match=told):
            load(Whole, path)


def test_bytes_that_are_no_text_are_named(read: Reads) -> None:
    for raw, told in [
        (b"", "the file is empty"),
        (b" \n\n", "the file is empty"),
        (b"a: 1\nb: \xff", "not UTF-8 text.\n  Line 2 holds the byte 0xff"),
        ("a: 1".encode("utf-16"), "not UTF-8 text"),
    ]:
        with pytest.raises(ConfigError, match=told):
            read(raw)


# Overrides


def test_overrides_go_through_the_same_reading_and_the_last_one_wins(read: Reads) -> None:
    config = read(
        DATA + "train:\nmethod: {type: low, rank: 4}",
        "train.learning_rate=1e-4",
        "train.learning_rate=2e-4",
        "train.log_to=[wandb]",
        "train.max_steps=",
        "method.type=decomposed",
        "method.pattern={'a.b': 3}",
        "data.train=b=c.jsonl",
    )
    assert config.train == Loop(learning_rate=2e-4, log_to=("wandb",))
    assert config.method == Decomposed(rank=4, pattern={"a.b": 3})
    assert config.data.train == Path("b=c.jsonl")


def test_an_override_may_replace_a_whole_section(read: Reads) -> None:
    config = read(DATA + "method: {type: low, ranc: 4}", "method={type: low, rank: 2}")
    assert config.method == Low(rank=2)


def test_errors_of_overrides_name_the_override_and_stand_after_the_file(refuse: Refuses) -> None:
    told = refuse(
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
        "recipe.yaml:2: train.epochs: must be at least 1; found 0",
        "--set train.lr=3: train.lr: unknown key. Did you mean 'learning_rate'?",
        "--set train.batch_size=2.0: train.batch_size: expected a whole number; found 2.0. Write 2",
        "--set task.x=1: task: expected causal_lm; found a section (keys with values)",
        "--set nonsense: expected section.key=value",
        "--set =3: expected section.key=value",
        "--set data.train=a #b: data.train: ' #' begins a comment in YAML; put the value in quotes",
        "--set train.schedule=@x: train.schedule: a value cannot begin with '@'; put it in quotes",
    ]


# From Python, back to YAML, and the schema


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Loop().epochs = 4


def test_the_constructor_tells_every_error_in_the_same_words() -> None:
    values: dict[str, Any] = {"method": {"type": "low", "rank": "3"}, "data": 3}
    with pytest.raises(ConfigError) as caught:
        Whole(**values)
    assert str(caught.value).splitlines() == [
        "Whole(...) is not valid (2 errors).",
        "  method.rank: expected a whole number; found the text '3'. "
        "Write the number without quotes or underscores: 3",
        "  data: expected a section (keys with values); found 3",
    ]


def test_from_dict_names_its_source() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.json: rank: expected a whole number; found t"):
        from_dict(Low, {"rank": True}, "adapter.json")
    assert from_dict(Low, {"targets": ["q"]}, "adapter.json") == Low(targets=("q",))


def test_dumped_yaml_loads_as_an_equal_config(read: Reads) -> None:
    config = Whole(
        method=Decomposed(alpha=2.5, targets="all", pattern={"layers.*": 3, "1": 2}),
        data=Rows(train=Path("a b"), more=(Path("no"), Path("2e-4"), Path("null"), Path("1_0"))),
        train=Loop(learning_rate=1e-7, max_steps="auto", checkpointing=False),
    )
    assert read(dump_yaml(config)) == config


def test_any_text_survives_dump_and_load(read: Reads) -> None:
    rng = random.Random(0)
    alphabet = "aé日😀 \t\n\r\"'\\#:-?{}[],&*!|>%@`~0123456789.eExo+_=<\x00\x1b\x85\u2028"
    texts = ["".join(rng.choices(alphabet, k=rng.randint(1, 12))) for _ in range(300)]
    texts += ["2e-4", "1E5", "0o7", "0x1F", ".5", "+1", "True", "~", "yes", "<<", "=", ".inf", "-"]
    config = Whole(method=Low(targets=tuple(texts)), data=Rows(train=Path("x")))
    assert read(dump_yaml(config)) == config


def test_dumped_yaml_means_the_same_to_plain_pyyaml() -> None:
    config = Whole(
        method=Low(pattern={"yes": 1}), data=Rows(train=Path("on")), train=Loop(learning_rate=2e-6)
    )
    plain = yaml.safe_load(dump_yaml(config))
    assert plain["train"]["learning_rate"] == 2e-6
    assert plain["method"]["pattern"] == {"yes": 1}
    assert plain["data"]["train"] == "on"


def test_the_schema_is_strict_and_carries_the_docstrings() -> None:
    schema = json_schema(Whole)
    low = schema["$defs"]["Low"]
    assert low["additionalProperties"] is False
    assert low["properties"]["rank"]["description"] == "Columns of A."
    assert low["properties"]["rank"]["exclusiveMinimum"] == 0
    assert schema["properties"]["method"]["discriminator"]["propertyName"] == "type"
    json.dumps(schema)
