"""Images with maps: what is marked, crossed out and cut off."""

import numpy as np
import pytest

from tests.figures.reading import crosses, cut_off, texts
from vitlens.charts import Picture, images


def rows_of(random, count: int, maps: int, **marks: object) -> list[Picture]:
    rows = []
    for at in range(count):
        image, row = random.uniform(size=(3, 16, 24)), f"a photograph with a long name {at}.jpg"
        rows.append(Picture(image, column="image", row=row, below="tench (73 %)"))
        rows += [Picture(image, random.uniform(size=(4, 6)), row, f"map {k}", **marks) for k in range(maps)]
    return rows


@pytest.mark.parametrize(("count", "maps"), [(1, 1), (1, 8), (6, 3)])
def test_names_of_rows_and_columns_are_whole(count, maps, random):
    figure = images()(rows_of(random, count, maps), "Maps by method")
    assert not cut_off(figure)
    assert {f"map {k}" for k in range(maps)} <= set(texts(figure))
    assert len([axes for axes in figure.axes if axes.get_visible()]) == count * (maps + 1)


def test_the_object_is_outlined_and_the_highest_point_marked(random):
    mask = np.zeros((16, 24), bool)
    mask[4:9, 4:9] = True
    values = np.zeros((4, 6))
    values[1, 1] = 1.0
    marked = Picture(np.zeros((3, 16, 24)), values, column="a", mask=mask, hit=True)
    crossed = Picture(np.zeros((3, 16, 24)), values, column="b", crossed="uniform")
    figure = images()([marked, crossed], "Two maps")
    first, second = figure.axes[:2]
    (mark,) = [line for line in first.lines if line.get_marker() == "o"]
    height, width = first.images[0].get_array().shape[:2]
    assert (mark.get_xdata()[0] / width, mark.get_ydata()[0] / height) == pytest.approx((0.25, 0.375), abs=0.1)
    assert first.collections
    assert (len(crosses(first)), len(crosses(second))) == (0, 2)
    assert not second.collections
    assert "uniform" in texts(figure)
