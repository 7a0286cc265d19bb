import numpy as np
import pytest

from tests.figures.reading import cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.robustness import Bias, DisturbancePanel, robustness_curves, shape_bias_chart


def hardening(title: str, levels: int = 6) -> DisturbancePanel:
    value = np.linspace(0.95, 0.1, levels)
    ends = np.stack([value, value - 0.04, value + 0.04])
    return DisturbancePanel(title, "level", [str(i) for i in range(levels)], {"vit": ends, "cnn": ends[:, ::-1]})


@pytest.mark.parametrize("count", [1, 4])
def test_a_panel_for_each_way(count):
    figure = robustness_curves(disturbances=[hardening(f"way {i}") for i in range(count)], chance=0.1, n=500)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == count
    for axes in shown:
        chance = axes.lines[-1].get_ydata()
        assert list(chance) == pytest.approx([10, 10])
        assert len(axes.collections) == 2
        assert axes.lines[0].get_ydata()[0] == pytest.approx(95)
    assert not cut_off(figure)
    assert not overlapping(figure)
    assert {"vit", "cnn", "way 0"} <= set(texts(figure))


def test_lengths_must_fit():
    broken = DisturbancePanel("low-pass", "level", ["a", "b"], {"vit": np.zeros((3, 3))})
    with pytest.raises(InputError, match="levels of low-pass"):
        robustness_curves(disturbances=[broken], chance=0.1, n=5)
    with pytest.raises(InputError, match="at least one disturbance"):
        robustness_curves(disturbances=[], chance=0.1, n=5)


def test_shape_bias():
    counts = {"circle": 3, "star": 0}
    models = [
        Bias("vit", 0.75, 0.6, 0.9, counts, {"circle": 1, "star": 0}),
        Bias("cnn", 0.25, None, None, {"circle": 1, "star": 1}, {"circle": 3, "star": 3}),
    ]
    figure = shape_bias_chart(models=models)
    marks = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    assert sorted(float(mark.get_xdata()[0]) for mark in marks) == [25, 25, 75]  # the vit's star has no answer
    assert not cut_off(figure)
    assert {"vit: 75 %", "cnn: 25 %", "circle", "star"} <= set(texts(figure))
    with pytest.raises(InputError, match="same classes of shape"):
        shape_bias_chart(models=[models[0], Bias("b", 0.5, None, None, {"star": 1}, {"star": 1})])
