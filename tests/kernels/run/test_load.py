"""Models with the same preprocessing share the images that are read, and nothing else."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from vitlens.commands.run.load import load_splits
from vitlens.commands.run.options import RunOptions
from vitlens.errors import InputError
from vitlens.models.derived import for_classes
from vitlens.models.loading import load


@pytest.fixture(scope="module")
def models():
    digits = load("vit-digits")
    return digits, for_classes(digits, ("cat", "dog"))


def test_without_images_a_model_of_other_classes_is_refused_in_any_order(models):
    for ordered in (models, models[::-1]):
        with pytest.raises(InputError):
            load_splits(ordered, options=RunOptions(limit=2, quiet=True))


def test_indices_in_a_table_are_those_of_each_model(models, tmp_path: Path):
    for index in range(2):
        pixels = torch.full((8, 8, 3), 100 * index, dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
    table = tmp_path / "labels.csv"
    table.write_text("file,label\n0.png,0\n1.png,1\n")
    splits = load_splits(models, options=RunOptions(labels=table, quiet=True), data=str(tmp_path))
    assert [split.classes for split in splits] == [model.classes for model in models]
