import numpy as np
import pytest
from vitlens.figures.windows.receptive import FieldCurve, field_by_depth, field_maps

from tests.figures.reading import colour_at, cut_off, texts
from vitlens.charts.windows import windows_and_shift
from vitlens.errors import InputError

PLAIN = np.arange(16).reshape(4, 4) // 8 * 2 + np.arange(4) // 2  # four windows of 2x2
SHIFTED = np.array([[0, 1, 1, 2], [3, 4, 4, 5], [3, 4, 4, 5], [6, 7, 7, 8]])
DRAWN = {
    "plain": PLAIN,
    "shifted": SHIFTED,
    "reached_before": PLAIN == 0,
    "reached_after": PLAIN < 2,
    "mask": np.eye(4),
    "patch": (1, 1),
    "layers": (4, 5),
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


def test_shapes_that_do_not_fit_are_refused(random):
    with pytest.raises(InputError, match="one grid"):
        windows_and_shift(image=random.uniform(size=(3, 16, 16)), **{**DRAWN, "shifted": SHIFTED[:3]})
    with pytest.raises(InputError, match="square mask"):
        windows_and_shift(image=random.uniform(size=(3, 16, 16)), **{**DRAWN, "mask": np.ones((2, 3))})


def test_fields_of_two_models_by_layer(random):
    ends = [(5.0, 4.0, 6.0), (7.0, 7.0, 7.0)]
    curves = [
        FieldCurve("a vit", ends, [1.0] * 2, [12.0] * 2),
        FieldCurve("a swin", ends[:1], [0.1], [9]),
    ]
    figure = field_by_depth(curves=curves)
    assert {"a vit", "a swin"} <= set(texts(figure))
    assert not cut_off(figure)
    with pytest.raises(InputError, match="at least one model"):
        field_by_depth(curves=[])
    with pytest.raises(InputError, match="uniform"):
        field_by_depth(curves=[FieldCurve("a", ends, [1.0] * 2, [1.0])])


def test_pixels_without_gradient_are_grey_and_maps_of_many_layers_wrap():
    values = np.zeros((8, 8))
    values[4:, 4:] = 1.0
    figure = field_maps(fields={"a vit": [values + 1.0], "a swin": [values] * 9})
    assert {"L0", "L8", "a vit", "a swin"} <= set(texts(figure))
    assert len(figure.axes) == 3 * 8
    grey = colour_at(figure, figure.axes[8], 0.2, 0.2)
    assert np.ptp(grey) < 0.02
    assert np.ptp(colour_at(figure, figure.axes[0], 0.2, 0.2)) > 0.1
    assert not cut_off(figure)
    with pytest.raises(InputError, match="at least 0"):
        field_maps(fields={"a": [-values]})
    with pytest.raises(InputError, match="at least one layer"):
        field_maps(fields={})
