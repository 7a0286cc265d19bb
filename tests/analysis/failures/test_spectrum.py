import math

import pytest
import torch

from vitlens.analysis.failures.operations import OPERATIONS, frequency_bands, radius

KEYS = torch.arange(3)
low_pass, high_pass = OPERATIONS["low-pass"], OPERATIONS["high-pass"]


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(3, 3, 24, 37, generator=torch.Generator().manual_seed(0))


def grating(*, cycles: int, size: tuple[int, int] = (32, 32), across: bool = True) -> torch.Tensor:
    """(1, 3, height, width): whole periods of a sine along one axis, around 0.5."""
    along = torch.arange(size[1] if across else size[0]) / (size[1] if across else size[0])
    wave = 0.5 + 0.4 * (2 * math.pi * cycles * along).sin()
    plane = wave[None] if across else wave[:, None]
    return plane.expand(1, 3, *size).contiguous()


@pytest.mark.parametrize("cutoff", [0.0, 0.1, 0.5, 1.0])
def test_low_and_high_make_the_image(images, cutoff):
    low, high = frequency_bands(images, cutoff=cutoff)
    torch.testing.assert_close(low + high, images)
    torch.testing.assert_close(low.mean((2, 3)), images.mean((2, 3)))
    torch.testing.assert_close(high.mean((2, 3)), torch.zeros(3, 3), atol=1e-6, rtol=0)


def test_a_filter_that_passes_everything_changes_nothing(images):
    torch.testing.assert_close(low_pass(images, math.sqrt(2), KEYS), images, atol=1e-6, rtol=0)
    torch.testing.assert_close(high_pass(images, 0.0, KEYS), images, atol=1e-6, rtol=0)


def test_a_filter_that_passes_nothing_leaves_the_mean_colour(images):
    mean = images.mean((2, 3), keepdim=True).expand_as(images)
    torch.testing.assert_close(low_pass(images, 0.0, KEYS), mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(high_pass(images, 1.5, KEYS), mean, atol=1e-6, rtol=0)


@pytest.mark.parametrize("across", [True, False])
def test_the_cut_off_is_where_it_says(across):
    """8 cycles over 32 px are half of Nyquist's 16: kept at 0.5, gone below."""
    image = grating(cycles=8, across=across)
    torch.testing.assert_close(low_pass(image, 0.5, KEYS), image, atol=1e-5, rtol=0)
    torch.testing.assert_close(low_pass(image, 0.49, KEYS), torch.full_like(image, 0.5), atol=1e-5, rtol=0)
    torch.testing.assert_close(high_pass(image, 0.49, KEYS), image, atol=1e-5, rtol=0)


def test_cycles_a_pixel_count_alike_along_both_sides():
    """Not cycles an image: 8 cycles over 64 px pass where 8 over 32 px do not."""
    wide = grating(cycles=8, size=(32, 64))
    torch.testing.assert_close(low_pass(wide, 0.3, KEYS), wide, atol=1e-5, rtol=0)
    assert radius((32, 64))[4, 0] == radius((32, 64))[0, 8] == 0.25
