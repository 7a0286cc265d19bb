"""DeiT-tiny's real weights on real photographs: stored logits, attention, rollout, relevance, direct contributions.

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

import vitlens
from tests.oracles.test_timm_attention import difference
from vitlens import Model

LOGITS = 1e-4  # the largest difference over all 300 photographs was 1.5e-5 where this was written


@pytest.fixture(scope="module")
def deit(real_data: Path) -> Model:
    return vitlens.load(f"timm:deit_tiny_patch16_224@{real_data / 'weights' / 'deit_tiny_patch16_224.safetensors'}")


@pytest.fixture(scope="module")
def reference(real_data: Path) -> dict[str, np.ndarray]:
    with np.load(real_data / "deit_tiny_reference.npz", allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


@pytest.fixture(scope="module")
def photos(real_data: Path, reference: dict[str, np.ndarray]) -> list[Path]:
    return [real_data / "photos" / str(name).removeprefix("photos/") for name in reference["files"]]


def logits_of(model: Model, paths: list[Path]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(vitlens.images(paths[i : i + 20], model)) for i in range(0, len(paths), 20)])


@pytest.mark.parametrize("step", [25, pytest.param(1, marks=pytest.mark.slow)])
def test_stored_logits(deit, photos, reference, step):
    chosen = list(range(0, 300, step))
    found, expected = logits_of(deit, photos[::step]), torch.from_numpy(reference["logits"][chosen]).float()
    torch.testing.assert_close(found, expected, atol=LOGITS, rtol=0)
    if step == 1:
        correct = (found.argmax(-1) == torch.from_numpy(reference["labels"])).float().mean().item()
        assert round(100 * correct, 1) == 78.3
    assert (deit.layout.grid, deit.layout.prefix, deit.parameter_count()) == ((14, 14), ("cls",), 5_717_416)


def test_attention_is_timms_own_unfused(deit, photos):
    assert difference(deit, vitlens.images(photos[:2], deit)) < 1e-10


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_stored_rollout_relevance_and_last_layer(deit, real_data, reference, step):
    folder = real_data / "coco_masks"
    names = [Path(str(name)).name for name in reference["map_files"]][::step]
    whole = copy.copy(deit)
    # these are 224 px already and were taken whole, so that the masks fit
    whole.preprocessing = replace(deit.preprocessing, resize=None)
    batch = vitlens.images([folder / "images" / name for name in names], whole)
    expected = torch.from_numpy(reference["maps"][::step]).float()
    assert expected[:, 0].std(-1).min() > 1e-4  # a map of even numbers would not pass
    torch.testing.assert_close(vitlens.rollout(deit, batch).flatten(1), expected[:, 0], atol=1e-4, rtol=0)
    row = vitlens.attention(deit, batch, rows="cls")[-1].mean(1)[:, 0, 1:]
    torch.testing.assert_close(row, expected[:, 1], atol=1e-4, rtol=0)
    classes = {each["file"]: each["imagenet_class"] for each in json.loads((folder / "index.json").read_text())}
    found = vitlens.relevance(deit, batch, targets=[classes[name] for name in names]).flatten(1)
    torch.testing.assert_close(found, expected[:, 2], atol=1e-4, rtol=0)
    # the numbers are small: beside their largest too, image by image
    assert ((found - expected[:, 2]).abs().amax(1) < 1e-3 * expected[:, 2].amax(1)).all()


@pytest.mark.parametrize("truth", [False, True])
def test_direct_contributions_of_heads_and_the_rest_sum_to_the_logit(deit, photos, reference, truth):
    batch, labels = vitlens.images(photos[::30], deit), torch.from_numpy(reference["labels"][::30])
    found = vitlens.direct_logit_attribution(deit, batch, targets=labels if truth else "predicted")
    assert found.heads.shape == (10, 12, 3)
    assert found.logit.abs().max() > 5
    torch.testing.assert_close(found.total(), found.logit, atol=1e-4, rtol=0)
    # the classifier is written in the last layers
    heads = found.heads.abs().mean((0, 2))
    assert heads[8:].mean() > 3 * heads[2:7].mean()


def test_the_answer_is_made_in_the_last_layers(deit, photos, reference):
    batch, labels = vitlens.images(photos[::30], deit), torch.from_numpy(reference["labels"][::30])
    lens = vitlens.logit_lens(deit, batch).logits
    with torch.no_grad():
        torch.testing.assert_close(lens[:, -1], deit(batch), atol=1e-4, rtol=0)
    accuracy = (lens.argmax(-1) == labels.unsqueeze(1)).float().mean(0)
    assert accuracy[:6].max() <= 0.2
    assert accuracy[-1] >= 0.6
