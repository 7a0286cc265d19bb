"""Correspondence: an image with itself is the identity, a moved patch is found where it went."""

import torch

from tests.lens.tiny import images, ours
from vitlens.analysis.features.features import patch_tokens
from vitlens.analysis.features.neighbours import correspond


def test_an_image_with_itself():
    tokens = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))
    found = correspond(tokens, tokens)
    assert len(found.sources) == 20
    assert torch.equal(found.sources, found.targets)
    torch.testing.assert_close(found.similarity, torch.ones(20).double())


def test_a_model_without_positions_finds_patches_where_they_were_moved():
    """Without positions a ViT does not know where a patch is: shuffled patches have the same tokens."""
    model = ours(positions=False)  # 4 x 3 patches of 8 x 16 px
    (image,) = images(model.input_size, batch=1)
    patches = image.unfold(1, 8, 8).unfold(2, 16, 16)  # (3, 4, 3, 8, 16)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    moved = patches.flatten(1, 2)[:, order].unflatten(1, (4, 3))
    other = moved.permute(0, 1, 3, 2, 4).reshape(3, *model.input_size)
    ((first, second),) = patch_tokens(model, torch.stack((image, other)))
    found = correspond(first, second)
    assert len(found.sources) == 12
    sources, targets = (places[:, 0] * 3 + places[:, 1] for places in (found.sources, found.targets))
    assert torch.equal(order[targets], sources)


def test_only_mutual_pairs_the_best_first():
    first = torch.tensor([[[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]])
    second = torch.tensor([[[1.0, 0.02]], [[0.1, 1.0]]])
    found = correspond(first, second)
    assert found.sources.tolist() == [[0, 0], [0, 2]]
    assert found.targets.tolist() == [[0, 0], [1, 0]]
    assert found.similarity[0] > found.similarity[1]


def test_grids_may_differ():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(3, 4, 8, generator=generator)
    other = torch.randn(5, 2, 8, generator=generator)
    found, back = correspond(tokens, other), correspond(other, tokens)
    assert torch.equal(found.sources, back.targets)
    assert torch.equal(found.targets, back.sources)
