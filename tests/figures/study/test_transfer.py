"""Figures of a transfer study: every regime where it belongs and in its colour, and nothing cut off."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from tests.figures.reading import cut_off, texts
from vitlens.errors import InputError
from vitlens.figures.study.before_after import before_and_after
from vitlens.figures.study.transfer import RegimeBar, accuracy_by_share, regimes_in_rows, similarity_by_layer
from vitlens.figures.style import SERIES, TALL

NAMES = ("frozen", "last blocks", "full", "from scratch", "distilled")
BARS = [
    RegimeBar(name, 0.2 * i, 0.2 * i - 0.1, 0.2 * i + 0.1, (0.1, 0.3), 5.0 * 10**i) for i, name in enumerate(NAMES, 1)
]
LINES = {
    "full": [(20, 0.6, 0.5, 0.7), (100, 0.9, 0.8, 1.0)],
    "from scratch": [(20, 0.3, 0.2, 0.4), (100, 0.5, 0.4, 0.6)],
}


def test_every_regime_has_a_row_with_its_accuracy_and_its_time():
    figure = regimes_in_rows(regimes=BARS, chance=0.2, title="Regimes")
    shown = texts(figure)
    assert set(NAMES) <= set(shown)
    assert "20.0 [10.0, 30.0]" in shown
    assert "500,000" in shown
    assert not cut_off(figure)
    left = figure.axes[0]
    means = [line for line in left.lines if line.get_marker() == "o"]
    assert [line.get_xdata()[0] for line in means] == pytest.approx([20, 40, 60, 80, 100])


def test_the_time_of_a_teacher_counts():
    figure = regimes_in_rows(
        regimes=[RegimeBar("distilled", 0.5, 0.4, 0.6, (), 3.0, before=4.0)], chance=0.2, title="A"
    )
    assert figure.axes[1].lines[0].get_xdata()[0] == 7.0
    with pytest.raises(InputError, match="times above 0"):
        regimes_in_rows(regimes=[RegimeBar("full", 0.5, 0.4, 0.6, (), 0.0)], chance=0.2, title="A")


@pytest.mark.parametrize("draw", [accuracy_by_share, similarity_by_layer])
def test_a_regime_has_one_colour_in_every_figure(draw):
    more = {"chance": 0.2} if draw is accuracy_by_share else {}
    figure = draw(lines=LINES, order=NAMES, title="Lines", **more)
    colours = {text: to_hex(handle.lines[0].get_color()) for handle, text in zip(
        figure.axes[0].containers, [container.get_label() for container in figure.axes[0].containers]
    )}  # fmt: skip
    assert colours == {"full": SERIES[2].lower(), "from scratch": SERIES[3].lower()}
    assert not cut_off(figure)
    with pytest.raises(InputError, match="expected one of frozen"):
        draw(lines={"other": LINES["full"]}, order=NAMES, title="Lines", **more)


@pytest.mark.parametrize("count", [1, 6])
def test_maps_stand_side_by_side_with_their_difference(count):
    random = np.random.default_rng(0)
    images, before, after = (random.random((count, *shape)) for shape in ((3, 32, 32), (4, 4), (4, 4)))
    names = [(f"class {i}", "a long class name of the model before", "class 0") for i in range(count)]
    figure = before_and_after(
        images=images, before=before, after=after, means=(before.mean(0), after.mean(0)), names=names, n=64,
        label="attention per patch", title="Before and after",
    )  # fmt: skip
    drawn = [axes for axes in figure.axes if axes.images]
    assert len(drawn) >= 4 * count + 3
    assert figure.get_figheight() <= TALL + 0.4
    assert {"image", "before", "after", "difference", "mean, n = 64", "class 0"} <= set(texts(figure))
    assert not cut_off(figure)
    shown = next(axes for axes in figure.axes if axes.get_title() == "difference").images[0].get_array()
    assert np.allclose(shown, after[0] - before[0])


def test_maps_of_other_shapes_are_refused():
    images = np.zeros((1, 3, 8, 8))
    with pytest.raises(InputError, match="maps of one shape"):
        before_and_after(
            images=images, before=np.zeros((1, 2, 2)), after=np.zeros((1, 3, 3)), means=None, names=[("a", "b", "c")],
            n=1, label="x", title="y",
        )  # fmt: skip
