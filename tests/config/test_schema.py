"""A config is read strictly: YAML 1.2 values, overrides, Python values, and back to YAML."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from peftkit.config.schema import dump_yaml, from_dict, json_schema
from peftkit.errors import ConfigError
from tests.helpers.small_recipe import DATA, Decomposed, Loop, Low, Rows, Whole, read, refuse


def test_a_float_may_be_written_in_every_yaml_1_2_form(tmp_path):
    for text, value in [("2e-4", 2e-4), ("2.0e-4", 2e-4), ("1E-3", 1e-3), (".5", 0.5), ("1.", 1.0)]:
        rate = read(tmp_path, f"{DATA}train: {{learning_rate: {text}}}").train.learning_rate
        assert (type(rate), rate) == (float, value)


def test_an_integer_becomes_a_float_only_where_no_integer_is_allowed(tmp_path):
    config = read(tmp_path, DATA + "train: {learning_rate: 1}\nmethod: {type: low, alpha: 32}")
    assert repr(config.train.learning_rate) == "1.0"
    assert repr(config.method.alpha) == "32"


def test_integers_are_those_of_yaml_1_2(tmp_path):
    for text, value in [("010", 10), ("0o10", 8), ("0x10", 16), ("+3", 3)]:
        assert read(tmp_path, f"{DATA}method: {{type: low, rank: {text}}}").method.rank == value


def test_lists_become_tuples_and_paths_are_paths(tmp_path):
    config = read(
        tmp_path, "data: {train: a.jsonl, more: [b, c]}\nmethod: {type: low, targets: [k]}"
    )
    assert config.data == Rows(train=Path("a.jsonl"), more=(Path("b"), Path("c")))
    assert config.method.targets == ("k",)


def test_null_is_taken_only_where_declared(tmp_path):
    assert read(tmp_path, DATA + "train: {max_steps: null}").train.max_steps is None
    assert read(tmp_path, DATA + "train: {max_steps: }").train.max_steps is None
    assert refuse(tmp_path, DATA + "train: {epochs: null}") == [
        "recipe.yaml:2: train.epochs: should be a valid integer; found nothing (null)"
    ]


def test_text_that_looks_like_yaml_1_1_stays_text(tmp_path):
    config = read(tmp_path, "data: {train: no, more: [2024-01-01, 12:30, on, 1_000, y]}")
    assert config.data.train == Path("no")
    assert [str(path) for path in config.data.more] == ["2024-01-01", "12:30", "on", "1_000", "y"]


@pytest.mark.parametrize("text", ["\ufeff" + DATA, DATA.replace("\n", "\r\n"), "---\n" + DATA])
def test_byte_order_mark_crlf_and_a_document_start_are_harmless(tmp_path, text):
    assert read(tmp_path, text).data.train == Path("a.jsonl")


def test_overrides_go_through_the_same_reading_and_the_last_one_wins(tmp_path):
    config = read(
        tmp_path,
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


def test_an_override_may_replace_a_whole_section(tmp_path):
    config = read(tmp_path, DATA + "method: {type: low, ranc: 4}", "method={type: low, rank: 2}")
    assert config.method == Low(rank=2)


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Loop().epochs = 4


def test_the_constructor_tells_every_error_in_the_same_words():
    values: dict[str, Any] = {"method": {"type": "low", "rank": "3"}, "data": 3}
    with pytest.raises(ConfigError) as caught:
        Whole(**values)
    assert str(caught.value).splitlines() == [
        "Whole(...) is not valid (2 errors).",
        "  method.rank: should be a valid integer; found the text '3'",
        "  data: should be a section (keys with values); found 3",
    ]


def test_from_dict_names_its_source():
    with pytest.raises(ConfigError, match=r"adapter\.json: rank: should be a valid int"):
        from_dict(Low, {"rank": True}, "adapter.json")
    assert from_dict(Low, {"targets": ["q"]}, "adapter.json") == Low(targets=("q",))


def test_dumped_yaml_loads_as_an_equal_config(tmp_path):
    config = Whole(
        method=Decomposed(alpha=2.5, targets="all", pattern={"layers.*": 3, "1": 2}),
        data=Rows(train=Path("a b"), more=(Path("no"), Path("2e-4"), Path("null"), Path("1_0"))),
        train=Loop(learning_rate=1e-7, max_steps="auto", checkpointing=False),
    )
    assert read(tmp_path, dump_yaml(config)) == config


def test_any_text_survives_dump_and_load(tmp_path):
    rng = random.Random(0)
    alphabet = "aé日😀 \t\n\r\"'\\#:-?{}[],&*!|>%@`~0123456789.eExo+_=<\x00\x1b\x85\u2028"
    texts = ["".join(rng.choices(alphabet, k=rng.randint(1, 12))) for _ in range(300)]
    texts += ["2e-4", "1E5", "0o7", "0x1F", ".5", "+1", "True", "~", "yes", "<<", "=", ".inf", "-"]
    config = Whole(method=Low(targets=tuple(texts)), data=Rows(train=Path("x")))
    assert read(tmp_path, dump_yaml(config)) == config


def test_dumped_yaml_means_the_same_to_plain_pyyaml():
    config = Whole(
        method=Low(pattern={"yes": 1}), data=Rows(train=Path("on")), train=Loop(learning_rate=2e-6)
    )
    plain = yaml.safe_load(dump_yaml(config))
    assert plain["train"]["learning_rate"] == 2e-6
    assert plain["method"]["pattern"] == {"yes": 1}
    assert plain["data"]["train"] == "on"


def test_the_schema_is_strict_and_carries_the_docstrings():
    schema = json_schema(Whole)
    low = schema["$defs"]["Low"]
    assert low["additionalProperties"] is False
    assert low["properties"]["rank"]["description"] == "Columns of A."
    assert low["properties"]["rank"]["exclusiveMinimum"] == 0
    assert schema["properties"]["method"]["discriminator"]["propertyName"] == "type"
    json.dumps(schema)
