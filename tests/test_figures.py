"""Numbers as people read them."""

import pytest

from peftkit.errors import ConfigError
from peftkit.figures import metric_name, not_better, rough_duration, score_of


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.34, "0.3 s"),
        (41, "40 s"),
        (72, "1 min"),
        (400, "7 min"),
        (1_627, "25 min"),
        (2_787, "50 min"),
        (5_000, "1.5 h"),
        (100_000, "30 h"),
    ],
)
def test_an_estimate_has_about_one_figure(seconds, text):
    assert rough_duration(seconds) == text


def test_metrics_have_names_without_underscores():
    names = ("peak_bytes", "num_targets", "best_eval_loss", "eval_drift_95", "exact_match")
    texts = ["peak memory", "target tokens", "best eval loss", "eval 95 % quantile of drift"]
    assert [*map(metric_name, names)] == [*texts, "exact match"]


def test_the_lowest_score_is_the_best_metric():
    metrics = {"loss": 2.0, "wer_normalized": 0.5, "answer_share": 0.25}
    assert [score_of(metrics, name) for name in metrics] == [2.0, 0.5, -0.25]
    assert not_better("f1_macro", -0.5) == "f1_macro did not rise above 0.5"
    assert not_better("loss", 2.0) == "loss did not fall below 2"
    with pytest.raises(ConfigError, match="there is no metric 'f1'"):
        score_of(metrics, "f1")
