import numpy as np
import pytest
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

from tests.figures.reading import texts
from vitlens.charts.overlay import (
    MAGNITUDE,
    Scale,
    blend,
    colour_bar,
    is_constant,
    joint_scale,
    upsample,
    with_common_decimals,
)
from vitlens.errors import InputError


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
    drawn = blend(np.full((3, 64, 96), 0.5), values, scale=Scale(0.0, 1.0), opacity=1.0)
    top = np.array(colormaps[MAGNITUDE](1.0)[:3])
    y, x = np.unravel_index(np.abs(drawn - top).sum(-1).argmin(), drawn.shape[:2])
    assert (y * 4 // len(drawn), x * 6 // drawn.shape[1]) == (2, 4)


def test_opacity_from_the_grey_image_to_the_map(image, random):
    values = random.uniform(size=(2, 3))
    grey = blend(image, values, scale=Scale(0.0, 1.0), opacity=0.0)
    assert np.ptp(grey, axis=-1).max() < 1e-12
    full = blend(image, values, scale=Scale(0.0, 1.0), opacity=1.0)
    np.testing.assert_allclose(full, blend(1 - image, values, scale=Scale(0.0, 1.0), opacity=1.0))
    half = blend(image, values, scale=Scale(0.0, 1.0), opacity=0.5)
    np.testing.assert_allclose(half, (grey + full) / 2)
    with pytest.raises(InputError, match="opacity"):
        blend(image, values, scale=Scale(0.0, 1.0), opacity=1.5)


def test_small_images_are_enlarged_by_whole_pixels(image):
    drawn = blend(image, [[0.0, 1.0]], scale=Scale(0.0, 1.0), opacity=0.0)
    assert drawn.shape == (224, 336, 3)
    assert (drawn[:7, :7] == drawn[0, 0]).all()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.0, 12.64], ["0.0", "12.6"]),
        ([2e-9, 3.388], ["0.00", "3.39"]),
        ([-0.967, 0.967], ["-0.97", "0.97"]),
        ([0.0, 250.0], ["0", "250"]),
        ([0.0, 0.0], ["0", "0"]),
    ],
)
def test_numbers_in_words(values, said):
    assert with_common_decimals(values) == said


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
