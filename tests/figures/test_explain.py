"""Attributions side by side: colours keep the sign, and a map that says nothing is not drawn."""

import numpy as np
import pytest

from tests.figures.reading import colour_at, crosses, cut_off, overlapping, texts
from vitlens.charts.overlay import ACROSS, attribution_overlays
from vitlens.errors import InputError

TITLE = "model: what speaks for the target (red) and against it (blue)"


def drawing(images, maps, **changes):
    given = {
        "signed": [True] * len(maps),
        "titles": [f"method {number}" for number in range(len(maps))],
        "names": [f"class {number} (97 %)" for number in range(len(images))],
        "title": TITLE,
    }
    return attribution_overlays(images=images, maps=maps, **{**given, **changes})


def halves(count: int) -> np.ndarray:
    """For on the left, against on the right."""
    values = np.zeros((count, 4, 4))
    values[:, :, 0], values[:, :, 3] = 3.0, -3.0
    return values


def test_red_speaks_for_the_class_and_blue_against_it():
    images = np.full((2, 3, 16, 16), 0.5)
    figure = drawing(images, [halves(2), -halves(2)])
    for row in range(2):
        _, one, other = figure.axes[3 * row : 3 * row + 3]
        for axes, (left, right) in ((one, ("for", "against")), (other, ("against", "for"))):
            for word, place in ((left, 0.06), (right, 0.94)):
                red, _, blue = colour_at(figure, axes, place, 0.5)
                assert bool(red > blue + 0.2) is (word == "for")
                assert bool(blue > red + 0.2) is (word == "against")
        middle = colour_at(figure, one, 0.5, 0.5)
        np.testing.assert_allclose(middle, 0.5, atol=0.06)  # nothing is said there: the grey image


def test_a_map_is_drawn_as_a_share_of_its_own_values(images):
    one, other = drawing(images, [halves(3)]), drawing(images, [1000 * halves(3)])
    np.testing.assert_allclose(one.axes[1].images[0].get_array(), other.axes[1].images[0].get_array())


def test_a_map_without_signs_begins_at_its_least_value(images):
    raised = np.abs(halves(3)) + 100.0
    one = drawing(images, [np.abs(halves(3))], signed=[False])
    other = drawing(images, [raised], signed=[False])
    np.testing.assert_allclose(one.axes[1].images[0].get_array(), other.axes[1].images[0].get_array(), atol=1e-9)


def test_maps_of_a_failed_method_are_crossed_out_with_the_reason(images):
    figure = drawing(images, [halves(3)] * 2, failed=["", "fails randomisation"])
    assert [len(crosses(axes)) for axes in figure.axes[:9]] == [0, 0, 2] * 3
    assert texts(figure).count("fails randomisation") == 1  # in the header that the rows share
    colour = np.asarray(figure.axes[2].images[0].get_array())
    assert np.ptp(colour, axis=2).max() > 0.1  # drawn below the cross
    red, _, blue = colour_at(figure, figure.axes[2], 0.75, 0.25)
    assert red > 0.7 > blue  # the cross, where the map is blue
    assert not cut_off(figure)


@pytest.mark.parametrize("methods", [1, ACROSS - 1])
def test_an_image_is_one_row_below_one_header(images, methods):
    figure = drawing(images, [halves(3)] * methods)
    panels = figure.axes[:-1]
    heights = [round(axes.get_position().y0, 6) for axes in panels]
    assert [heights.count(height) for height in dict.fromkeys(heights)] == [1 + methods] * 3
    assert texts(figure).count("method 0") == texts(figure).count("input") == 1
    wide = max(axes.get_position().x1 for axes in panels) - min(axes.get_position().x0 for axes in panels)
    assert wide > (0.9 if methods > 1 else 0.6)  # of the figure's width: no part of it is empty


def test_methods_that_do_not_fit_are_further_blocks(images):
    figure = drawing(images, [halves(3)] * ACROSS)
    assert len(figure.axes) == 2 * 3 + 3 * ACROSS + 1
    assert texts(figure).count("input") == 2
    assert {f"method {number}" for number in range(ACROSS)} <= set(texts(figure))


@pytest.mark.parametrize(("value", "words"), [(0.0, "uniform"), (2.5, "uniform"), (np.nan, "not finite")])
def test_a_map_that_says_nothing_is_not_drawn(images, value, words):
    broken = halves(3)
    broken[1] = value
    figure = drawing(images, [broken])
    assert texts(figure).count(words) == 1
    assert [len(crosses(axes)) for axes in figure.axes[:6]] == [0, 0, 0, 2, 0, 0]
    grey = np.asarray(figure.axes[3].images[0].get_array())
    assert np.ptp(grey, axis=2).max() < 1e-9
    colour = np.asarray(figure.axes[1].images[0].get_array())
    assert np.ptp(colour, axis=2).max() > 0.1


@pytest.mark.parametrize(("shape", "methods"), [((16, 64), 1), ((16, 64), 9), ((64, 16), 1)])
def test_a_low_figure_of_one_image_has_room_for_its_bar(shape, methods, random):
    """The label of the colour bar is longer than such a figure's panels are high."""
    figure = drawing(random.uniform(size=(1, 3, *shape)), [halves(1)] * methods)
    assert figure.axes[-1].get_xlabel()
    assert cut_off(figure) == []


@pytest.mark.parametrize("methods", [1, 19])
def test_nothing_is_cut_off_or_covered(images, methods, random):
    names = ["golden retriever (97 %)", "target: tench (3 %); predicted: hen", "8 (100 %)"]
    titles = (["gradient-weighted rollout", "integrated gradients", "attention of the last layer"] * 7)[:methods]
    maps = [random.normal(size=(3, *((16, 16) if number % 2 else (4, 3)))) for number in range(methods)]
    figure = drawing(images, maps, names=names, titles=titles, masks=random.uniform(size=(3, 16, 16)) > 0.7)
    assert cut_off(figure) == []
    assert not overlapping(figure)
    assert figure.get_figwidth() < 7.3
    assert figure.get_figheight() < 10.5


def test_shapes_that_do_not_fit(images):
    with pytest.raises(InputError, match="expected 2 titles"):
        drawing(images, [halves(3)] * 2, titles=["one"])
    with pytest.raises(InputError, match="expected 3 maps of a method"):
        drawing(images, [halves(2)])
    with pytest.raises(InputError, match="expected 3 names"):
        drawing(images, [halves(3)], names=["one"])
    with pytest.raises(InputError, match="expected masks of shape"):
        drawing(images, [halves(3)], masks=np.ones((3, 8, 8), dtype=bool))
