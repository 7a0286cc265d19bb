import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from tests.kit.axes import texts
from vitlens.charts.overlay import (
    Scale,
    blend,
    clipped_scale,
    colour_bar,
    enlarged,
    is_constant,
    joint_scale,
    overlaid,
    upsample,
)
from vitlens.charts.style import MAGNITUDE, SIGNED


@pytest.mark.parametrize(
    ("grid", "size"), [((4, 4), (32, 32)), ((3, 5), (48, 20)), ((1, 1), (4, 6)), ((14, 14), (224, 224))]
)
@pytest.mark.parametrize("smooth", [True, False])
def test_upsample_equals_torch(grid, size, smooth, random):
    values = random.normal(size=grid)
    mode = {"mode": "bilinear", "align_corners": False} if smooth else {"mode": "nearest"}
    expected = torch.nn.functional.interpolate(torch.from_numpy(values)[None, None], size, **mode)[0, 0]
    np.testing.assert_allclose(upsample(values, size, smooth=smooth), expected.numpy(), atol=1e-12)


def test_scale_is_joint_and_says_what_it_clips(random):
    maps = random.uniform(1, 2, (4, 10, 10))
    maps[0, 0, 0] = 100
    scale = joint_scale(maps)
    assert scale.low == maps.min()
    assert scale.high < 2.1
    assert scale.clipped
    two = joint_scale(np.array([[[0.0, 1.0]]]))
    assert two.low == 0
    assert 0.99 < two.high <= 1


def test_one_peak_on_nothing_is_not_clipped_away():
    maps = np.zeros((1, 30, 30))
    maps[0, 3, 3] = 1
    assert joint_scale(maps) == Scale(0.0, 1.0)


@pytest.mark.parametrize("value", [0.0, 0.005, -3.0])
def test_constant_maps_have_a_middle_colour(value):
    rounding = np.linspace(0, 1e-9, 4).reshape(1, 2, 2) * abs(value)
    scale = joint_scale(value + rounding)
    assert scale.low == scale.high
    assert scale.norm(value) == pytest.approx(0.5)
    assert is_constant(value + rounding)
    assert not is_constant(np.array([0.0, 1e-12]))


def test_hottest_pixels_are_where_the_map_is_highest(random):
    values = random.uniform(0, 0.5, (4, 6))
    values[2, 4] = 1
    drawn = blend(np.full((3, 64, 96), 0.5), values, scale=Scale(0.0, 1.0))
    top = 0.35 * 0.5 + 0.65 * np.array(colormaps[MAGNITUDE](1.0)[:3])
    y, x = np.unravel_index(np.abs(drawn - top).sum(-1).argmin(), drawn.shape[:2])
    assert (y * 4 // len(drawn), x * 6 // drawn.shape[1]) == (2, 4)


def test_colours_depend_on_the_map_alone_over_a_grey_image(image, random):
    values = random.uniform(size=(2, 3))
    one, other = (blend(each, values, scale=Scale(0.0, 1.0)) for each in (image, image[::-1]))
    share = (one - other)[..., 0]  # both have the same colours of the map; the greys differ
    np.testing.assert_allclose(one - other, np.repeat(share[..., None], 3, axis=2), atol=1e-12)
    assert np.ptp(blend(image, np.ones((2, 3)), scale=Scale(0.0, 1.0)), axis=-1).max() < 1e-12


def test_the_largest_values_are_the_least_transparent(image):
    grey, drawn = (overlaid(image, np.array(own), signed=True) for own in ([[1.0, 1.0]], [[1.0, -1.0], [0.0, 0.5]]))
    assert np.ptp(grey, axis=-1).max() < 1e-12  # a uniform map says nothing
    colours = [np.array(colormaps[SIGNED](end)[:3]) for end in (1.0, 0.0)]
    for place, colour in zip(((0, 0), (0, -1)), colours):
        np.testing.assert_allclose(drawn[place], 0.15 * grey[place] + 0.85 * colour)
    np.testing.assert_allclose(drawn[-1, 0], grey[-1, 0])


def test_small_images_are_enlarged_by_whole_pixels(image):
    drawn = enlarged(image)
    assert drawn.shape == (224, 336, 3)
    assert (drawn[:7, :7] == drawn[0, 0]).all()


def test_a_signed_scale_is_symmetric_and_leaves_extremes_out(random):
    values = random.normal(size=100)
    scale = clipped_scale(values)
    assert (scale.low, scale.high, scale.clipped) == (-np.abs(values).max(), np.abs(values).max(), False)
    values[7] = -50.0
    scale = clipped_scale(values)
    assert scale.clipped
    assert scale.high == -scale.low < 5
    assert clipped_scale(0 * values, least=0.01) == Scale(-0.01, 0.01)
    assert clipped_scale(np.array([np.nan, 2.0])) == Scale(-2.0, 2.0)


def test_bar_says_its_range():
    def bar_texts(scale: Scale) -> list[str]:
        figure = Figure()
        colour_bar(figure.add_subplot(), scale=scale, label="attention (%)")
        return texts(figure)

    assert {"0.5", "≥ 2.0", "attention (%)"} <= set(bar_texts(Scale(0.5, 2.0, clipped=True)))
    assert {"0.5", "2.0"} <= set(bar_texts(Scale(0.5, 2.0)))
    assert {"0", "10", "20"} <= set(
        bar_texts(joint_scale(np.linspace(0.02, 21.04, 16).reshape(1, 4, 4)))
    )  # no 5.26, 10.5, 15.8
    assert "3\nall\nequal" in bar_texts(Scale(3.0, 3.0))
