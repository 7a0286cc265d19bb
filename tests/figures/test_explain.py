"""Attributions side by side: colours keep the sign, and a map that says nothing is not drawn."""

import numpy as np
import pytest

from tests.figures.reading import colour_at, cut_off, overlapping, texts
from vitlens.errors import InputError
from vitlens.figures.explain import ACROSS, attribution_overlays, lines_of

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


@pytest.mark.parametrize(("value", "words"), [(0.0, "all equal"), (2.5, "all equal"), (np.nan, "not finite")])
def test_a_map_that_says_nothing_is_not_drawn(images, value, words):
    broken = halves(3)
    broken[1] = value
    figure = drawing(images, [broken])
    assert texts(figure).count(words) == 1
    grey = np.asarray(figure.axes[3].images[0].get_array())
    assert np.ptp(grey, axis=2).max() < 1e-9
    colour = np.asarray(figure.axes[1].images[0].get_array())
    assert np.ptp(colour, axis=2).max() > 0.1


@pytest.mark.parametrize(("shape", "methods"), [((16, 64), 1), ((16, 64), 9), ((64, 16), 1)])
def test_a_low_figure_of_one_image_has_room_for_its_bar(shape, methods, random):
    """The label of the colour bar is longer than such a figure's panels are high."""
    figure = drawing(random.uniform(size=(1, 3, *shape)), [halves(1)] * methods)
    assert figure.axes[-1].get_ylabel()
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


def test_panels_are_broken_into_lines():
    assert [lines_of(panels) for panels in (2, ACROSS, ACROSS + 1, 2 * ACROSS, 20)] == [1, 1, 2, 2, 3]


def test_shapes_that_do_not_fit(images):
    with pytest.raises(InputError, match="expected 2 titles"):
        drawing(images, [halves(3)] * 2, titles=["one"])
    with pytest.raises(InputError, match="expected 3 maps of a method"):
        drawing(images, [halves(2)])
    with pytest.raises(InputError, match="expected 3 names"):
        drawing(images, [halves(3)], names=["one"])
    with pytest.raises(InputError, match="expected masks of shape"):
        drawing(images, [halves(3)], masks=np.ones((3, 8, 8), dtype=bool))
