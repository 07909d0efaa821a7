"""`peftkit init`: every recipe that it writes is one that trains."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from peftkit.data.records import sources_of
from peftkit.defaults import BATCHES, CONTRASTIVE_BATCHES, defaults_for
from peftkit.planning.resolve import tokens_of_first
from peftkit.recipe import Recipe, load
from peftkit.tasks.table import TASKS
from peftkit_cli.start.draft import ROOM, WHOLE_ROWS, Size, draft, ready_made
from peftkit_cli.start.recipes import GOALS
from peftkit_cli.start.survey import FieldFacts, Survey, only_data_file, splits_of
from tests.helpers.command_line import Done, Run, turn
from tests.helpers.folders import write_rows


def written(
    folder: Path, task: str, width: int | None = None, *, on_cpu: bool = True, **facts: Any
) -> Recipe:
    """Write the recipe of a task, for rows of such facts; load it."""
    given = {"where": "rows.jsonl", "fields": [FieldFacts("a", 9, 0, 0)], **facts}
    text, _ = draft(Survey(**given), task, "org/m", int(not on_cpu), base=Size(width))
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return load(folder / "recipe.yaml")


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("task", GOALS)
def test_every_recipe_is_valid_and_has_the_answers(task, on_cpu, tmp_path):
    facts = {"where": "my: rows.jsonl", "num_rows": 640}
    recipe = written(tmp_path, task, 576, on_cpu=on_cpu, **facts)
    assert recipe.task.type == {"kto": "preference"}.get(task, task)
    assert (recipe.base.model, recipe.data.train) == ("org/m", "my: rows.jsonl")
    assert recipe.method.start_from is None
    rules = defaults_for(
        640, width=576, batches=CONTRASTIVE_BATCHES if task == "embedding" else BATCHES
    )
    if task != "grpo":
        assert (recipe.train.epochs, recipe.train.batch_size) == (rules.epochs, rules.batch_size)
        assert recipe.train.num_steps(640) == rules.num_steps >= 100
    if GOALS[task].by_rules:
        rate = 1e-4 if task in ("preference", "kto") else 1e-3
        assert (recipe.train.learning_rate, recipe.method.rank) == (rate, 16)
    if on_cpu:
        assert recipe.base.quantize == "none"
    if task != "kto":
        assert recipe.data.eval == 0.05
    text = (tmp_path / "recipe.yaml").read_text(encoding="utf-8")
    assert text.count("  # ") >= 4
    steps = recipe.train.num_steps(608)  # without the held-out rows
    writes = recipe.data.eval and TASKS[recipe.task.type].writes_text
    assert recipe.train.sample_every == (steps // 2 if writes else None)
    if task not in ("grpo", "kto"):
        assert f"passes over the 608 rows: about {steps} steps" in text


@pytest.mark.parametrize(("chars", "tokens"), [(4, 16), (101, 101), (200, 200), (201, 64)])
def test_samples_are_long_enough_for_short_answers(chars, tokens, tmp_path):
    fields = [FieldFacts("mail", 640, 0, 900), FieldFacts("ticket", 640, 0, chars)]
    facts = Survey("rows.jsonl", num_rows=640, fields=fields)
    named = ("mail", "ticket")
    text, _ = draft(facts, "causal_lm", "org/m", 0, base=Size(576), named=named)
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    assert load(tmp_path / "recipe.yaml").train.sample_tokens == tokens


@pytest.mark.parametrize(("fields", "anchor"), [(["messages"], 1.0), (["text"], None)])
def test_conversations_are_trained_with_an_anchor(fields, anchor, tmp_path):
    facts = {"num_rows": 640, "fields": [FieldFacts(*fields, 640, 0, 0)]}
    recipe = written(tmp_path, "causal_lm", **facts)
    assert recipe.task.anchor == anchor
    assert recipe.train.drift is not None


@pytest.mark.parametrize(("num_rows", "share"), [(99, None), (100, 0.16), (200, 0.08), (400, 0.05)])
def test_enough_rows_are_held_out_to_evaluate_on(num_rows, share, tmp_path):
    assert written(tmp_path, "causal_lm", 576, num_rows=num_rows).data.eval == share


def test_options_answer_the_questions(peftkit, tmp_path, model_folder):
    write_rows(tmp_path / "rows.jsonl", [turn("a", f"b {n}") for n in range(9)])
    args = ("--data", "rows.jsonl", "--model", str(model_folder), "--memory", "12GB")
    done = peftkit("init", *args, "--task", "causal_lm")
    assert done[:2] == (0, "recipe.yaml\n"), done.err
    _, few, *lines = done.err.splitlines()
    assert few == "note: 9 rows are few; a few hundred are a good start."
    commands = [line.strip().removeprefix("Next: ") for line in lines]
    assert commands == [
        "peftkit check recipe.yaml",
        "peftkit plan recipe.yaml --memory 12GB",
        "peftkit train recipe.yaml",
    ]
    recipe = load(tmp_path / "recipe.yaml")
    settings = (recipe.base.quantize, recipe.data.eval, recipe.train.epochs)
    assert settings == ("none", None, 8)  # 0.3 of 12 GB; 24 steps
    assert "recipe.yaml" in peftkit("init", *args, "--task", "causal_lm").refusal()


@pytest.mark.parametrize("task", GOALS)
def test_a_recipe_for_few_rows_evaluates_nothing(task, tmp_path):
    recipe = written(tmp_path, task, num_rows=9)
    assert recipe.data.eval is None
    assert recipe.train.evaluates == ()


CPU = ("--memory", "cpu")
TASK = ("--data", "rows.jsonl", "--task", "embedding")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--data", "rows.jsonl"), "--task"),
        ((), "--data"),
        (("--data", "rows.jsonl", "--task", "embeding"), "Did you mean 'embedding'?"),
        (("--data", "absent.jsonl"), "absent.jsonl"),
        (("--data", "rows.jsonl", "--task", "image_text"), "tasks for them: embedding"),
        ((*TASK, "--memory", "smollm2-135m"), "It is neither a positive size nor cpu."),
        ((*TASK, "--memory", "none"), "without a GPU: cpu."),
        ((*TASK, "--memory", "0"), "cannot use --memory '0'."),
        ((*TASK, "--fields", "anchor,positive"), "The task embedding does not accept field names."),
    ],
)
def test_bad_answers_are_named(options, message, peftkit, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"anchor": "a", "positive": "b"}])
    assert message in peftkit("init", *options).refusal()
    assert not (tmp_path / "recipe.yaml").exists()


def test_questions_suggest_the_task_of_the_rows(peftkit, tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.jsonl", [{"anchor": "a", "positive": "b"}] * 120)
    questions: list[str] = []

    def prompt(question: str, default: str | None = None, **_: object) -> str:
        questions.append(question)
        return default or "rows.jsonl"

    monkeypatch.setattr("typer.prompt", prompt)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    peftkit("init").succeeded()
    assert len(questions) == 4
    assert questions[1].splitlines()[1].split()[0] == "embedding"
    recipe = load(tmp_path / "recipe.yaml")
    assert (recipe.task.type, recipe.base.model) == ("embedding", "all-minilm-l6-v2")


def test_columns_with_other_names_are_named_by_an_option(peftkit, tmp_path):
    rows = "".join(f"{n},Where is {n}?,On its way.\n" for n in range(30))
    (tmp_path / "own.csv").write_text("Ticket,Customer Message,Agent Reply\n" + rows)
    args = ("init", "--data", "own.csv", "--task", "causal_lm", "--model", "smollm2-135m")
    refused = peftkit(*args, "--memory", "cpu")
    assert "peftkit init needs --fields INPUT,TARGET" in refused.err
    wrong = peftkit(*args, "--memory", "cpu", "--fields", "Customer,Agent Reply")
    assert "own.csv has the fields: Ticket, Customer Message, Agent Reply." in wrong.err
    fields = ("--fields", "Customer Message,Agent Reply")
    done = peftkit(*args, "--memory", "12 GB", *fields).succeeded()
    assert "--memory '12 GB'" in done.err
    recipe = load(tmp_path / "recipe.yaml")
    assert (recipe.task.prompt, recipe.task.completion) == ("Customer Message", "Agent Reply")
    assert not recipe.data.packing


def test_a_task_written_as_its_name_takes_settings_of_its_own(peftkit, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [turn("a", "b")])
    peftkit("init", "--data", "rows.jsonl", *("--task", "causal_lm"), "--model", "m", *CPU)
    overrides = ["task.prompt=Customer Message", "task.completion=Agent Reply"]
    assert load(tmp_path / "recipe.yaml", overrides).task.prompt == "Customer Message"


def test_rows_that_cannot_be_read_suit_no_task(peftkit, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "agent", "content": "a"}]}])
    done = peftkit("init", "--data", "rows.jsonl", "--task", "causal_lm")
    assert "no task accepts the rows of rows.jsonl." in done.err
    assert "rows.jsonl:1: messages[0].role: unknown role 'agent'" in done.err


def test_an_editor_finds_the_schema_beside_a_recipe(peftkit, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [turn("a", "b")])
    peftkit("init", "--data", "rows.jsonl", "--task", "causal_lm", "--model", "m", *CPU)
    first = (tmp_path / "recipe.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first == "# yaml-language-server: $schema=recipe.schema.json"
    schema = (tmp_path / "recipe.schema.json").read_text(encoding="utf-8")
    assert schema == peftkit("schema").out


def test_prompt_and_completion_are_named_for_a_chat_model(peftkit, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "Why?", "answer": "So."}] * 3)
    args = ("init", "--data", "rows.jsonl", "--task", "sft", "--model", "m", *CPU)
    assert peftkit(*args).code == 0
    recipe = load(tmp_path / "recipe.yaml")
    assert (recipe.task.prompt, recipe.task.completion) == ("prompt", "answer")


def init_of_folder(peftkit: Run, tmp_path: Path, *names: str) -> Done:
    """Run init over a folder `plants` with files of nine rows each."""
    folder = tmp_path / "plants"
    folder.mkdir()
    for name in names:
        write_rows(folder / f"{name}.jsonl", [turn("a", name)] * 9)
    return peftkit("init", "--data", "plants", "--task", "causal_lm", "--model", "m", *CPU)


def test_files_of_a_folder_are_told_apart_by_their_names(peftkit, tmp_path):
    done = init_of_folder(peftkit, tmp_path, "train", "valid", "test")
    assert "Training data: plants/train.jsonl; evaluation data: plants/valid.jsonl." in done.err
    recipe = load(tmp_path / "recipe.yaml")
    assert (recipe.data.train, recipe.data.eval) == ("plants/train.jsonl", "plants/valid.jsonl")
    assert recipe.train.output_dir == Path("runs/plants")
    shown = peftkit("data", "plants")
    assert "Data: plants/train.jsonl" in shown.out
    assert "Evaluation data (data.eval): plants/valid.jsonl" in shown.err
    refused = peftkit("train", "plants")
    assert "It is a folder with data files." in refused.err
    assert "peftkit init --data plants" in refused.err


def test_a_training_file_is_evaluated_on_the_file_next_to_it(peftkit, tmp_path):
    for name in ("train", "val", "other"):
        write_rows(tmp_path / f"{name}.jsonl", [turn("a", "b")])
    args = ("--task", "causal_lm", "--model", "m", *CPU)
    done = peftkit("init", "--data", "./train.jsonl", *args)
    assert "Training data: train.jsonl; evaluation data: val.jsonl." in done.err
    assert load(tmp_path / "recipe.yaml").data.eval == "val.jsonl"
    peftkit("init", "--data", "other.jsonl", *args, "--out", "other.yaml")
    assert load(tmp_path / "other.yaml").data.eval is None


def test_the_only_data_file_is_the_default(tmp_path):
    write_rows(tmp_path / "mine.jsonl", [turn("a", "b")])
    (tmp_path / "notes.txt").touch()
    assert only_data_file(tmp_path) == str(tmp_path / "mine.jsonl")
    write_rows(tmp_path / "more.jsonl", [turn("a", "b")])
    assert only_data_file(tmp_path) is None


@pytest.mark.parametrize("names", ["0,1", "true,1e3", "null,-", "0x1f,.inf"])
def test_names_special_to_yaml_are_quoted(names, peftkit, tmp_path):
    prompt, completion = names.split(",")
    write_rows(tmp_path / "12.jsonl", [{prompt: "Why is it so?", completion: "So."}] * 3)
    args = ("init", "--data", "12.jsonl", "--task", "causal_lm", "--model", "12", *CPU)
    peftkit(*args, "--fields", names).succeeded()
    recipe = load(tmp_path / "recipe.yaml")
    assert (recipe.task.prompt, recipe.task.completion) == (prompt, completion)
    assert recipe.base.model == "12"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train-old", "train", "valid"], {"train": "train", "eval": "valid"}),
        (["train", "eval_results", "trainer_state"], {"train": "train"}),
        (["train", "validation", "test"], {"train": "train", "eval": "validation"}),
        (["train", "values", "test"], {"train": "train", "eval": "test"}),
        (["train_a", "train_b", "dev-set"], {"eval": "dev-set"}),
        (["Train-00000-of-00001", "val"], {"train": "Train-00000-of-00001", "eval": "val"}),
        (
            ["train-00000-of-00002-abc", "train-00001-of-00002-def", "test"],
            {"train": "train-*-of-*", "eval": "test"},
        ),
        (
            ["train", "validation-00000-of-00002", "validation-00001-of-00002", "test"],
            {"train": "train", "eval": "validation-00000-of-00002"},
        ),
    ],
)
def test_a_folder_is_read_by_the_names_of_its_files(names, expected, tmp_path):
    for name in names:
        write_rows(tmp_path / f"{name}.jsonl", [turn("a", name)])
    found = {split: Path(place).name for split, place in splits_of(tmp_path).items()}
    assert found == {split: f"{name}.jsonl" for split, name in expected.items()}


def test_all_shards_of_a_folder_are_read(peftkit, tmp_path):
    shards = ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")
    done = init_of_folder(peftkit, tmp_path, *shards)
    assert "Training data: plants/train-*-of-*.jsonl" in done.err
    data = load(tmp_path / "recipe.yaml").data
    assert [Path(source.path).stem[:11] for source in sources_of(data)] == [
        "train-00000",
        "train-00001",
    ]
    assert data.eval == "plants/test-00000-of-00001.jsonl"
    assert json.loads(peftkit("data", "plants", "--json").out)["num_rows"] == 18


CALL = {"type": "function", "function": {"name": "stock", "arguments": {"plant": "fern"}}}
WITH_TOOLS = {
    "messages": [
        {"role": "user", "content": "Do you have ferns?"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "Three."},
    ]
}


def test_tool_rows_get_a_tool_template(peftkit, tmp_path, model_folder):
    args = ("init", "--task", "causal_lm", "--model", model_folder, *CPU)
    write_rows(tmp_path / "calls.jsonl", [WITH_TOOLS] * 3)
    write_rows(tmp_path / "chats.jsonl", [turn("a", "b")] * 3)
    for name, template in (("calls", "chatml"), ("chats", None)):
        peftkit(*args, "--data", f"{name}.jsonl", "--out", f"{name}.yaml").succeeded()
        assert load(tmp_path / f"{name}.yaml").data.chat_template == template


@pytest.mark.parametrize("task", WHOLE_ROWS)
@pytest.mark.parametrize("words", [1, 20, 3_000])
def test_max_length_leaves_room_above_the_longest_row_up_to_that_of_the_base(
    task, words, peftkit, tmp_path, model_folder
):
    row = dict(zip(("prompt", "chosen", "rejected"), ("a", "b " * words, "c"), strict=True))
    if task in ("causal_lm", "kto"):
        row = {"prompt": "a", "completion": row["chosen"]}
    if task == "kto":
        row["label"] = True
    write_rows(tmp_path / "rows.jsonl", [row] * 3)
    args = ("--data", "rows.jsonl", "--task", task, "--model", model_folder)
    peftkit("init", *args, *CPU).succeeded()
    recipe = load(tmp_path / "recipe.yaml")
    longest, length = max(tokens_of_first(recipe, 3)), recipe.data.max_length
    limit = json.loads((model_folder / "config.json").read_text())["max_position_embeddings"]
    limit = min(limit, int(ready_made(GOALS[task].recipe)["data"]["max_length"]))
    is_measured = f"the longest row has {longest:,};" in (tmp_path / "recipe.yaml").read_text()
    assert is_measured == (0 < longest < limit) == (words < 3_000)
    assert length == limit or ROOM * longest <= length < 2 * ROOM * longest


def test_an_invalid_answer_repeats_its_question(peftkit, tmp_path, monkeypatch):
    rows = "".join(f"{n},Where is order {n}?,It is on its way.\n" for n in range(60))
    (tmp_path / "own.csv").write_text("Ticket,Customer Message,Agent Reply\n" + rows)
    answers = iter(["absent.csv", "own.csv", "sing", "sft", "Ticket", "", "smollm2", "cpu", "m"])
    asked: list[tuple[str, str | None]] = []

    def prompt(question: str, default: str | None = None, **_: object) -> str:
        asked.append((question, default))
        return next(answers) or default or ""

    monkeypatch.setattr("typer.prompt", prompt)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    done = peftkit("init").succeeded()
    assert len(asked) == 9
    assert "there is no task 'sing'." in done.err
    assert asked[5][1] == "Customer Message,Agent Reply"
    recipe = load(tmp_path / "recipe.yaml")
    assert (recipe.task.prompt, recipe.task.completion) == ("Customer Message", "Agent Reply")
