"""The 56 COCO objects with masks: our maps are the stored ones, with the figures that were measured apart."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import vitlens
from vitlens import Model, Split
from vitlens.cli.main import run

# ROC-AUC, as data/README says of the stored maps
FIGURES = {"rollout": 0.676, "attention": 0.708, "relevance": 0.872}


@pytest.fixture(scope="module")
def deit(real_data: Path) -> Model:
    return vitlens.load(f"timm:deit_tiny_patch16_224@{real_data / 'weights' / 'deit_tiny_patch16_224.safetensors'}")


@pytest.fixture(scope="module")
def reference(real_data: Path) -> tuple[list[str], Tensor]:
    """Names of the images, and maps (images, methods, 14, 14) in the order of FIGURES."""
    with np.load(real_data / "deit_tiny_reference.npz", allow_pickle=False) as stored:
        names = [Path(str(name)).name for name in stored["map_files"]]
        return names, torch.from_numpy(stored["maps"]).float().unflatten(-1, (14, 14))


@pytest.fixture(scope="module")
def split(real_data: Path, deit: Model) -> Split:
    return vitlens.load_data(str(real_data / "coco_masks"), preprocessing=deit.preprocessing)


def test_the_folder_is_read_whole(split, reference, real_data):
    assert split.files == tuple(sorted(reference[0]))
    assert split.masks.shape == (56, 224, 224)
    assert not split.skipped
    assert split.labels[0] == 340  # a zebra
    entries = json.loads((real_data / "coco_masks" / "index.json").read_text())
    areas = dict(zip(split.files, split.masks.flatten(1).float().mean(1).tolist()))
    assert areas == pytest.approx({entry["file"]: entry["mask_area"] for entry in entries}, abs=1e-4)


@pytest.mark.parametrize("count", [4, pytest.param(56, marks=pytest.mark.slow)])
def test_our_maps_are_the_stored_ones(split, reference, deit, count):
    names, maps = reference
    some = split.pick(torch.arange(0, 56, 56 // count))
    order = [names.index(name) for name in some.files]
    for place, method in enumerate(FIGURES):
        found = vitlens.explain(deit, some, targets="label", method=method)
        torch.testing.assert_close(found, maps[order, place], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_command_has_the_stored_figures(real_data, tmp_path):
    weights = real_data / "weights" / "deit_tiny_patch16_224.safetensors"
    line = ["explain", f"deit=timm:deit_tiny_patch16_224@{weights}", "--data", str(real_data / "coco_masks")]
    options = ["--method", ",".join(FIGURES), "--target", "true", "--device", "cpu", "--quiet"]
    assert run([*line, *options, "--out", str(tmp_path / "out")]) == 0
    metrics = vitlens.read(tmp_path / "out").metrics
    for method, auc in FIGURES.items():
        [found] = [each.value for name, each in metrics.items() if "roc_auc" in name and name.endswith(method)]
        assert found == pytest.approx(auc, abs=6e-4), method
