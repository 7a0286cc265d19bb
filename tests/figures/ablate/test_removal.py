import numpy as np
import pytest
import torch

from tests.figures.reading import cut_off, texts
from vitlens.errors import InputError
from vitlens.figures.ablate.removal import AccuracyCurve, removal_curves
from vitlens.figures.style import SERIES

LEAST, MOST = "least important first", "most important first"


def curve(power, count=19, clean=0.8, band=True):
    share = np.linspace(0, 1, count)
    accuracy = 0.1 + (clean - 0.1) * (1 - share**power)
    return AccuracyCurve(share, accuracy, accuracy - 0.05, accuracy + 0.05) if band else AccuracyCurve(share, accuracy)


def named(figure, name):
    return next(line for line in figure.axes[0].lines if line.get_label() == name)


@pytest.mark.parametrize("count", [2, 145])
def test_nothing_is_cut_off(count):
    curves = {
        name: curve(power, count) for name, power in zip((LEAST, MOST, "first-order", "greedy", "x" * 40), range(1, 6))
    }
    orders = [curve(power, count, band=False) for power in (1.0, 1.5)]
    figure = removal_curves(curves=curves, title="Accuracy as heads are removed", random=orders, removable=0.0)
    assert not cut_off(figure)
    assert figure.get_figwidth() <= 7.21
    assert {"heads removed (%)", "accuracy (%)", LEAST, MOST, "greedy"} <= set(texts(figure))
    assert figure.axes[0].get_ylim()[0] == 0


def test_curves_have_their_numbers_in_percent():
    share, accuracy = np.array([0, 0.5, 1]), torch.tensor([0.8, 0.6, 0.1])
    figure = removal_curves(curves={LEAST: AccuracyCurve(share, accuracy, accuracy - 0.1, accuracy + 0.1)}, title="x")
    line = named(figure, LEAST)
    np.testing.assert_allclose(line.get_xydata(), [[0, 80], [50, 60], [100, 10]], rtol=1e-6)
    assert line.get_color() == SERIES[0]
    corners = np.concatenate([path.vertices for path in figure.axes[0].collections[0].get_paths()])
    found = corners[corners[:, 0] == 50, 1]
    assert (found.min(), found.max()) == pytest.approx((50, 70))
    assert "95 % intervals" in " ".join(texts(figure))
    without = removal_curves(curves={LEAST: curve(2, band=False)}, title="x")
    assert "95 % intervals" not in " ".join(texts(without))


def test_random_orders_have_a_mean():
    orders = [AccuracyCurve([0, 0.5, 1], [0.8, value, 0.1]) for value in (0.2, 0.4, 0.6)]
    figure = removal_curves(curves={LEAST: curve(2)}, title="x", random=orders)
    mean = named(figure, "mean of 3 random orders")
    np.testing.assert_allclose(mean.get_ydata(), [80, 40, 10])
    thin = [line for line in figure.axes[0].lines if line.get_linewidth() == 0.5]
    assert len(thin) == 3
    assert texts(figure).count("random orders") == 1
    one = removal_curves(curves={LEAST: curve(2)}, title="x", random=orders[:1])
    assert not any("mean of" in text for text in texts(one))


def test_what_can_go_is_marked_on_the_first_curve():
    curves = {LEAST: AccuracyCurve([0, 0.5, 1], [0.8, 0.8, 0.2]), MOST: curve(1)}
    figure = removal_curves(curves=curves, title="x", removable=0.5)
    assert set(named(figure, "clean − 1 point: 79.0 %").get_ydata()) == {79.0}
    ring = next(line for line in figure.axes[0].lines if line.get_marker() == "o" and len(line.get_xdata()) == 1)
    assert ring.get_xydata().tolist() == [[50.0, 80.0]]
    assert "50 % removable" in texts(figure)
    five = removal_curves(curves=curves, title="x", points=5.0)
    assert "clean − 5 points: 75.0 %" in texts(five)
    assert not any("removable" in text for text in texts(five))


@pytest.mark.parametrize("removable", [0.0, 1.0])
def test_always_right_and_nothing_can_go(removable):
    figure = removal_curves(curves={LEAST: AccuracyCurve([0, 1], [1.0, 1.0])}, title="one class", removable=removable)
    assert not cut_off(figure)
    assert f"{100 * removable:.0f} % removable" in texts(figure)
    assert figure.axes[0].get_ylim()[1] > 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curves": {}}, "1 to 6 curves, found 0"),
        ({"curves": dict.fromkeys("abcdefg", curve(1))}, "1 to 6 curves, found 7"),
        ({"curves": {"a": AccuracyCurve([0, 1], [0.8])}}, "2 values of accuracy of 'a'"),
        ({"curves": {"a": AccuracyCurve([0, 1], [80.0, 10.0])}}, "accuracy of 'a' as fractions, found 10 to 80"),
        ({"curves": {"a": AccuracyCurve([0, 50], [0.8, 0.1])}}, "share of 'a' as fractions"),
        ({"curves": {"a": AccuracyCurve([0.1, 1], [0.8, 0.1])}}, "share of 'a' to rise from 0"),
        ({"curves": {"a": AccuracyCurve([0, 0.5, 0.5], [0.8, 0.1, 0.1])}}, "share of 'a' to rise"),
        ({"curves": {"a": AccuracyCurve([0, 1], [0.8, np.nan])}}, "finite numbers in accuracy of 'a'"),
        ({"curves": {"a": AccuracyCurve([0, 1], [0.8, 0.1], low=[0.7, 0.0])}}, "both ends of the interval of 'a'"),
        ({"curves": {"a": curve(1), "b": curve(1, clean=0.9)}}, "'b' to begin at the clean accuracy 80 %, found 90 %"),
        ({"random": [curve(1, clean=0.9)]}, "random order 1 to begin"),
        ({"random": [curve(1, 5), curve(1, 6)]}, "random orders at the same shares"),
        ({"removable": 50.0}, "removable as a fraction, found 50"),
        ({"removable": 0.9}, "at least 79 % where removable says so"),
    ],
)
def test_refused(options, message):
    with pytest.raises(InputError, match=message):
        removal_curves(**{"curves": {LEAST: curve(1)}, "title": "x", **options})
