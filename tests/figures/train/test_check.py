"""Norms by layer and losses on one batch: every layer drawn, what has no logarithm marked, nothing cut off."""

import numpy as np
import pytest

from tests.figures.reading import cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.style import SERIES
from vitlens.figures.train.check import batch_losses, layer_norms


@pytest.mark.parametrize("count", [1, 12, pytest.param(41, marks=pytest.mark.slow), 110])
def test_every_layer_is_drawn(count):
    names = [f"blocks.{index}.a.long.name.of.a.layer.within" for index in range(count)]
    outputs = [10.0 ** (index % 5 - 2) for index in range(count)]
    gradients = [None, 0.0, float("inf"), *outputs[3:]][:count]
    figure = layer_norms(names=names, outputs=outputs, gradients=gradients)
    left, right = figure.axes
    assert left.lines[0].get_xdata() == pytest.approx(outputs)
    assert list(left.lines[0].get_ydata()) == list(range(count))
    assert list(right.lines[1].get_ydata()) == list(range(min(3, count)))  # the crosses
    low, high = left.get_xlim()
    assert low < min(outputs)
    assert high > max(outputs)
    assert left.get_ylim() == (count - 0.4, -0.6)
    assert not cut_off(figure)
    assert not overlapping(figure)


def test_nothing_measured_is_drawn_as_nothing():
    figure = layer_norms(names=["a", "b"], outputs=[None, None], gradients=[0.0, 0.0])
    assert len(figure.axes[0].lines[0].get_xdata()) == 0
    assert len(figure.axes[0].lines[1].get_xdata()) == 2
    with pytest.raises(InputError, match="expected layers"):
        layer_norms(names=[], outputs=[], gradients=[])
    with pytest.raises(InputError, match="gradients"):
        layer_norms(names=["a"], outputs=[1.0], gradients=[])


def test_one_curve_a_rate_and_two_lines():
    figure = batch_losses(curves={10.0: [2.3, 500.0], 0.01: [2.3, 1.0, 0.1]}, constant=2.0, fitted=0.1)
    [axes] = figure.axes
    recipe, other, constant, fitted = axes.lines
    assert list(other.get_ydata()) == [2.3, 1.0, 0.1]
    assert recipe.get_color() == SERIES[0]
    assert np.allclose(constant.get_ydata(), 2.0)
    assert np.allclose(fitted.get_ydata(), 0.2)
    assert axes.get_ylim() == pytest.approx((0, 1.6 * 2.3))  # what lies far above is cut off
    assert {"10 (recipe)", "0.01"} <= set(texts(figure))
    assert not cut_off(figure)
    with pytest.raises(InputError, match="expected the losses"):
        batch_losses(curves={}, constant=1.0, fitted=0.1)
