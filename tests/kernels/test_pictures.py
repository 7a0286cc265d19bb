"""Pictures in memory are read like their files."""

import numpy as np
from PIL import Image

from tests.kit.datasets import pixels_of
from vitlens.data.catalogue import read_split


def test_an_open_picture_is_turned_like_its_file(tmp_path):
    upright = np.zeros((6, 8, 3), np.uint8)
    upright[..., 0] = np.arange(8) * 30
    turned = Image.Exif()
    turned[0x0112] = 6  # "turn me clockwise to see me upright"
    stored = Image.fromarray(upright).transpose(Image.Transpose.ROTATE_90)
    stored.save(tmp_path / "a.png", exif=turned)
    with Image.open(tmp_path / "a.png") as opened:
        pixels = pixels_of(read_split(opened))
    assert np.array_equal(pixels[0].permute(1, 2, 0).numpy(), upright)
