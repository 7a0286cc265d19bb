"""Accuracy over epsilon, and histograms of the smallest perturbations."""

import numpy as np
import pytest

from tests.figures.reading import cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.attack.curves import Distances, Panel, distance_histograms, robust_curves

EPSILONS = (0.0, 1.0, 2.0, 4.0, 8.0)


def ends(start: float = 0.9, count: int = 5) -> np.ndarray:
    value = np.linspace(start, 0.0, count)
    return np.stack([value, (value - 0.05).clip(0), value + 0.05])


@pytest.mark.parametrize("count", [1, 5])
def test_a_panel_an_attack_and_a_curve_a_model(count):
    panels = [
        Panel(f"attack {i}", "epsilon (1/255)", EPSILONS, {"vit": ends(), "cnn": ends(0.7)}) for i in range(count)
    ]
    figure = robust_curves(panels=panels, title="Accuracy under attack", chance=0.1)
    shown = [axes for axes in figure.axes if axes.lines]
    assert len(figure.axes) == {1: 1, 5: 6}[count]  # the legend fills the panel that is left
    assert len(shown) == count
    for axes in shown:
        assert axes.lines[0].get_xdata().tolist() == list(EPSILONS)
        assert axes.lines[0].get_ydata()[0] == pytest.approx(90)
        assert len(axes.collections) == 2
        assert axes.lines[0].get_color() != axes.lines[1].get_color()
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert {"vit", "cnn", "attack 0", "accuracy (%)"} <= set(texts(figure))


def test_curves_must_fit_their_epsilons():
    with pytest.raises(InputError, match="accuracies of vit"):
        robust_curves(panels=[Panel("a", "e", (0.0, 1.0), {"vit": ends()})], title="t")
    with pytest.raises(InputError, match="at least one attack"):
        robust_curves(panels=[], title="t")


def test_histograms_count_all_images_that_were_right():
    found = [Distances("vit", [0.1, 0.2, 0.2, 0.4], 4, None), Distances("cnn", [0.1], 0, 0.1)]
    figure = distance_histograms(panels={"C&W": found}, axis={"C&W": "L2"}, title="distances")
    heights = figure.axes[0].patches[0].get_data().values
    assert heights.sum() == pytest.approx(50)  # half of those that were right survived
    assert not cut_off(figure)
    with pytest.raises(InputError, match="at least one image"):
        distance_histograms(panels={"C&W": [Distances("vit", [], 4, None)]}, axis={}, title="t")
