"""A stranger's regular expression takes bounded time or is refused."""

import re
import time

import pytest

from peftkit.errors import AdapterError
from peftkit.files import safe_regex
from peftkit.files.safe_regex import fullmatches, is_simple

NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 10)
    for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj")
] + ["lm_head", "vision.blocks.0.attn.q_proj"]

REAL = [
    r".*\.q_proj",
    r"model\.layers\.[01]\.self_attn\.(q|v)_proj",
    r".*layers\.1.*(q_proj|up_proj)",
    r"^(?!.*vision).*(?:q_proj|v_proj).*",
    r"(?:.*?(?:vision|image).*?(?:attn|mlp).*?(?:q_proj|v_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))",
    r"(model\.)?(layers\.(\d+)\.)+mlp\.up_proj",
    r"lm_head",
    r"nothing",
]


@pytest.mark.parametrize("pattern", REAL)
def test_it_matches_as_python_does(pattern):
    assert fullmatches(pattern, NAMES) == [n for n in NAMES if re.fullmatch(pattern, n)]


def test_both_ways_of_matching_are_tried_above():
    assert {is_simple(pattern) for pattern in REAL} == {True, False}


EXPLODING = [r"(\w+\.?)+!", r"\w*" * 12 + "!", r"(\w|\w\w)" * 40 + "!"]


@pytest.mark.parametrize("pattern", EXPLODING)
def test_a_pattern_that_explodes_is_ended(pattern, monkeypatch):
    monkeypatch.setattr(safe_regex, "SECONDS", 0.3)
    start = time.perf_counter()
    with pytest.raises(AdapterError, match=r"takes more than 0\.3 seconds"):
        fullmatches(pattern, ["model_layers_0_self_attn_q_proj_and_some_more_letters"] * 2)
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize(
    "pattern", ["(", "*", "a{99999999999999999999}", "(?P<x>a)(?P<x>b)", "[z-a]"]
)
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(AdapterError, match="not a regular expression"):
        fullmatches(pattern, NAMES)


def test_a_pattern_of_endless_length_is_refused():
    with pytest.raises(AdapterError, match=r"longer than 10,000 characters") as caught:
        fullmatches("a" * 10**7, NAMES)
    assert len(str(caught.value)) < 300
