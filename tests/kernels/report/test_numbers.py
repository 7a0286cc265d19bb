"""Numbers in words."""

import pytest

from vitlens.report.numbers import in_ranges, in_thousands, in_time, in_words, percent
from vitlens.uncertainty import Estimate


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Estimate(447 / 480, 0.905, 0.95, 480), "93.1 % (90.5 to 95.0, n = 480)"),
        (Estimate(0.5), "50.0 %"),
        (Estimate(0.0312, n=1200), "3.1 % (n = 1,200)"),
        (Estimate(-1.25, -2.0, -0.01, 9, "points"), "-1.2 points (-2.0 to 0.0, n = 9)"),
        # of an interval all three have the decimals that the largest needs
        (Estimate(0.0366, 8.86e-5, 0.102, 200, "nats"), "0.037 nats (0.000 to 0.102, n = 200)"),
        (Estimate(7.45, 7.3, 7.55, unit="ms"), "7.45 ms (7.30 to 7.55)"),
        (Estimate(1710.4, 1698, 1737, unit="images/s"), "1,710 images/s (1,698 to 1,737)"),
        (Estimate(450.4, 400, 999.4, unit="ms"), "450 ms (400 to 999)"),
        (Estimate(3e-6, 1e-6, 4e-6, unit=""), "3e-06 (1e-06 to 4e-06)"),
        (Estimate(6091, unit="s"), "1 h 41 min"),
        (Estimate(100, unit="s"), "1 min 40 s"),
        (Estimate(99, unit="s"), "99 s"),
        (Estimate(6091, 6000, 6200, unit="s"), "6,091 s (6,000 to 6,200)"),
        (Estimate(12345.6, unit=""), "12,346"),
        (None, "–"),
        (0.12345, "0.123"),
        (-999.6, "-1,000"),
        (12345, "12,345"),
        ("a b", "a b"),
    ],
)
def test_values_in_words(cell, text):
    assert in_words(cell) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.84, "0.8 s"), (42.4, "42 s"), (200.0, "3 min 20 s"), (7500.0, "2 h 5 min"), (3600.0, "1 h 0 min")],
)
def test_time_in_words(seconds, text):
    assert in_time(seconds) == text


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "layer 3"), ([4, 1, 0, 3, 2, 7], "layers 0 to 4 and 7"), ([0, 2, 2, 5], "layers 0, 2 and 5")],
)
def test_layers_in_ranges(numbers, text):
    assert in_ranges(numbers) == text


def test_shares_in_percent_and_n_can_be_said_elsewhere():
    assert in_words(Estimate(0.5, 0.4, 0.6, 10), with_n=False) == "50.0 % (40.0 to 60.0)"
    assert (percent(0.125), percent(0.125, 1), percent(-0.0001)) == ("12 %", "12.5 %", "0 %")


@pytest.mark.parametrize(
    ("count", "said"), [(5, "5"), (1_205_898, "1.21 M"), (1.6e9, "1.6 G"), (999_800, "1 M"), (4e12, "4 T")]
)
def test_counts_have_a_prefix(count, said):
    assert in_thousands(count).strip() == said
    assert in_words(Estimate(count, unit="bytes")) == f"{in_thousands(count)}B"
