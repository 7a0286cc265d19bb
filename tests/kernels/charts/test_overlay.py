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
    is_constant,
    joint_scale,
    overlaid,
    upsample,
)
from vitlens.charts.style import SIGNED


@pytest.mark.parametrize(
    ("grid", "size"), [((4, 4), (32, 32)), ((3, 5), (48, 20)), ((1, 1), (4, 6)), ((14, 14), (224, 224))]
)
@pytest.mark.parametrize("smooth", [True, False])
def test_upsample_equals_torch(grid, size, smooth, random):
    values = random.normal(size=grid)
    mode = {"mode": "bilinear", "align_corners": False} if smooth else {"mode": "nearest"}
    expected = torch.nn.functional.interpolate(torch.from_numpy(values)[None, None], size, **mode)[0, 0]
    np.testing.assert_allclose(upsample(values, size, smooth=smooth), expected.numpy(), atol=1e-12)


def test_a_scale_is_joint_and_says_what_it_clips(random):
    maps = random.uniform(1, 2, (4, 10, 10))
    maps[0, 0, 0] = 100
    scale = joint_scale(maps)
    assert (scale.low, scale.clipped) == (maps.min(), True)
    assert scale.high < 2.1
    peak = np.zeros((1, 30, 30))
    peak[0, 3, 3] = 1
    assert joint_scale(peak) == Scale(0.0, 1.0)  # on nothing it is not clipped away


@pytest.mark.parametrize("value", [0.0, 0.005, -3.0])
def test_constant_maps_have_a_middle_colour(value):
    rounding = np.linspace(0, 1e-9, 4).reshape(1, 2, 2) * abs(value)
    scale = joint_scale(value + rounding)
    assert scale.low == scale.high
    assert scale.norm(value) == pytest.approx(0.5)
    assert is_constant(value + rounding)
    assert not is_constant(np.array([0.0, 1e-12]))


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


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (Scale(0.5, 2.0, clipped=True), {"0.5", "≥ 2.0", "attention (%)"}),
        (Scale(0.5, 2.0), {"0.5", "2.0"}),
        (joint_scale(np.linspace(0.02, 21.04, 16).reshape(1, 4, 4)), {"0", "10", "20"}),  # no 5.26, 10.5, 15.8
        (Scale(3.0, 3.0), {"3\nall\nequal"}),
    ],
)
def test_a_bar_says_its_range(scale, words):
    figure = Figure()
    colour_bar(figure.add_subplot(), scale=scale, label="attention (%)")
    assert words <= set(texts(figure))
