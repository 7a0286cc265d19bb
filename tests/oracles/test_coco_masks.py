"""Localisation on the 56 COCO objects with masks: the figures that were measured apart from this project."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlens.analysis.faithfulness.localisation import pointing_hits, roc_auc
from vitlens.analysis.faithfulness.maps import enlarged
from vitlens.attribution.explain import explain
from vitlens.data.catalogue import load_data
from vitlens.data.split import Split
from vitlens.models import loading

# ROC-AUC and pointing, as data/README says of the stored maps
FIGURES = {"rollout": (0.676, 0.250), "attention": (0.708, 0.107), "relevance": (0.872, 0.768)}


@pytest.fixture(scope="module")
def reference(real_data: Path) -> tuple[list[str], Tensor]:
    """Names of the images, and maps (images, methods, 14, 14) in the order of FIGURES."""
    with np.load(real_data / "deit_tiny_reference.npz", allow_pickle=False) as stored:
        names = [Path(str(name)).name for name in stored["map_files"]]
        return names, torch.from_numpy(stored["maps"]).float().unflatten(-1, (14, 14))


@pytest.fixture(scope="module")
def split(real_data: Path) -> Split:
    root = real_data / "coco_masks"
    model = loading.load(f"timm:deit_tiny_patch16_224@{real_data / 'weights' / 'deit_tiny_patch16_224.safetensors'}")
    return load_data(str(root), preprocessing=model.preprocessing)


def test_the_folder_is_read_whole(split, reference):
    assert split.files == tuple(sorted(reference[0]))
    assert split.masks.shape == (56, 224, 224)
    assert not split.skipped
    assert split.labels[0] == 340  # a zebra
    assert any("whole" in note for note in split.notes)


def test_stored_maps_have_the_stored_figures(split, reference):
    names, maps = reference
    order = [names.index(name) for name in split.files]
    for place, (method, (auc, pointing)) in enumerate(FIGURES.items()):
        own = maps[order, place]
        assert roc_auc(own, split.masks).mean().item() == pytest.approx(auc, abs=6e-4), method
        # measured with the first of several equal highest points; ours counts the share of tied points inside
        highest = enlarged(own, (224, 224)).flatten(1).argmax(1, keepdim=True)
        hits = split.masks.flatten(1).gather(1, highest)[:, 0]
        assert hits.float().mean().item() == pytest.approx(pointing, abs=6e-4), method
        assert not ((pointing_hits(own, split.masks) == 1) & ~hits).any()


def test_mask_areas_are_those_of_the_index(split, real_data):
    import json

    entries = json.loads((real_data / "coco_masks" / "index.json").read_text())
    expected = {entry["file"]: entry["mask_area"] for entry in entries}
    found = dict(zip(split.files, split.masks.flatten(1).float().mean(1).tolist()))
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("count", [4, pytest.param(56, marks=pytest.mark.slow)])
def test_our_maps_are_the_stored_ones(split, reference, real_data, count):
    names, maps = reference
    model = loading.load(f"timm:deit_tiny_patch16_224@{real_data / 'weights' / 'deit_tiny_patch16_224.safetensors'}")
    some = split.pick(torch.arange(0, 56, 56 // count))
    (batch,) = some.batches(56)
    order = [names.index(name) for name in some.files]
    for place, (method, (auc, _)) in enumerate(FIGURES.items()):
        found = explain(model, batch.images, targets=batch.labels, method=method)
        torch.testing.assert_close(found, maps[order, place], atol=1e-4, rtol=0)
        if count == 56:
            assert roc_auc(found, some.masks).mean().item() == pytest.approx(auc, abs=6e-4)
