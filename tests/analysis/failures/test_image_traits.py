import math

import pytest
import torch
from torchvision.transforms.v2.functional import gaussian_blur

from tests.analysis.failures.test_spectrum import grating
from vitlens.analysis.failures.image_traits import MEASURES, blur, contrast, fineness, image_traits, luminance
from vitlens.data.digits import digits


def test_the_luminance_of_grey_is_its_value():
    torch.testing.assert_close(luminance(torch.full((2, 3, 4, 5), 0.3)), torch.full((2, 4, 5), 0.3))
    green = torch.zeros(1, 3, 2, 2)
    green[:, 1] = 1
    torch.testing.assert_close(luminance(green), torch.full((1, 2, 2), 0.7152))


def test_contrast_of_half_black_half_white_is_the_greatest():
    plane = torch.zeros(1, 4, 4)
    plane[:, :, 2:] = 1
    assert contrast(plane).item() == 0.5
    assert contrast(torch.full((1, 4, 4), 0.7)).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("cycles", [1, 3, 8, 15])
def test_the_fineness_of_a_grating_is_its_frequency(cycles):
    assert fineness(luminance(grating(cycles=cycles))).item() == pytest.approx(cycles / 16, abs=1e-3)


def test_a_diagonal_grating_is_finer_by_the_root_of_two():
    steps = torch.arange(32) / 32
    plane = (2 * math.pi * 4 * (steps[:, None] + steps[None])).sin()[None]
    assert fineness(plane).item() == pytest.approx(math.sqrt(2) * 4 / 16, abs=1e-3)


def test_a_blurred_image_is_more_blurred_and_less_fine():
    planes = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    soft, softer = (gaussian_blur(planes, [9, 9], [sigma, sigma]) for sigma in (0.8, 2.0))
    assert (blur(planes) < blur(soft)).all()
    assert (blur(soft) < blur(softer)).all()
    assert (fineness(planes) > fineness(soft)).all()


def test_a_plain_image():
    plane = torch.full((1, 8, 8), 0.4)
    assert (contrast(plane).item() < 1e-6, blur(plane).item(), fineness(plane).item()) == (True, 1, 0)


def test_the_blur_is_cretes():
    """Against a plain loop over rows, one axis."""
    plane = torch.rand(1, 6, 20, generator=torch.Generator().manual_seed(1))
    lost = whole = 0.0
    for row in plane[0].tolist():
        padded = [row[0]] * 4 + row + [row[-1]] * 4
        again = [sum(padded[i : i + 9]) / 9 for i in range(len(row))]
        for i in range(1, len(row)):
            before, after = abs(row[i] - row[i - 1]), abs(again[i] - again[i - 1])
            whole += before
            lost += max(0.0, before - after)
    from vitlens.analysis.failures.image_traits import _blur_along

    assert _blur_along(plane).item() == pytest.approx(1 - lost / whole, rel=1e-4)


def test_every_image_of_a_split_has_every_trait():
    split = digits("test").limit(20)
    found = image_traits(split)
    assert set(found) == {*MEASURES, "object_size"}
    for values in found.values():
        assert values.shape == (20,)
        assert values.isfinite().all()
    torch.testing.assert_close(found["object_size"], split.masks.float().mean((1, 2)))
