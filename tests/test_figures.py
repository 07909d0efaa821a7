"""Numbers as people read them."""

import pytest

from peftkit.figures import metric_name, rough_duration


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
    names = ("peak_bytes", "tokens_per_second", "eval_loss", "num_tokens")
    assert [*map(metric_name, names)] == ["peak memory", "tokens/s", "eval loss", "tokens"]
