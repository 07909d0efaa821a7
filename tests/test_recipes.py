"""Every recipe that is shipped loads, and says what it needs and what it gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from peftkit import recipe
from peftkit.roles import GROUPS, ROLES
from peftkit_cli.about import headline, recipes_folder

RECIPES = sorted(recipes_folder().glob("*.yaml"))


def test_there_are_recipes_at_the_top_of_the_tree() -> None:
    assert recipes_folder() == Path(__file__).parents[1] / "recipes"
    assert len(RECIPES) >= 7


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_loads(file: Path) -> None:
    loaded = recipe.load(file)
    assert loaded.train.output_dir.parts[0] == "runs"
    targets = loaded.method.targets
    assert {targets} if isinstance(targets, str) else set(targets) <= {*ROLES, *GROUPS}


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_says_what_it_needs_and_gives(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    assert headline(file).endswith(".")
    comment = lines[: next(n for n, line in enumerate(lines) if not line.startswith("#"))]
    starts = [line[:9] for line in comment[1:]]
    assert starts.count("# Needs: ") == starts.count("# Gives: ") == 1
    assert max(len(line) for line in lines) <= 104


def test_no_two_recipes_write_to_the_same_folder() -> None:
    folders = [recipe.load(file).train.output_dir for file in RECIPES]
    assert len(set(folders)) == len(folders)
