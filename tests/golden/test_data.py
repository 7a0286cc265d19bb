import numpy as np
import pytest
from PIL import Image

from vitlens import load_data
from vitlens.commands.data.measure import measure as listed_lines
from vitlens.commands.data.options import DataOptions
from vitlens.data.registry import LAYOUTS, SETS
from vitlens.errors import DataError, UnknownNameError


def test_every_name_is_listed():
    listed = [line.split()[0] for line in listed_lines(DataOptions())]
    assert listed == [*SETS, *(layout.usage for layout in LAYOUTS if layout.usage)]


def test_digits_are_counted_as_they_are_loaded():
    title, train, test = listed_lines(DataOptions("digits"))
    assert "10 classes (0, 1, 2" in title
    assert train.startswith(f"train: {len(load_data('digits', part='train')):,} images of 32x32 px, with labels")
    assert test.startswith(f"test: {len(load_data('digits', part='test')):,} images")
    assert test.endswith("masks")


def test_a_folder_of_images_names_what_was_skipped(tmp_path):
    for name in ("a.png", "b.png"):
        Image.fromarray(np.zeros((8, 12, 3), np.uint8)).save(tmp_path / name)
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    title, counts, skipped = listed_lines(DataOptions(str(tmp_path)))
    assert title.endswith("no labels")
    assert counts.startswith("all: 2 images of 8x12 px")
    assert "broken.jpg" in skipped


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(UnknownNameError, match="did you mean 'cifar10'"):
        list(listed_lines(DataOptions("cifar1")))
    with pytest.raises(DataError):
        list(listed_lines(DataOptions(str(tmp_path))))
