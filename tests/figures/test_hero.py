import numpy as np
import pytest
from vitlens.figures.hero import class_maps

from tests.figures.reading import colour_at, crosses, cut_off, texts
from vitlens.errors import InputError


def drawing(count: int = 2, **changes: object):
    maps = np.zeros((count, 4, 4))
    for index in range(count):
        maps[index, index, index] = 1.0
    given = {
        "image": np.full((3, 64, 64), 0.5),
        "maps": maps,
        "classes": ["triumphal arch", "fire engine", "minibus"][:count],
        "probabilities": [0.81, 0.02, 0.01][:count],
        "title": "What the model uses",
    }
    return class_maps(**(given | changes))


def test_a_map_glows_where_it_is_great_and_is_grey_elsewhere():
    figure = drawing()
    photograph, first, second = figure.axes
    assert np.ptp(colour_at(figure, photograph, 0.5, 0.5)) < 0.02
    for axes, place, other in ((first, 0.125, 0.375), (second, 0.375, 0.125)):
        red, _, blue = colour_at(figure, axes, place, place)
        assert red > blue + 0.3
        assert np.ptp(colour_at(figure, axes, 0.9, 0.1)) < 0.02
        assert colour_at(figure, axes, other, other)[0] < red
    assert {"photograph", "triumphal arch (81 %)", "fire engine (2 %)"} <= set(texts(figure))
    assert not cut_off(figure)


def test_a_uniform_map_is_crossed_out():
    figure = drawing(maps=np.stack((np.eye(4), np.full((4, 4), 0.3))))
    assert [len(crosses(axes)) for axes in figure.axes] == [0, 0, 2]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"classes": ["one"]}, "expected 2 classes"),
        ({"maps": -np.ones((2, 4, 4)) * np.eye(4)}, "without negative values"),
        ({"image": np.full((3, 4, 4), 2.0)}, r"in \[0, 1\]"),
        ({"maps": np.ones((4, 2, 2)), "classes": list("abcd"), "probabilities": [0.1] * 4}, "at most 3 classes"),
    ],
)
def test_refused(changed, message):
    with pytest.raises(InputError, match=message):
        drawing(**changed)
