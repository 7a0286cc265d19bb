"""How far attention moved: its identities, an oracle of plain loops, and independence of the batch."""

import copy

import pytest
import torch

import vitlens
from vitlens.analysis.attention import change
from vitlens.analysis.attention.change import attention_moved, moved_share
from vitlens.data.digits import digits
from vitlens.errors import InputError


def weights(seed: int, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).softmax(-1)


def test_equal_rows_have_not_moved_and_rows_without_a_common_key_have_moved_entirely():
    first = weights(0, 2, 3, 5, 5)
    assert torch.equal(moved_share(first, first), torch.zeros(2, 3))
    eye = torch.eye(4).expand(1, 2, 4, 4)
    assert torch.equal(moved_share(eye, eye.roll(1, -1)), torch.ones(1, 2))


def test_it_is_the_total_variation_by_plain_loops():
    first, second = weights(1, 2, 2, 4, 6), weights(2, 2, 2, 4, 6)
    found = moved_share(first, second)
    assert torch.equal(found, moved_share(second, first))
    for image in range(2):
        for head in range(2):
            rows = [
                sum(max(0.0, float(a - b)) for a, b in zip(first[image, head, query], second[image, head, query]))
                for query in range(4)
            ]
            assert found[image, head].item() == pytest.approx(sum(rows) / 4, abs=1e-6)


def test_attention_of_other_shapes_is_refused():
    with pytest.raises(InputError, match="expected attention weights of one shape"):
        moved_share(weights(0, 1, 2, 4, 4), weights(0, 1, 2, 5, 5))


def test_only_the_layers_from_a_changed_block_on_move(monkeypatch):
    vit, images = vitlens.load("vit-digits"), digits("test").limit(5)
    other = copy.deepcopy(vit)
    with torch.no_grad():
        other.module.get_submodule(other.anatomy.blocks[3]).get_parameter("mlp.fc1.weight").mul_(1.5)
    same, moved = attention_moved(vit, [vit, other], images)
    assert all(not layer.any() for layer in same)
    assert [bool(layer.any()) for layer in moved] == [False] * 4 + [True] * 2  # its MLP is read by the next block
    assert all(layer.shape == (5, 4) for layer in moved)
    monkeypatch.setattr(change, "_AT_ONCE", 2)
    again = attention_moved(vit, [other], images)[0]
    assert all(torch.allclose(first, second, atol=1e-6) for first, second in zip(moved, again))


def test_windows_are_averaged_over():
    values = torch.tensor([[0.2], [0.4], [0.0], [1.0]])  # two images of two windows
    assert change._by_image(values, 2).flatten().tolist() == pytest.approx([0.3, 0.5])
