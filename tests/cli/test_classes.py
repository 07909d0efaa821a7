"""The command line with tasks of classes: what it prints, and what it refuses with exit 2."""

import json
import re
from pathlib import Path

import pytest

from peftkit.recipe import Recipe
from peftkit.run import run as run_recipe
from tests.helpers.classifiers import LABELS, TEXTS, save_base, write_texts
from tests.helpers.folders import write_rows

RECIPE = """\
task: {task}
base: {{model: {model}, dtype: fp32}}
method: {{type: lora, rank: 2, targets: [q, v]}}
data: {{train: rows.jsonl, eval: rows.jsonl, max_length: 64}}
train: {{output_dir: runs/demo, max_steps: 2, batch_size: 6}}
"""


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, rows, and an adapter in `out` that classifies them."""
    folder = tmp_path_factory.mktemp("classifier")
    data = write_texts(folder / "rows.jsonl")
    run_recipe(
        Recipe(
            task="sequence_classification",
            base={"model": str(save_base(folder / "base")), "dtype": "fp32"},
            method={"type": "lora", "rank": 2, "targets": ["q", "v"]},
            data={"train": data},
            train={
                "output_dir": folder / "out",
                "max_steps": 30,
                "batch_size": 6,
                "learning_rate": 0.01,
            },
        )
    )
    return folder


def write_recipe(folder: Path, model: Path, task: str = "sequence_classification") -> Path:
    write_texts(folder / "rows.jsonl")
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.format(task=task, model=model))
    return file


def test_predict_prints_a_label_and_its_probability(peftkit, classifier):
    done = peftkit("predict", classifier / "out", *(a for t, _ in TEXTS for a in ("--text", t)))
    assert done.code == 0, done.err
    lines = [line.split("\t") for line in done.out.splitlines()]
    assert [label for label, _ in lines] == [label for _, label in TEXTS]
    assert all(1 / 3 < float(probability) <= 1 for _, probability in lines)
    done = peftkit("predict", classifier / "out", "--text", TEXTS[0][0], "--json")
    assert set(json.loads(done.out)[0]) == set(LABELS)


@pytest.mark.parametrize("options", [(), ("--write",)])
def test_a_classifier_is_evaluated_not_proved(options, peftkit, classifier):
    refusal = peftkit("prove", classifier / "out", *options).refusal()
    assert "It was trained for the task sequence_classification." in refusal
    assert "evaluate the adapter with peftkit eval" in refusal


def test_what_a_classifier_is_good_for_is_not_generation(peftkit, classifier):
    output = peftkit("inspect", classifier / "out").err
    assert "peftkit generate" not in output
    refused = peftkit("export", classifier / "out", "--to", "mlx", "--out", "mlx")
    assert refused.code == 2
    assert "peftkit generate" not in refused.err


def test_eval_prints_the_tasks_metrics(peftkit, classifier):
    done = peftkit("eval", classifier / "out", "--data", classifier / "rows.jsonl", "--json")
    assert done.code == 0, done.err
    metrics = json.loads(done.out)
    names = {"loss", "accuracy", "f1_macro", "f1_weighted", "num_rows", "labels", "confusion"}
    assert metrics.keys() == names
    assert [sum(row) for row in metrics["confusion"]] == [2, 2, 2]
    assert metrics["labels"].keys() == set(LABELS)
    assert metrics["accuracy"] == 1.0


def test_rows_get_the_likeliest_label(peftkit, classifier):
    done = peftkit("predict", classifier / "out", "--data", classifier / "rows.jsonl").succeeded()
    for line in done.out.splitlines():
        row = json.loads(line)
        assert row["predicted_label"] == row["label"] == next(iter(row["prediction"]))


def test_a_file_of_predictions_keeps_ids_and_has_all_probabilities(peftkit, classifier, tmp_path):
    rows = [{"id": f"row-{n}", "text": text, "extra": [n]} for n, (text, _) in enumerate(TEXTS)]
    data = write_rows(tmp_path / "new.jsonl", rows)
    done = peftkit("predict", classifier / "out", "--data", data, "--out", tmp_path / "out.jsonl")
    assert done.code == 0, done.err
    assert done.out.strip() == str(tmp_path / "out.jsonl")
    predicted = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for row, given, (_, label) in zip(predicted, rows, TEXTS, strict=True):
        assert {name: row[name] for name in given} == given
        assert set(row["prediction"]) == set(LABELS)
        assert sum(row["prediction"].values()) == pytest.approx(1, abs=1e-5)
        assert row["predicted_label"] == label


@pytest.mark.covers("peftkit", "cli/peftkit_cli")
def test_the_best_step_is_chosen_by_a_metric(peftkit, classifier, tmp_path):
    recipe = write_recipe(tmp_path, classifier / "base")
    options = ("--set", "train.eval_every=1", "--set", "train.keep_best=true")
    done = peftkit("train", recipe, *options, "--set", "train.best_metric=f1_macro").succeeded()
    lines = (tmp_path / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()
    evals = [e for e in map(json.loads, lines) if e["event"] == "EvalDone"]
    first, second = (e["metrics"]["f1_macro"] for e in evals)
    assert [e["best"] for e in evals] == [True, second > first]
    assert re.search(r"\n  eval: loss .*, loss of best step ", done.err)  # not the "best loss"
    assert "best loss" not in done.err
    done = peftkit("train", recipe, "--overwrite", "--set", "train.best_metric=f1")
    assert done.code == 2
    assert "An evaluation of this task has: loss, accuracy, f1_macro." in done.err


def test_train_says_what_to_do_next(peftkit, classifier, tmp_path):
    done = peftkit("train", write_recipe(tmp_path, classifier / "base")).succeeded()
    assert "Next: peftkit predict runs/demo --text TEXT" in done.err
    assert "eval at step 2: loss " in done.err
    assert ", accuracy " in done.err
    lines = (tmp_path / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()
    events = {event["event"]: event for event in map(json.loads, lines)}
    assert events["EvalDone"]["metrics"].keys() == {"loss", "accuracy", "f1_macro"}
    assert events["ClassReport"]["labels"].keys() == set(LABELS)
    report = (tmp_path / "runs" / "demo" / "report.html").read_text()
    assert report.count('class="hit"') == len(LABELS)
    assert "perplexity" not in done.err
    card = (tmp_path / "runs" / "demo" / "README.md").read_text()
    assert "AutoModelForSequenceClassification" in card
    assert "num_labels=3" in card
    assert "eval accuracy" in card
    assert "perplexity" not in card
    assert "vllm" not in card


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "{out}", "--prompt", "hello"), "does not complete prompts"),
        (("chat", "{out}"), "does not complete prompts"),
        (("chat", "--adapter", "a={out}"), "does not complete prompts"),
        (("predict", "{out}", "--text", " "), "cannot classify ' '"),
        (("eval", "{out}", "--data", "{new}"), "Did you mean 'animal'?"),
        (("eval", "{out}", "--data", "{none}"), "label: missing"),
    ],
)
def test_unsupported_commands_exit_2(peftkit, classifier, arguments, words, tmp_path):
    new = write_rows(tmp_path / "new.jsonl", [{"text": "a dog", "label": "animals"}])
    none = write_rows(tmp_path / "none.jsonl", [{"text": "a dog"}])
    errors = peftkit(
        *(a.format(out=classifier / "out", new=new, none=none) for a in arguments)
    ).refusal()
    assert words in errors
    assert "Traceback" not in errors


def test_an_adapter_that_answers_does_not_classify(peftkit, trained):
    done = peftkit("predict", trained / "runs" / "demo", "--text", "hello")
    assert done.code == 2
    assert "predicts nothing for texts" in done.err
