"""Metrics of labels, numbers, entities, rankings and texts; definitions match scikit-learn, scipy,
seqeval and rouge-score.

Shapes: N rows, L labels.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from peftkit.events import ClassReport, Listener, Notice

_WORD = re.compile(r"[^\W_]+")
MAX_CONFUSED = 100
"""Labels above which a confusion matrix is left out."""
CUT_OFF = 10
"""Rank up to which nDCG and MRR count texts."""


def class_metrics(predicted: Tensor, true: Tensor) -> dict[str, float]:
    """Return accuracy, and the mean F1 over labels: unweighted (macro) and weighted by support.

    Labels that are neither predicted nor true are ignored. 0 / 0 counts as 0.

    Args:
        predicted, true: Label indices (N,).
    """
    num_labels = 1 + int(torch.cat([predicted, true]).max())
    hits = torch.bincount(true[predicted == true], minlength=num_labels).double()
    support = torch.bincount(true, minlength=num_labels).double()
    num_predicted = torch.bincount(predicted, minlength=num_labels).double()
    is_used = support + num_predicted > 0
    scores = _f1(hits, support + num_predicted)
    return {
        "accuracy": float((predicted == true).double().mean()),
        "f1_macro": float(scores[is_used].mean()),
        "f1_weighted": float((scores * support).sum() / support.sum()),
    }


def class_report(predicted: Tensor, true: Tensor, labels: Sequence[str]) -> ClassReport:
    """Return precision, recall and F1 of each label, and the confusion matrix.

    A division by zero counts as 0. Above MAX_CONFUSED labels there is no confusion matrix.

    Args:
        predicted, true: Numbers of labels (N,).
    """
    size = len(labels)
    hits = torch.bincount(true[predicted == true], minlength=size).double()
    support, num_predicted = (torch.bincount(t, minlength=size) for t in (true, predicted))
    precision, recall = hits / num_predicted.clamp(min=1), hits / support.clamp(min=1)
    columns = (precision, recall, _f1(hits, support + num_predicted))
    by_label, rows = {}, []
    for label, num_rows, *shares in zip(labels, support.tolist(), *columns, strict=True):
        names = zip(("precision", "recall", "f1"), map(float, shares), strict=True)
        by_label[label] = {**dict(names), "rows": num_rows}
        rows.append((label, *(f"{float(share):.3f}" for share in shares), f"{num_rows:,}"))
    confusion: list[list[int]] | None = None
    if size <= MAX_CONFUSED:
        pairs = torch.bincount(true * size + predicted, minlength=size**2)
        confusion = pairs.view(size, size).tolist()
    heads = ("label", "precision", "recall", "F1", "rows")
    title = "The eval rows by label"
    return ClassReport(title, heads, tuple(rows), labels=by_label, confusion=confusion)


def mean_f1(hits: Tensor, true: Tensor, predicted: Tensor) -> float:
    """Return the unweighted mean F1 of the labels that are predicted or true.

    Args:
        hits, true, predicted: Counts of each label (L,), in any unit.
    """
    both = true + predicted
    return float((2 * hits[both > 0] / both[both > 0]).mean())


def multi_label_metrics(predicted: Tensor, true: Tensor) -> dict[str, float]:
    """Return subset accuracy, micro F1, and macro F1 over labels.

    Args:
        predicted, true: Booleans (N, L): whether a row has a label.
    """
    hits = (predicted & true).double().sum(0)
    both = predicted.double().sum(0) + true.double().sum(0)
    return {
        "accuracy": float((predicted == true).all(1).double().mean()),
        "f1_micro": float(_f1(hits.sum(), both.sum())),
        "f1_macro": float(_f1(hits, both).mean()),
    }


def number_metrics(predicted: Tensor, true: Tensor) -> dict[str, float]:
    """Return the mean squared error, and Pearson's correlation (0 if a side is constant).

    Args:
        predicted, true: Numbers (N,).
    """
    x, y = predicted.double(), true.double()
    dx, dy = x - x.mean(), y - y.mean()
    spread = float((dx.square().sum() * dy.square().sum()).sqrt())
    return {
        "mse": float((x - y).square().mean()),
        "pearson": float((dx * dy).sum()) / spread if spread > 0 else 0.0,
    }


def entity_metrics(
    predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return precision, recall and F1 of entities; span and kind must match.

    Args:
        predicted, true: The tags of each text's words: O, B-kind, I-kind.
    """
    ours = {(n, *entity) for n, tags in enumerate(predicted) for entity in entities(tags)}
    theirs = {(n, *entity) for n, tags in enumerate(true) for entity in entities(tags)}
    right = len(ours & theirs)
    return {
        "entity_precision": right / len(ours) if ours else 0.0,
        "entity_recall": right / len(theirs) if theirs else 0.0,
        "entity_f1": 2 * right / (len(ours) + len(theirs)) if ours or theirs else 0.0,
    }


