"""Heads of classes: new ones are the same each time, others keep their labels or say no."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peftkit.adapter import attach
from peftkit.base.heads import ClassHead
from peftkit.base.load import Base, load_base
from peftkit.base.purpose import Purpose
from peftkit.errors import BaseError
from peftkit.methods.lora import LoRA
from peftkit.quant.layers import QuantizedLinear
from tests.helpers.classifiers import LABELS, save_base
from tests.helpers.families import ARCHITECTURES

SEQUENCE = "AutoModelForSequenceClassification"


def loaded(folder: Path, labels: tuple[str, ...] = LABELS, **how: Any) -> Base:
    head = ClassHead(labels, how.pop("problem", None), how.pop("fresh", False))
    auto_class = how.pop("auto_class", SEQUENCE)
    return load_base(str(folder), purpose=Purpose("a test", auto_class, head=head), **how)


def classifier(labels: tuple[str, ...] | None, count: int = 3) -> Any:
    """Return a tiny BERT that has been trained to classify."""
    model = ARCHITECTURES["bert_cls"]()
    config = model.config
    config.num_labels = count
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: n for n, label in enumerate(labels)}
    return type(model)(config)


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("bert", ("bert.pooler", "classifier")),  # a model of masked words has no pooler
        pytest.param("distilbert", ("classifier", "pre_classifier"), marks=pytest.mark.slow),
        pytest.param("deberta_v2", ("classifier", "pooler"), marks=pytest.mark.slow),
        ("modernbert", ("classifier", "head")),
        ("llama", ("score",)),
        ("t5", ("classification_head",)),
    ],
)
def test_head_is_found_made_anew_and_left_in_16_bits(family, head, tmp_path):
    folder = save_base(tmp_path, family)
    base = loaded(folder, quantize="nf4", dtype="fp32")
    assert base.head == head
    assert base.model.config.id2label == dict(enumerate(LABELS))
    for path in head:
        for module in base.model.get_submodule(path).modules():
            assert not isinstance(module, QuantizedLinear), path
    assert base.audit.quantized_as == "nf4"
    adapter = attach(base.model, LoRA(rank=2, train_fully=base.head))
    assert not any(path.startswith(head) for path in adapter.method_modules), (
        "all-linear takes the head too"
    )
    assert base.model.config.pad_token_id is not None


def test_a_new_head_does_not_depend_on_what_was_drawn_before(tmp_path):
    folder = save_base(tmp_path)
    torch.manual_seed(1)
    first = loaded(folder)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    torch.rand(7)
    second, narrow = loaded(folder), loaded(folder, dtype="bf16")
    for name, tensor in first.model.state_dict().items():
        other = narrow.model.state_dict()[name]
        assert torch.equal(tensor, second.model.state_dict()[name])
        assert other.dtype == torch.bfloat16
        assert torch.equal(tensor.to(torch.bfloat16), other)
    assert first.fingerprint == second.fingerprint == narrow.fingerprint
    torch.set_rng_state(state)
    weight = first.model.classifier.weight
    assert float(weight.std()) == pytest.approx(0.2, rel=0.3)  # the config's initializer_range
    assert not first.model.classifier.bias.any()


def test_a_trained_head_keeps_its_weights_and_the_order_of_its_labels(tmp_path):
    own = ("question", "animal", "food")
    folder = save_base(tmp_path, model=classifier(own))
    trained = load_file(folder / "model.safetensors")["classifier.weight"]
    base = loaded(folder)
    assert base.model.config.id2label == dict(enumerate(own))
    assert torch.equal(base.model.classifier.weight, trained.to(base.model.dtype))
    assert base.head == ("classifier",)
    some = loaded(folder, ("animal", "food"))  # data that lack one of the head's labels
    assert some.model.config.id2label == dict(enumerate(own))


def test_labels_that_disagree_with_the_head_are_listed_with_its_own(tmp_path):
    folder = save_base(tmp_path, model=classifier(("positive", "negative", "neutral")))
    with pytest.raises(BaseError) as error:
        loaded(folder)
    assert "The head's: positive, negative, neutral" in str(error.value)
    assert "The task's: animal, food, question" in str(error.value)
    assert "fresh_head: true" in str(error.value)
    base = loaded(folder, fresh=True)
    trained = load_file(folder / "model.safetensors")["classifier.weight"]
    assert base.model.config.id2label == dict(enumerate(LABELS))
    assert not torch.equal(base.model.classifier.weight, trained)
    assert torch.equal(
        base.model.classifier.weight, loaded(folder, fresh=True).model.classifier.weight
    )
