"""Metrics of labels, numbers, entities, rankings and texts, as scikit-learn, scipy, seqeval and
rouge-score define them.

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
"""Texts of a ranking that nDCG and MRR count."""


def class_metrics(predicted: Tensor, true: Tensor) -> dict[str, float]:
    """Return accuracy, and the mean F1 over labels: unweighted (macro), and weighted by support.

    Labels that are neither predicted nor true are left out. A division by zero counts as 0.

    Args:
        predicted, true: Numbers of labels (N,).
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
    confusion = None
    if size <= MAX_CONFUSED:
        confusion = torch.bincount(true * size + predicted, minlength=size**2)
        confusion = confusion.view(size, size).tolist()
    names = ("label", "precision", "recall", "F1", "rows")
    title = "The eval rows by label"
    return ClassReport(title, names, tuple(rows), labels=by_label, confusion=confusion)


def mean_f1(hits: Tensor, true: Tensor, predicted: Tensor) -> float:
    """Return the unweighted mean F1 of the labels that are predicted or true.

    Args:
        hits, true, predicted: Counts of each label (L,), in any unit.
    """
    both = true + predicted
    return float((2 * hits[both > 0] / both[both > 0]).mean())


def multi_label_metrics(predicted: Tensor, true: Tensor) -> dict[str, float]:
    """Return the share of rows with all labels right, F1 over all labels, and its mean over labels.

    Args:
        predicted, true: Whether a row has a label (N, L).
    """
    hits = (predicted & true).double().sum(0)
    both = predicted.double().sum(0) + true.double().sum(0)
    return {
        "accuracy": float((predicted == true).all(1).double().mean()),
        "f1_micro": float(_f1(hits.sum(), both.sum())),
        "f1_macro": float(_f1(hits, both).mean()),
    }


def number_metrics(predicted: Tensor, true: Tensor) -> dict[str, float]:
    """Return the mean squared error, and Pearson's correlation (0 where one side is constant).

    Args:
        predicted, true: (N,).
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
    """Return precision, recall and F1 of entities; words and kind have to match.

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
    """Return F1 over all words, where tags do not begin with B- and I-; O is no tag."""
    pairs = [
        pair
        for ours, theirs in zip(predicted, true, strict=True)
        for pair in zip(ours, theirs, strict=True)
    ]
    right = sum(ours == theirs != "O" for ours, theirs in pairs)
    both = sum((ours != "O") + (theirs != "O") for ours, theirs in pairs)
    return {"f1_micro": 2 * right / both if both else 0.0}