def tag_metrics(
    predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Return micro F1 over words, for tags without B- and I-; O counts as no tag."""
    pairs = [
        pair
        for ours, theirs in zip(predicted, true, strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]
    right = sum(ours == theirs != "O" for ours, theirs in pairs)
    both = sum((ours != "O") + (theirs != "O") for ours, theirs in pairs)
    return {"f1_micro": 2 * right / both if both else 0.0}


def are_spans(tags: Iterable[str]) -> bool:
    """Return whether all tags other than O begin with B- or I-."""
    kinds = set(tags) - {"O"}
    return bool(kinds) and all(tag[:2] in ("B-", "I-") for tag in kinds)


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return (kind, start, end) of the entities of a text; the end is exclusive.

    An I- after O or after a tag of another kind begins an entity, as in the CoNLL-2000 evaluation.
    """
    spans = set()
    kind, start = "", 0
    for place, tag in enumerate([*tags, "O"]):
        mark, _, this = tag.partition("-")
        continues = mark == "I" and this == kind
        if kind and not continues:
            spans.add((kind, start, place))
            kind = ""
        if mark != "O" and not continues:
            kind, start = this, place
    return spans


def _f1(hits: Tensor, both: Tensor) -> Tensor:
    """Return 2 hits / (predicted + true)."""
    return 2 * hits / both.clamp(min=1)


def ranking_metrics(rankings: Iterable[Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Return the mean nDCG and MRR over queries with a relevant text; 0 if there are none.

    nDCG is the discounted gain divided by the ideal order's (Jarvelin and Kekalainen, 2002). MRR is
    1 over the rank of the first text with relevance above 0.5, or 0 beyond CUT_OFF. Among texts
    with equal scores, the less relevant ranks first.

    Args:
        rankings: For each query, the score and the relevance (0 to 1) of each text.
    """
    ordered = ([r for _, r in sorted(of, key=lambda pair: (-pair[0], pair[1]))] for of in rankings)
    ranked = [relevances for relevances in ordered if max(relevances) > 0]
    shares = [_gain(order) / _gain(sorted(order, reverse=True)) for order in ranked]
    places = [_reciprocal_rank(order) for order in ranked]
    count = max(len(ranked), 1)
    return {f"ndcg@{CUT_OFF}": sum(shares) / count, f"mrr@{CUT_OFF}": sum(places) / count}


def _gain(relevances: Sequence[float]) -> float:
    return sum(value / math.log2(2 + place) for place, value in enumerate(relevances[:CUT_OFF]))


def _reciprocal_rank(relevances: Sequence[float]) -> float:
    places = (place for place, value in enumerate(relevances[:CUT_OFF], start=1) if value > 0.5)
    return 1 / next(places, math.inf)


def exact_match(pairs: Sequence[tuple[str, str]]) -> float:
    """Return the share of pairs with equal texts, ignoring surrounding whitespace."""
    return sum(text.strip() == reference.strip() for text, reference in pairs) / len(pairs)


def rouge_l(text: str, reference: str) -> float:
    """Return the ROUGE-L F-measure of a text, from 0 to 1; 0 if either side has no words.

    Precision and recall are the length of the longest common subsequence divided by the number of
    words of the text and of the reference (Lin, 2004, W04-1013). Words are lower-case runs of
    letters and digits, without stemming.
    """
    ours, theirs = words(text), words(reference)
    common = longest_common_subsequence(ours, theirs)
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Return its length, with one addition of long integers per word (Hyyroe, 2004).

    A bit of `row` is 0 where the dynamic programming table increases by one.
    """
    places: dict[str, int] = {}
    for number, word in enumerate(first):
        places[word] = places.get(word, 0) | 1 << number
    everywhere = (1 << len(first)) - 1
    row = everywhere
    for word in second:
        matched = row & places.get(word, 0)
        row = ((row + matched) | (row - matched)) & everywhere
    return len(first) - row.bit_count()


def rouge_n(text: str, reference: str, size: int) -> float:
    """Return ROUGE-N: the F-measure of common n-grams of `size` words, from 0 to 1."""
    ours, theirs = _runs(words(text), size), _runs(words(reference), size)
    both = ours.total() + theirs.total()
    return 2 * (ours & theirs).total() / both if both else 0.0


def gleu(text: str, reference: str) -> float:
    """Return the GLEU of a sentence (Wu et al., 2016, arXiv:1609.08144), from 0 to 1.

    The common n-grams of 1 to 4 words divided by the larger number of n-grams of the two texts.
    """
    sides = [sum((_runs(words(t), n) for n in ORDERS), Counter[str]()) for t in (text, reference)]
    most = max(side.total() for side in sides)
    return (sides[0] & sides[1]).total() / most if most else 0.0


def bleu(text: str, reference: str) -> float:
    """Return the BLEU of a sentence (Papineni et al., 2002), from 0 to 1.

    The geometric mean of the n-gram precisions for 1 to 4 words, times the brevity penalty. From 2
    words on, the precisions use add-one smoothing (Lin and Och, 2004, C04-1072), since most
    sentences have no 4-gram in common.
    """
    ours, theirs = words(text), words(reference)
    shares = []
    for n in ORDERS:
        runs, added = _runs(ours, n), int(n > 1)
        common = (runs & _runs(theirs, n)).total()
        shares.append((common + added) / max(runs.total() + added, 1))
    if not ours or not all(shares):
        return 0.0
    brevity = min(1.0, math.exp(1 - len(theirs) / len(ours)))
    return brevity * math.exp(sum(map(math.log, shares)) / len(shares))


ORDERS = range(1, 5)


def words(text: str) -> list[str]:
    """Return the words of a text: runs of letters and digits, in lower case."""
    return _WORD.findall(text.lower())


def _runs(tokens: Sequence[str], size: int) -> Counter[str]:
    """Return the counts of n-grams of `size` words."""
    return Counter(" ".join(tokens[n : n + size]) for n in range(len(tokens) - size + 1))


def indel_similarity(text: str, reference: str) -> float:
    """Return 1 - d / (m + n), with the insertion-deletion distance d of texts of lengths m and n.

    The result is 1 for two empty texts.
    """
    both = len(text) + len(reference)
    return 2 * longest_common_subsequence(text, reference) / both if both else 1.0


# Error rates of words and of characters.


NUM_SHOWN = 3
"""Number of rows whose reference and transcript are reported."""


def transcript_metrics(
    rows: Sequence[Any],
    transcripts: Sequence[str],
    normalizer: Callable[[str], str],
    on_event: Listener,
) -> dict[str, float]:
    """Return the error rates of transcripts, raw and normalised, and report the first rows.

    Args:
        rows: Rows with `text` and `source`.
    """
    for row, text in list(zip(rows, transcripts, strict=True))[:NUM_SHOWN]:
        on_event(Notice(f"{row.source}: reference: {row.text} | transcript: {text}"))
    on_event(Notice(f"Normalised by transformers' {type(normalizer).__name__}."))
    references = [row.text for row in rows]
    normal = [[*map(normalizer, texts)] for texts in (references, transcripts)]
    return error_rates(references, transcripts) | error_rates(normal[0], normal[1], "_normalized")


def error_rates(
    references: Sequence[str], transcripts: Sequence[str], name: str = ""
) -> dict[str, float]:
    """Return the word and character error rates over all texts; both can exceed 1.

    Args:
        references: Correct transcripts; rows with a blank reference are ignored.
        name: Suffix of the metric names.
    """
    import jiwer

    pairs = [(a, b) for a, b in zip(references, transcripts, strict=True) if a.strip()]
    if not pairs:
        return {}
    true, predicted = [a for a, _ in pairs], [b for _, b in pairs]
    rates = {"wer": jiwer.wer(true, predicted), "cer": jiwer.cer(true, predicted)}
    return {rate + name: float(value) for rate, value in rates.items()}


def normalizer_of(tokenizer: Any, language: str | None) -> Callable[[str], str]:
    """Return Whisper's text normaliser for a language.

    English uses the English normaliser with the tokenizer's spellings; other languages use the
    basic one. Both drop combining marks, which distorts error rates of scripts that need them.
    """
    from transformers.models.whisper import english_normalizer as normalizers

    spellings = getattr(tokenizer, "english_spelling_normalizer", None)
    if spellings and str(language).lower() in ("english", "en"):
        return normalizers.EnglishTextNormalizer(spellings)
    return normalizers.BasicTextNormalizer()
