import numpy as np
import pytest
from vitlens.figures.patches import patch_grid

from tests.figures.reading import colour_at, cut_off, texts
from vitlens.errors import InputError


def test_patches_are_numbered_row_by_row(image):
    figure = patch_grid(image=image, patch_size=16)
    assert {"0", "1", "2", "3", "4", "5"} <= set(texts(figure))
    assert "image: 32×48 px" in texts(figure)
    assert "2×3 = 6 patches of 16×16 px" in texts(figure)
    assert not cut_off(figure)


def test_many_patches_bear_the_corners_numbers(random):
    figure = patch_grid(image=random.uniform(size=(3, 36, 36)), patch_size=4)
    numbers = {text for text in texts(figure) if text.isdigit()}
    assert numbers == {"0", "8", "72", "80"}


def test_a_gap_between_patches_and_none_in_the_image():
    figure = patch_grid(image=np.zeros((3, 32, 32)), patch_size=16)
    whole, cut = figure.axes
    assert colour_at(figure, whole, 0.5, 0.25).max() == 0
    assert colour_at(figure, cut, 0.5, 0.25).min() > 0.8
    assert colour_at(figure, cut, 0.25, 0.5).min() > 0.8
    assert colour_at(figure, cut, 0.4, 0.4).max() == 0


def test_patches_that_are_not_square(image):
    figure = patch_grid(image=image, patch_size=(32, 8))
    assert "1×6 = 6 patches of 32×8 px" in texts(figure)
    assert not cut_off(figure)


@pytest.mark.parametrize("size", [0, 5, (16, 7), -4])
def test_refused(image, size):
    with pytest.raises(InputError, match="divides 32x48 px"):
        patch_grid(image=image, patch_size=size)
