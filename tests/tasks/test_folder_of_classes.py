"""From a recipe to a folder that says its task, opened again here, by PEFT, and from PEFT."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor

from peftkit.config.schema import json_schema
from peftkit.errors import AdapterError, ConfigError
from peftkit.evaluation.evaluate import evaluate
from peftkit.evaluation.predict import predict
from peftkit.events import Event, Table
from peftkit.formats.folders import NOTES
from peftkit.formats.open_adapter import Opened, open_adapter
from peftkit.merging.merge import merge
from peftkit.recipe import Recipe
from peftkit.run import prepare
from peftkit.run import run as run_recipe
from peftkit.tasks.classes.sequence_classification import SequenceClassificationConfig
from tests.helpers.classifiers import LABELS, TAGS, TEXTS, save_base, write_texts, write_words
from tests.helpers.finished import recipe, sections

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # PEFT asks by an old name
)
TOLERANCE = 1e-5
"""float32 sums in another order; logits are of order one."""
SEQUENCE, TOKEN = "sequence_classification", "token_classification"
CLASSES = {
    SEQUENCE: transformers.AutoModelForSequenceClassification,
    TOKEN: transformers.AutoModelForTokenClassification,
}
FAMILIES = {
    SEQUENCE: ("bert", "roberta", "distilbert", "deberta_v2", "modernbert", "llama", "gpt2"),
    TOKEN: ("bert", "llama"),
}
PAIRS = [(task, family) for task, families in FAMILIES.items() for family in families]


def settings(folder: Path, task: str, family: str = "bert", **method: Any) -> Recipe:
    """Return a recipe over a new base in this folder."""
    write = write_texts if task == SEQUENCE else write_words
    data = write(folder / "rows.jsonl")
    told = sections(folder, save_base(folder / "base", family), data, task)
    train = {"output_dir": folder / "out", "max_steps": 30, "batch_size": 6, "learning_rate": 0.01}
    method = {"rank": 2, "targets": ["q", "v"], **method}
    train["eval_every"] = None
    return recipe(told, data={"eval": data}, method=method, train=train)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a trained BERT that classifies texts. Do not write into it."""
    folder = tmp_path_factory.mktemp("classifier")
    run_recipe(settings(folder, SEQUENCE))
    return folder / "out"


@pytest.fixture
def without_notes(classifier: Path, tmp_path: Path) -> Path:
    """A copy of the folder as PEFT would write it."""
    folder = shutil.copytree(classifier, tmp_path / "out")
    (folder / NOTES).unlink()
    return folder


