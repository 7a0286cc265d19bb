"""The images of a run: which models share them, and whose training images are left out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlens import load
from vitlens.arrays import write_arrays
from vitlens.commands.run.load import load_split, load_splits
from vitlens.commands.run.options import RunOptions
from vitlens.errors import InputError
from vitlens.models.derived import for_classes


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


@pytest.mark.parametrize(
    ("name", "is_run"), [("weights.safetensors", True), ("timm:deit_tiny_patch16_224", False)]
)
def test_a_name_of_a_hub_is_not_taken_for_a_file_of_the_run_in_this_folder(
    name, is_run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arrays").mkdir()
    (tmp_path / "weights.safetensors").touch()
    write_arrays(tmp_path / "arrays/training_images.npz", {"numbers": np.ones(1, np.uint64)})
    (tmp_path / "data").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "data/0.png")
    model = load("m=vit-digits")
    model.provenance = replace(model.provenance, name=name)
    split = load_split(model, options=RunOptions(quiet=True), data="data")
    # the first note says whose training images were looked for
    assert bool(split.notes and "of m:" in split.notes[0]) == is_run
