"""DeiT-tiny's real weights: the direct contributions of its heads sum to the logits of real photographs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlens.analysis.patching.contribution import direct_logit_attribution, logits_by_depth
from vitlens.data.decode import decode
from vitlens.lens.intervene import intervene
from vitlens.models import loading
from vitlens.models.model import Model
from vitlens.models.rebuild import prune_heads


@pytest.fixture(scope="module")
def deit(real_data: Path) -> Model:
    return loading.load(f"timm:deit_tiny_patch16_224@{real_data / 'weights' / 'deit_tiny_patch16_224.safetensors'}")


@pytest.fixture(scope="module")
def photos(deit: Model, real_data: Path) -> tuple[Tensor, Tensor]:
    """Ten photographs and their labels."""
    with np.load(real_data / "deit_tiny_reference.npz", allow_pickle=False) as stored:
        names, labels = stored["files"][::30], torch.from_numpy(stored["labels"][::30])
    files = [real_data / "photos" / str(name).removeprefix("photos/") for name in names]
    return torch.stack([decode(file, deit.preprocessing)[0] for file in files]).float() / 255, labels


@pytest.mark.parametrize("truth", [False, True])
def test_heads_and_the_rest_sum_to_the_logit(deit, photos, truth):
    found = direct_logit_attribution(deit, photos[0], photos[1] if truth else "predicted")
    assert found.heads.shape == (10, 12, 3)
    assert found.logit.abs().max() > 5
    torch.testing.assert_close(found.total(), found.logit, atol=1e-4, rtol=0)
    # the classifier is written in the last layers
    heads = found.heads.abs().mean((0, 2))
    assert heads[8:].mean() > 3 * heads[2:7].mean()


def test_the_answer_is_made_in_the_last_layers(deit, photos):
    lens = logits_by_depth(deit, photos[0])
    with torch.no_grad():
        torch.testing.assert_close(lens[:, -1], deit(photos[0]), atol=1e-4, rtol=0)
    accuracy = (lens.argmax(-1) == photos[1].unsqueeze(1)).float().mean(0)
    assert accuracy[:6].max() <= 0.2
    assert accuracy[-1] >= 0.6


def test_pruned_it_answers_as_with_the_heads_at_zero(deit, photos):
    heads = {layer: (layer % 3,) for layer in range(12)}
    pruned = prune_heads(deit, heads)
    with torch.no_grad():
        with intervene(deit, {f"blocks.{layer}.head.{head}": "zero" for layer, (head,) in heads.items()}):
            masked = deit(photos[0])
        torch.testing.assert_close(pruned(photos[0]), masked, atol=1e-4, rtol=0)
    assert pruned.parameter_count() == deit.parameter_count() - 12 * (4 * 64 * 192 + 3 * 64)