def logits(model: Any, opened: Opened) -> Tensor:
    batch = opened.base.tokenizer(
        [text for text, _ in TEXTS], return_tensors="pt", padding=True, return_token_type_ids=False
    )
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize(("task", "family"), PAIRS, ids=lambda value: value[:8])
def test_trained_head_is_saved_opened_again_and_loaded_by_peft(task, family, tmp_path):
    recipe = settings(tmp_path, task, family)
    result = run_recipe(recipe)
    assert result.metrics["eval_accuracy"] >= 0.8  # rows learnt by heart
    opened = open_adapter(tmp_path / "out")
    assert opened.task.labels == (LABELS if task == SEQUENCE else TAGS)
    measured = evaluate(opened.base, recipe.data.train, task=opened.task)
    for name in ("loss", "accuracy"):
        assert measured[name] == pytest.approx(result.metrics[f"eval_{name}"], rel=1e-5)
    fields = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert fields["task_type"] == {SEQUENCE: "SEQ_CLS", TOKEN: "TOKEN_CLS"}[task]
    ours = logits(opened.base.model, opened)
    plain = CLASSES[task].from_pretrained(
        tmp_path / "base",
        num_labels=len(opened.task.labels),
        pad_token_id=opened.base.tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "out").eval()
    torch.testing.assert_close(logits(theirs, opened), ours, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.smoke
def test_pefts_auto_class_finds_base_and_head(classifier):
    opened = open_adapter(classifier)
    theirs = peft.AutoPeftModelForSequenceClassification.from_pretrained(
        classifier, num_labels=3, dtype=torch.float32
    ).eval()
    ours = logits(opened.base.model, opened)
    torch.testing.assert_close(logits(theirs, opened), ours, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("task", "family"), [p for p in PAIRS if p[1] in ("bert", "llama", "gpt2")]
)
def test_a_folder_of_pefts_is_opened_with_its_logits(task, family, tmp_path):
    folder = save_base(tmp_path / "base", family)
    kind = {SEQUENCE: "SEQ_CLS", TOKEN: "TOKEN_CLS"}[task]
    targets = {"bert": ["query", "value"], "llama": ["q_proj"], "gpt2": ["c_attn"]}[family]
    base = CLASSES[task].from_pretrained(folder, num_labels=4, pad_token_id=0, dtype=torch.float32)
    config = peft.LoraConfig(
        task_type=kind,
        r=2,
        target_modules=targets,
        modules_to_save=["pooler"] if family == "bert" and task == SEQUENCE else None,
        init_lora_weights=False,
        fan_in_fan_out=family == "gpt2",
    )
    theirs = peft.get_peft_model(base, config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    opened = open_adapter(tmp_path / "theirs", str(folder), dtype="fp32")
    assert opened.task.type == task
    assert len(opened.task.labels) == 4
    found = logits(opened.base.model, opened)
    torch.testing.assert_close(found, logits(theirs, opened), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")
@pytest.mark.parametrize("kind", ["dora", "ia3", "ln_tuning", "vera"])
def test_the_head_is_trained_beside_every_method(kind, tmp_path):
    recipe = settings(tmp_path, SEQUENCE)
    how = {"ia3": {"targets": ["k", "v"]}, "ln_tuning": {}}.get(kind, {"targets": ["q", "v"]})
    recipe = Recipe(**{**recipe.model_dump(), "method": {"type": kind, **how}})
    seen: list[Event] = []
    result = run_recipe(recipe, on_event=seen.append)
    opened = open_adapter(tmp_path / "out")
    for head in ("bert.pooler", "classifier"):
        assert any(path.startswith(head) for path in opened.adapter.full), head
    measured = evaluate(opened.base, recipe.data.train, task=opened.task)
    assert measured["loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-5)
    titles = [event.title for event in seen if isinstance(event, Table)]
    assert "The eval rows" in titles


def test_disabled_is_the_base_with_its_new_head(tmp_path):
    recipe = settings(tmp_path, SEQUENCE)
    fresh = prepare(recipe)
    before = logits(fresh.base.model, Opened(fresh.base, fresh.adapter, None, fresh.settings))
    run_recipe(recipe)
    opened = open_adapter(tmp_path / "out")
    assert not torch.equal(logits(opened.base.model, opened), before)
    with opened.adapter.disabled():
        assert torch.equal(logits(opened.base.model, opened), before)


def test_over_4_bits_the_head_is_trained_and_comes_back(tmp_path):
    recipe = settings(tmp_path, SEQUENCE)
    base = recipe.base.model_copy(update={"quantize": "nf4"})
    result = run_recipe(recipe.model_copy(update={"base": base}))
    opened = open_adapter(tmp_path / "out")
    assert opened.base.audit.quantized_as == "nf4"
    measured = evaluate(opened.base, recipe.data.train, task=opened.task)
    assert measured["loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-5)


@pytest.mark.smoke
def test_predictions_name_labels_with_their_probability(classifier):
    opened = open_adapter(classifier)
    predictions = predict(opened, [text for text, _ in TEXTS])
    assert [next(iter(scores)) for scores in predictions] == [label for _, label in TEXTS]
    for scores in predictions:
        assert sum(scores.values()) == pytest.approx(1.0)
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
    with pytest.raises(AdapterError, match="does not complete prompts"):
        opened.style  # noqa: B018 - the property raises


@pytest.mark.smoke
def test_labels_can_be_given_for_a_folder(without_notes):
    assert open_adapter(without_notes).task.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    task = SequenceClassificationConfig(labels=LABELS, problem="single_label")
    opened = open_adapter(without_notes, task=task)
    assert next(iter(predict(opened, [TEXTS[0][0]])[0])) == TEXTS[0][1]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("task_type", "message"),
    [
        ("QUESTION_ANS", "a task that peftkit does not support"),
        ("SOMETHING_ELSE", "SOMETHING_ELSE"),
    ],
)
def test_an_unknown_task_of_peft_is_named(task_type, message, without_notes):
    file = without_notes / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "task_type": task_type}))
    with pytest.raises(AdapterError, match=message):
        open_adapter(without_notes)


@pytest.mark.smoke
def test_settings_that_a_task_does_not_use_are_refused(tmp_path):
    recipe = settings(tmp_path, SEQUENCE).model_dump()
    for name, value in {"packing": False, "format": "text", "chat_template": "chatml"}.items():
        with pytest.raises(ConfigError, match=rf"data\.{name} is not used by the task .*") as error:
            Recipe(**{**recipe, "data": {**recipe["data"], name: value}})
        assert "causal_lm" in str(error.value)


@pytest.mark.smoke
def test_a_task_is_a_word_or_a_section(tmp_path):
    recipe = settings(tmp_path, SEQUENCE)
    section = {"type": SEQUENCE, "text": "body"}
    assert recipe.task == SequenceClassificationConfig()
    assert Recipe(**{**recipe.model_dump(), "task": section}).task.text == "body"
    for wrong, words in {
        "classification": "should be one of .causal_lm., ",
        3: "should be a section",
    }.items():
        with pytest.raises(ConfigError, match=words):
            Recipe(**{**recipe.model_dump(), "task": wrong})


@pytest.mark.smoke
def test_schema_takes_both_for_editors():
    field = json_schema(Recipe)["properties"]["task"]
    kinds = [option.get("type") or option.get("discriminator") for option in field["anyOf"]]
    assert "string" in kinds
    assert any(kind and "sequence_classification" in str(kind) for kind in kinds)


@pytest.mark.parametrize(("task", "family"), [p for p in PAIRS if p[1] in ("bert", "llama")])
def test_merged_model_is_an_ordinary_classifier(task, family, tmp_path):
    run_recipe(settings(tmp_path, task, family))
    opened = open_adapter(tmp_path / "out")
    merged = merge(tmp_path / "out", tmp_path / "merged")
    assert merged.agreement is not None
    assert merged.effect.max_difference > 100 * merged.agreement.max_difference
    plain = CLASSES[task].from_pretrained(tmp_path / "merged").eval()
    assert plain.config.id2label == dict(enumerate(opened.task.labels))
    torch.testing.assert_close(
        logits(plain, opened), logits(opened.base.model, opened), atol=TOLERANCE, rtol=TOLERANCE
    )