def are_spans(tags: Iterable[str]) -> bool:
    """Tell whether tags mark the beginning and the inside of entities."""
    kinds = set(tags) - {"O"}
    return bool(kinds) and all(tag[:2] in ("B-", "I-") for tag in kinds)


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return (kind, first word, word after the last) of the entities of a text.

    An I- of another kind than the tag before it, or after O, begins an entity all the same, as in
    the CoNLL-2000 evaluation.
    """
    spans = set()
    kind, start = "", 0
    for place, tag in enumerate([*tags, "O"]):
        mark, _, this = tag.partition("-")
        goes_on = mark == "I" and this == kind
        if kind and not goes_on:
            spans.add((kind, start, place))
            kind = ""
        if mark != "O" and not goes_on:
            kind, start = this, place
    return spans


def _f1(hits: Tensor, both: Tensor) -> Tensor:
    """Return 2 hits / (predicted + true)."""
    return 2 * hits / both.clamp(min=1)


def ranking_metrics(rankings: Iterable[Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Return means over queries; those without a relevant text are left out, 0 if all are.

    nDCG: the discounted gain as a share of the best order's (Jarvelin and Kekalainen, 2002). MRR: 1
    over the place of the first text of more than half relevance, 0 beyond CUT_OFF. Of texts with
    equal scores the less relevant comes first.

    Args:
        rankings: Of each query the score and the relevance, from 0 to 1, of each of its texts.
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
    """Return the share of pairs with equal texts, apart from surrounding white space."""
    return sum(text.strip() == reference.strip() for text, reference in pairs) / len(pairs)


def rouge_l(text: str, reference: str) -> float:
    """Return the ROUGE-L F-measure of a text, from 0 to 1; 0 where either has no words.

    P and R are the longest common subsequence's share of the text's and of the reference's words
    (Lin, 2004, W04-1013). Words are runs of letters and digits, in lower case and not stemmed.
    """
    ours, theirs = words(text), words(reference)
    common = longest_common_subsequence(ours, theirs)
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Return its length, by one addition of long integers for each word (Hyyroe, 2004).

    A bit of `row` is 0 where the table of the textbook's method goes up by one.
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
    """Return the F-measure of the runs of `size` words that both texts have (ROUGE-N), 0 to 1."""
    ours, theirs = _runs(words(text), size), _runs(words(reference), size)
    both = ours.total() + theirs.total()
    return 2 * (ours & theirs).total() / both if both else 0.0


def gleu(text: str, reference: str) -> float:
    """Return the GLEU of a sentence (Wu et al., 2016, arXiv:1609.08144): from 0 to 1.

    Common runs of 1 to 4 words, as a share of the text's or of the reference's, whichever are more.
    """
    sides = [sum((_runs(words(t), n) for n in ORDERS), Counter[str]()) for t in (text, reference)]
    most = max(side.total() for side in sides)
    return (sides[0] & sides[1]).total() / most if most else 0.0


def bleu(text: str, reference: str) -> float:
    """Return the BLEU of a sentence (Papineni et al., 2002): from 0 to 1.

    The geometric mean over runs of 1 to 4 words of the share that the reference has, too, times the
    brevity penalty. Shares of runs of 2 words and more have one added above and below (Lin and Och,
    2004, C04-1072), since most sentences have no run of 4 in common.
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
    """Return the runs of letters and digits of a text, in lower case."""
    return _WORD.findall(text.lower())


def _runs(tokens: Sequence[str], size: int) -> Counter[str]:
    """Return the runs of `size` words, each with how often it is there."""
    return Counter(" ".join(tokens[n : n + size]) for n in range(len(tokens) - size + 1))


def indel_similarity(text: str, reference: str) -> float:
    """Return twice the longest common subsequence of characters, as a share of both texts' length.

    1 - d / (m + n) for the distance d by insertions and deletions; 1 for two empty texts.
    """
    both = len(text) + len(reference)
    return 2 * longest_common_subsequence(text, reference) / both if both else 1.0


# Error rates of words and of characters.


NUM_SHOWN = 3
"""Rows whose reference and transcript are reported."""


def transcript_metrics(
    rows: Sequence[Any],
    transcripts: Sequence[str],
    normalizer: Callable[[str], str],
    on_event: Listener,
) -> dict[str, float]:
    """Return the error rates of transcripts, raw and normalised; reports the first rows.

    Args:
        rows: With a text and a source each.
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
    """Return the error rates of words and characters over all texts together; both can exceed 1.

    Args:
        references: Right transcripts; rows whose reference is blank are left out.
        name: Suffix of the metrics' names.
    """
    import jiwer

    pairs = [(a, b) for a, b in zip(references, transcripts, strict=True) if a.strip()]
    if not pairs:
        return {}
    true, predicted = [a for a, _ in pairs], [b for _, b in pairs]
    rates = {"wer": jiwer.wer(true, predicted), "cer": jiwer.cer(true, predicted)}
    return {rate + name: float(value) for rate, value in rates.items()}


def normalizer_of(tokenizer: Any, language: str | None) -> Callable[[str], str]:
    """Return the normaliser of Whisper's authors for a language.

    The English one for English, with the tokenizer's list of spellings; else the basic one. Both
    drop combining marks, which distorts the rates of scripts that need them.
    """
    from transformers.models.whisper import english_normalizer as normalizers

    spellings = getattr(tokenizer, "english_spelling_normalizer", None)
    if spellings and str(language).lower() in ("english", "en"):
        return normalizers.EnglishTextNormalizer(spellings)
    return normalizers.BasicTextNormalizer()
