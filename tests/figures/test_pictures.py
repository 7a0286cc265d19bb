import numpy as np
import pytest
from matplotlib.colors import to_rgb

from tests.figures.reading import cut_off, pixels, texts
from vitlens import charts
from vitlens.charts import Picture
from vitlens.charts.style import RIGHT, WRONG


def has(figure, colour) -> bool:
    return bool((np.abs(pixels(figure) - to_rgb(colour)).max(-1) < 0.01).any())


def grid(images, *given):
    """A chart of images, each with prediction, probability and label."""
    return charts.images()([Picture.predicted(image, *each) for image, each in zip(images, given)], "a title")


def test_right_and_wrong_by_colour_and_symbol(images):
    figure = grid(images, ("cat", 0.5, "cat"), ("dog", 0.994, "cat"), ("dog", 1, None))
    assert {"✓ cat, 50 %", "✗ dog, 99 %\nis cat", "dog, 100 %"} <= set(texts(figure))
    assert len(figure.axes) == 3
    assert has(figure, RIGHT)
    assert has(figure, WRONG)
    assert not cut_off(figure)
    right = grid(images, ("cat", 1, "cat"))
    assert not has(right, WRONG)


@pytest.mark.parametrize("shape", [(16, 40), (40, 16)])
def test_long_names_fit(shape, random):
    names = ["mortarboard, academic cap", "black-and-gold garden spider, Argiope aurantia"]
    given = [(names[0], 1.0, names[index % 2]) for index in range(13)]
    figure = grid(random.uniform(size=(13, 3, *shape)), *given)
    assert not cut_off(figure)
    assert figure.get_figwidth() <= 7.21


def test_rows_of_pictures_without_columns_stand_beside_one_another(images):
    rows = [Picture(images[0], row="a"), Picture(images[1], row="b"), Picture(images[2], row="b", below="last")]
    shown = [axes for axes in charts.images()(rows, "a title").axes if axes.get_visible()]
    left = [axes.get_position().x0 for axes in shown]
    assert len(shown) == 3
    assert left[:1] == pytest.approx(left[1:2])
    assert left[1] < left[2]
