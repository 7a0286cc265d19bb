"""Edits of pixels, on planted images."""

import torch

from vitlens.analysis.reliance.edits import shift_pixels
from vitlens.analysis.reliance.views import View


def test_a_shift_is_off_the_grid_of_patches_along_both_axes():
    images = torch.zeros(16, 3, 56, 56)
    images[..., 28, 28] = 1.0
    keys = torch.arange(len(images))
    view = View(images, masks=None, keys=keys, patch=(8, 7), read_partner=lambda: view)
    for image in shift_pixels(view, images, "reflect"):
        row, column = divmod(int(image[0].argmax()), 56)
        assert (row - 28) % 8 != 0
        assert (column - 28) % 7 != 0
