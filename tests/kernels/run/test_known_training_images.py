"""Whose training images are known: files of a run are found from a path, never from a name."""

from dataclasses import replace

import numpy as np
import pytest

from vitlens.arrays import write_arrays
from vitlens.commands.run.unseen import training_images_of
from vitlens.models.loading import load


@pytest.mark.parametrize(
    ("name", "trained"), [("weights.safetensors", ("m",)), ("timm:deit_tiny_patch16_224", ())]
)
def test_a_name_of_a_hub_is_not_taken_for_a_file_of_the_run_in_this_folder(
    name, trained, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "arrays").mkdir()
    (tmp_path / "weights.safetensors").touch()
    write_arrays(tmp_path / "arrays/training_images.npz", {"numbers": np.ones(1, np.uint64)})
    model = load("m=vit-digits")
    model.provenance = replace(model.provenance, name=name)
    assert training_images_of([model], seed=0).names == trained
