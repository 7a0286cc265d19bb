"""DeiT-tiny's real weights on real photographs: stored logits, attention, rollout, and timm's unfused path.

The stored numbers were made apart from this project, with timm's unfused attention and plain loops.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.oracles.test_timm_attention import compare
from vitlens.analysis.attention.methods import relevance, rollout
from vitlens.analysis.attention.weights import attention, attention_maps
from vitlens.data.decode import decode
from vitlens.lens.capture import capture_attention
from vitlens.models import loading
from vitlens.models.model import Model

LOGITS = 1e-4  # the largest difference over all 300 photographs was 1.5e-5 where this was written


@pytest.fixture(scope="module")
def deit(real_data: Path) -> Model:
    return loading.load(f"timm:deit_tiny_patch16_224@{real_data / 'weights' / 'deit_tiny_patch16_224.safetensors'}")


@pytest.fixture(scope="module")
def reference(real_data: Path) -> dict[str, np.ndarray]:
    with np.load(real_data / "deit_tiny_reference.npz", allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def pictures(model: Model, paths: list[Path]) -> Tensor:
    return torch.stack([decode(path, model.preprocessing)[0] for path in paths]).float() / 255


def logits_of(model: Model, paths: list[Path]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(pictures(model, paths[i : i + 20])) for i in range(0, len(paths), 20)])


def photos(folder: Path, reference: dict[str, np.ndarray]) -> list[Path]:
    return [folder / "photos" / str(name).removeprefix("photos/") for name in reference["files"]]


def masks(folder: Path, reference: dict[str, np.ndarray]) -> list[Path]:
    names = [str(name).removeprefix("coco_masks/").removeprefix("images/") for name in reference["map_files"]]
    return [folder / "coco_masks" / "images" / name for name in names]


def test_its_anatomy(deit):
    assert deit.layout.grid == (14, 14)
    assert (deit.layout.prefix, deit.anatomy.readout, len(deit.anatomy.blocks)) == (("cls",), "cls", 12)
    assert deit.parameter_count() == 5_717_416
    assert deit.provenance.notes == ()


def test_stored_logits_of_some_photographs(deit, real_data, reference):
    chosen = list(range(0, 300, 25))
    found = logits_of(deit, [photos(real_data, reference)[index] for index in chosen])
    torch.testing.assert_close(found, torch.from_numpy(reference["logits"][chosen]).float(), atol=LOGITS, rtol=0)


@pytest.mark.slow
def test_stored_logits_and_accuracy_of_all_photographs(deit, real_data, reference):
    found = logits_of(deit, photos(real_data, reference))
    expected = torch.from_numpy(reference["logits"]).float()
    torch.testing.assert_close(found, expected, atol=LOGITS, rtol=0)
    labels = torch.from_numpy(reference["labels"])
    correct = (found.argmax(-1) == labels).float().mean().item()
    assert correct == (expected.argmax(-1) == labels).float().mean().item()
    assert round(100 * correct, 1) == 78.3


def test_logits_are_unchanged_under_observation_bit_by_bit(deit, real_data, reference):
    batch = pictures(deit, photos(real_data, reference)[:4])
    with torch.no_grad():
        plain = deit(batch)
    for rows in (None, (0,)):
        captured = capture_attention(deit, batch, rows=rows)
        assert torch.equal(captured.logits, plain)
        assert len(captured.layers) == 12


def test_attention_is_timms_own_unfused(deit, real_data, reference):
    batch = pictures(deit, photos(real_data, reference)[:2])
    assert compare(deit, batch) < 1e-5
    twin = copy.deepcopy(deit).double()
    assert compare(twin, batch.double(), layer_by_layer=False) < 1e-10


def mapped(
    model: Model, folder: Path, reference: dict[str, np.ndarray], part: str
) -> tuple[list[int], list[Path], Tensor]:
    """Which of the images with stored maps, their files and their pixels."""
    paths = masks(folder, reference)
    chosen = list(range(0, len(paths), 8 if part == "some" else 1))
    # these are 224 px already and were taken whole, so that the masks fit
    whole = replace(model.preprocessing, resize=None)
    batch = torch.stack([decode(paths[index], whole)[0] for index in chosen]).float() / 255
    return chosen, [paths[index] for index in chosen], batch


@pytest.mark.parametrize("part", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_stored_relevance(deit, real_data, reference, part):
    chosen, paths, batch = mapped(deit, real_data, reference, part)
    entries = json.loads((real_data / "coco_masks" / "index.json").read_text())
    classes = {entry["file"]: entry["imagenet_class"] for entry in entries}
    targets = torch.tensor([classes[path.name] for path in paths])
    expected = torch.from_numpy(reference["maps"][chosen, 2]).float()
    found = relevance(deit, batch, targets=targets).flatten(1)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    # the numbers are small: beside their largest too, image by image
    assert ((found - expected).abs().amax(1) < 1e-3 * expected.amax(1)).all()


@pytest.mark.parametrize("part", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_stored_rollout_and_last_layer(deit, real_data, reference, part):
    chosen, _, batch = mapped(deit, real_data, reference, part)
    expected = torch.from_numpy(reference["maps"][chosen]).float()
    torch.testing.assert_close(rollout(deit, batch).flatten(1), expected[:, 0], atol=1e-4, rtol=0)
    last = attention_maps(deit, batch)[-1].maps.mean(1)
    torch.testing.assert_close(last.flatten(1), expected[:, 1], atol=1e-4, rtol=0)
    row = attention(deit, batch, rows="cls")[-1].mean(1)[:, 0, 1:]
    torch.testing.assert_close(row, last.flatten(1), atol=1e-6, rtol=0)
    assert expected[:, 0].std(-1).min() > 1e-4  # a map of even numbers would not pass
