"""A table of classes by name imports those that are named, and validates like a union."""

import sys
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field, create_model

from peftkit.config.lazy import LazyTable
from peftkit.config.schema import Config, from_dict, json_schema
from peftkit.errors import ConfigError
from tests.helpers.small_recipe import Decomposed, Low, Whole

KIND = """
from typing import Literal
from peftkit.config.schema import Config

class Kind(Config):
    type: Literal["{0}"]
    {0}_size: int = 1
"""


@pytest.fixture
def drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Config]:
    """A config whose section `shape` is one of two kinds, each in a module of its own."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("circle", "square"):
        (tmp_path / f"lazy_{name}.py").write_text(KIND.format(name), encoding="utf-8")
        monkeypatch.delitem(sys.modules, f"lazy_{name}", raising=False)
    shapes = LazyTable[Config]({name: f"lazy_{name}:Kind" for name in ("circle", "square")})
    return create_model("Drawing", __base__=Config, shape=(Annotated[Config, shapes], ...))


def test_only_the_class_that_is_named_is_imported(drawing):
    config = from_dict(drawing, {"shape": {"type": "square", "square_size": 3}}, "here")
    assert config.model_dump() == {"shape": {"type": "square", "square_size": 3}}
    assert "lazy_square" in sys.modules
    assert "lazy_circle" not in sys.modules


def test_an_unknown_name_is_refused_without_an_import(drawing):
    with pytest.raises(ConfigError, match=r"shape.type: should be one of 'circle', 'square'"):
        from_dict(drawing, {"shape": {"type": "squares"}}, "here")
    assert not {"lazy_square", "lazy_circle"} & set(sys.modules)


def test_the_schema_is_that_of_a_union():
    union = Annotated[Low | Decomposed, Field(discriminator="type")]
    plain = create_model("Whole", __base__=Whole, __doc__=Whole.__doc__, method=(union, Low()))
    assert json_schema(Whole) == json_schema(plain)
