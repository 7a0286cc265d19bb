"""Patches as colours: one PCA for all images, colours from least to greatest."""

import pytest
import torch
from torch import Tensor

from vitlens.analysis.features.embedding import patch_components, principal
from vitlens.errors import DataError


def scenes() -> Tensor:
    """Two images of 8 x 10 patches: an object in the middle, of parts left and right, on a background."""
    generator = torch.Generator().manual_seed(0)
    background, left, right = torch.randn(3, 12, generator=generator) * 4
    tokens = background + 0.1 * torch.randn(2, 8, 10, 12, generator=generator)
    shift = torch.zeros(12)
    shift[0] = 50  # what parts object from background is the greatest variance
    tokens[:, 2:6, 2:5] += left + shift
    tokens[:, 2:6, 5:8] += right + shift
    return tokens


def test_scores_are_the_principal_components_of_all_patches_together():
    tokens = scenes()
    found = patch_components(tokens)
    scores, explained = principal(tokens.flatten(0, 2), count=3)
    assert torch.equal(found.scores, scores.view(2, 8, 10, 3))
    assert torch.equal(found.explained, explained)


def test_like_patches_of_two_images_have_like_colours():
    colours = patch_components(scenes()).colours()
    assert colours.min() == 0
    assert colours.max() == 1
    same, apart = colours[0, 3, 3] - colours[1, 4, 4], colours[0, 3, 3] - colours[0, 0, 0]
    assert same[:2].abs().max() < 0.1  # three kinds of patches span a plane; the third component is noise
    assert apart[:2].abs().max() > 0.8


def test_a_component_that_does_not_vary_is_at_one_half():
    line = torch.linspace(0, 1, 12).view(1, 3, 4, 1).repeat(1, 1, 1, 2)
    found = patch_components(line)
    colours = found.colours()
    assert colours[..., 0].min() == 0
    assert (colours[..., 2] == 0.5).all()


def test_what_cannot_be_coloured():
    with pytest.raises(DataError, match="expected features that differ"):
        patch_components(torch.ones(1, 3, 3, 4))
