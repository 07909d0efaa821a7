"""The metrics are those of scikit-learn, scipy and seqeval."""

import math
from types import ModuleType

import pytest
import torch

from peftkit.tasks.metrics import (
    class_metrics,
    class_report,
    entities,
    entity_metrics,
    multi_label_metrics,
    number_metrics,
    ranking_metrics,
    tag_metrics,
)


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    from sklearn import metrics  # in the worker that runs these tests, not in each

    return metrics


@pytest.mark.parametrize(("num_rows", "num_labels"), [(1, 2), (41, 5)])
def test_metrics_of_classes_are_scikit_learns(num_rows, num_labels, reference):
    generator = torch.Generator().manual_seed(num_rows)
    predicted = torch.randint(num_labels, (num_rows,), generator=generator)
    true = torch.randint(num_labels - 1, (num_rows,), generator=generator)  # one is never true
    found = class_metrics(predicted, true)
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(true, predicted))
    for kind in ("macro", "weighted"):
        expected = reference.f1_score(true, predicted, average=kind, zero_division=0)
        assert found[f"f1_{kind}"] == pytest.approx(expected), kind


def test_the_report_of_classes_is_scikit_learns(reference):
    generator = torch.Generator().manual_seed(0)
    predicted = torch.randint(4, (41,), generator=generator)
    true = torch.randint(3, (41,), generator=generator)  # one is never true, one is nowhere
    report = class_report(predicted, true, "abcde")
    assert report.confusion == reference.confusion_matrix(true, predicted, labels=range(5)).tolist()
    expected = reference.precision_recall_fscore_support(
        true, predicted, labels=range(5), zero_division=0
    )
    for name, values in zip(("precision", "recall", "f1", "rows"), expected, strict=True):
        assert [of[name] for of in report.labels.values()] == pytest.approx(list(values)), name


@pytest.mark.parametrize("num_rows", [1, 41])
def test_metrics_of_several_labels_are_scikit_learns(num_rows, reference):
    generator = torch.Generator().manual_seed(num_rows)
    predicted = torch.rand(num_rows, 5, generator=generator) > 0.6
    true = torch.rand(num_rows, 5, generator=generator) > 0.6
    true[:, 4] = predicted[:, 4] = False  # a label that is nowhere
    found = multi_label_metrics(predicted, true)
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(true, predicted))
    for kind in ("micro", "macro"):
        expected = reference.f1_score(true, predicted, average=kind, zero_division=0)
        assert found[f"f1_{kind}"] == pytest.approx(expected), kind


def test_metrics_of_numbers_are_scikit_learns_and_scipys(reference):
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(41, generator=generator)
    predicted = 3 * true + torch.randn(41, generator=generator) + 100
    from scipy.stats import pearsonr

    found = number_metrics(predicted, true)
    assert found["mse"] == pytest.approx(reference.mean_squared_error(true, predicted))
    assert found["pearson"] == pytest.approx(pearsonr(true, predicted).statistic)


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O O", set()),
        ("B-PER I-PER O B-LOC", {("PER", 0, 2), ("LOC", 3, 4)}),
        ("B-PER B-PER", {("PER", 0, 1), ("PER", 1, 2)}),
        ("O I-PER I-PER O", {("PER", 1, 3)}),  # inside without a beginning
        ("B-PER I-LOC I-LOC", {("PER", 0, 1), ("LOC", 1, 3)}),  # another kind begins anew
        ("I-A-B I-A-B", {("A-B", 0, 2)}),  # the kind is all after the first dash
        ("B-PER I-PER", {("PER", 0, 2)}),  # up to the end
    ],
)
def test_entities_are_read_as_conlls_evaluation_reads_them(tags, found):
    assert entities(tags.split()) == found


def test_entities_are_right_only_with_place_and_kind():
    true = [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "O"]]
    guess = [["B-PER", "I-PER", "O", "B-PER"], ["B-LOC", "I-LOC"]]
    # one of three is right: the second has the wrong kind, the third is too long
    found = entity_metrics(guess, true)
    assert found == {
        "entity_precision": pytest.approx(1 / 3),
        "entity_recall": pytest.approx(1 / 3),
        "entity_f1": pytest.approx(1 / 3),
    }
    assert entity_metrics([["O", "O"]], [["O", "O"]])["entity_f1"] == 0.0
    assert entity_metrics([["O"]], [["B-X"]])["entity_recall"] == 0.0


def test_plain_tags_count_word_by_word_without_o(reference):
    true, guess = [["NOUN", "O", "VERB"], ["O"]], [["NOUN", "VERB", "O"], ["O"]]
    flat = reference.f1_score(
        ["NOUN", "O", "VERB", "O"],
        ["NOUN", "VERB", "O", "O"],
        labels=["NOUN", "VERB"],
        average="micro",
    )
    assert tag_metrics(guess, true) == {"f1_micro": pytest.approx(flat)}
    assert tag_metrics([["O"]], [["O"]]) == {"f1_micro": 0.0}


@pytest.mark.parametrize("num_texts", [2, 25])
def test_ndcg_at_10_is_scikit_learns(num_texts, reference):
    generator = torch.Generator().manual_seed(num_texts)
    scores, relevances = torch.rand(2, 7, num_texts, generator=generator).double()
    found = ranking_metrics(
        [
            list(zip(*pair, strict=True))
            for pair in zip(scores.tolist(), relevances.tolist(), strict=True)
        ]
    )
    expected = reference.ndcg_score(relevances, scores, k=10)
    assert found["ndcg@10"] == pytest.approx(expected)


def test_of_equal_scores_the_wrong_text_comes_first_and_queries_without_a_right_one_do_not_count():
    third = [(0.1, 1.0), (0.9, 0.0), (0.5, 0.0)]
    tied = [(2.0, 1.0), (2.0, 0.0)]
    eleventh = [(-1.0, 1.0), *[(0.0, 0.0)] * 10]
    found = ranking_metrics([third, tied, eleventh, [(1.0, 0.0), (2.0, 0.0)]])
    assert found["mrr@10"] == pytest.approx((1 / 3 + 1 / 2 + 0) / 3)
    assert found["ndcg@10"] == pytest.approx((1 / math.log2(4) + 1 / math.log2(3) + 0) / 3)
    assert ranking_metrics([[(0.0, 0.0)]]) == {"ndcg@10": 0.0, "mrr@10": 0.0}
