"""How far attention moved: an oracle of plain loops, and independence of the batch."""

import copy

import pytest
import torch

import vitlens
from tests.lens.tiny import ours, torchvision_swin
from vitlens.analysis.attention import weights
from vitlens.analysis.attention.weights import attention_moved
from vitlens.data.digits import digits
from vitlens.errors import InputError
from vitlens.models.model import Model


def one_block_changed(vit: Model) -> Model:
    other = copy.deepcopy(vit)
    with torch.no_grad():
        other.module.get_submodule(other.anatomy.blocks[3]).get_parameter("mlp.fc1.weight").mul_(1.5)
    return other


def test_it_is_the_total_variation_by_plain_loops():
    vit, images = vitlens.load("vit-digits"), digits("test").limit(2)
    other = one_block_changed(vit)
    (found,) = attention_moved(vit, [other], images)
    first, second = (vitlens.attention(model, images)[5] for model in (vit, other))
    for image in range(2):
        for head in range(2):
            rows = [
                sum(max(0.0, a - b) for a, b in zip(*pair))
                for pair in zip(first[image, head].tolist(), second[image, head].tolist())
            ]
            assert found[5][image, head].item() == pytest.approx(sum(rows) / len(rows), abs=1e-6)


def test_only_the_layers_from_a_changed_block_on_move(monkeypatch):
    vit, images = vitlens.load("vit-digits"), digits("test").limit(5)
    other = one_block_changed(vit)
    same, moved = attention_moved(vit, [vit, other], images)
    assert all(not layer.any() for layer in same)
    assert [bool(layer.any()) for layer in moved] == [False] * 4 + [True] * 2  # its MLP is read by the next block
    assert all(layer.shape == (5, 4) for layer in moved)
    monkeypatch.setattr(weights, "_AT_ONCE", 2)
    again = attention_moved(vit, [other], images)[0]
    assert all(torch.allclose(first, second, atol=1e-6) for first, second in zip(moved, again))
    with pytest.raises(InputError, match="expected attention weights of one shape"):
        attention_moved(vit, [ours(size=(32, 32), depth=6)], images)


def test_windows_are_averaged_over():
    """Total variation of all windows of an image, in its layers."""
    first, images = torchvision_swin(), digits("test").limit(3)
    second = torchvision_swin()
    with torch.no_grad():
        for parameter in second.module.parameters():
            parameter.mul_(1.5)
    (found,) = attention_moved(first, [second], images)
    for layer, (one, two) in enumerate(zip(vitlens.attention(first, images), vitlens.attention(second, images))):
        moved = (one - two).abs().sum(-1).mean(-1) / 2  # (images x windows, heads)
        torch.testing.assert_close(found[layer], moved.view(3, -1, moved.shape[1]).mean(1))
