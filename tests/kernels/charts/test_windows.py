import numpy as np

from tests.kit.axes import colour_at, cut_off, texts
from vitlens.charts.windows import windows_and_shift

PLAIN = np.arange(16).reshape(4, 4) // 8 * 2 + np.arange(4) // 2  # four windows of 2x2
SHIFTED = np.array([[0, 1, 1, 2], [3, 4, 4, 5], [3, 4, 4, 5], [6, 7, 7, 8]])
DRAWN = {
    "parts": (PLAIN, SHIFTED),
    "reach": (PLAIN == 0, PLAIN < 2),
    "mask": np.eye(4),
    "patch": (1, 1),
    "layers": (4, 5),
    "title": "Windows",
}


def test_four_panels_say_their_numbers(random):
    figure = windows_and_shift(image=random.uniform(size=(3, 16, 16)), **DRAWN)
    words = " ".join(texts(figure))
    for expected in ("layer 4: 4 parts", "layer 5: 9 parts", "(1, 1)", "4, then 8"):
        assert expected in words
    assert not cut_off(figure)


def test_parts_side_by_side_have_different_colours_and_the_mask_is_dark_where_allowed():
    figure = windows_and_shift(image=np.zeros((3, 16, 16)), **DRAWN)
    first, second, _, mask = figure.axes[:4]
    assert np.abs(colour_at(figure, first, 0.3, 0.2) - colour_at(figure, first, 0.7, 0.2)).max() > 0.1
    assert np.abs(colour_at(figure, second, 0.1, 0.1) - colour_at(figure, second, 0.35, 0.1)).max() > 0.1
    assert colour_at(figure, mask, 0.12, 0.88).max() < 0.3 or colour_at(figure, mask, 0.12, 0.12).max() < 0.3
