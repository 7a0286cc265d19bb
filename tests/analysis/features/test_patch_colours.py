"""Patches as colours: one PCA for all images, foreground by threshold, colours from least to greatest."""

import pytest
import torch
from torch import Tensor

from vitlens.analysis.features.embedding import principal
from vitlens.analysis.features.patch_colours import patch_components
from vitlens.errors import DataError, InputError


def scenes(*, flip: float = 1.0) -> tuple[Tensor, Tensor]:
    """Two images of 8 x 10 patches: an object in the middle, of parts left and right, on a background."""
    generator = torch.Generator().manual_seed(0)
    background, left, right = torch.randn(3, 12, generator=generator) * 4
    tokens = background + 0.1 * torch.randn(2, 8, 10, 12, generator=generator)
    shift = torch.zeros(12)
    shift[0] = 50 * flip  # what parts object from background is the greatest variance
    tokens[:, 2:6, 2:5] += left + shift
    tokens[:, 2:6, 5:8] += right + shift
    mask = torch.zeros(2, 8, 10, dtype=torch.bool)
    mask[:, 2:6, 2:8] = True
    return tokens, mask


def test_scores_are_the_principal_components_of_all_patches_together():
    tokens, _ = scenes()
    found = patch_components(tokens)
    scores, explained = principal(tokens.flatten(0, 2), count=3)
    assert torch.equal(found.scores, scores.view(2, 8, 10, 3))
    assert torch.equal(found.explained, explained)
    assert found.foreground.all()


def test_like_patches_of_two_images_have_like_colours():
    colours = patch_components(scenes()[0]).colours()
    assert colours.min() == 0
    assert colours.max() == 1
    same, apart = colours[0, 3, 3] - colours[1, 4, 4], colours[0, 3, 3] - colours[0, 0, 0]
    assert same[:2].abs().max() < 0.1  # three kinds of patches span a plane; the third component is noise
    assert apart[:2].abs().max() > 0.8


@pytest.mark.parametrize("flip", [1.0, -1.0])
def test_the_foreground_is_what_the_borders_have_less_of(flip):
    tokens, mask = scenes(flip=flip)
    found = patch_components(tokens, foreground=0.5)
    assert torch.equal(found.foreground, mask)
    assert torch.equal(found.colours()[~mask], torch.zeros(int((~mask).sum()), 3).double())
    inside, explained = principal(tokens[mask], count=3)
    assert torch.equal(found.scores[mask], inside)
    assert torch.equal(found.explained, explained)


def test_a_component_that_does_not_vary_is_at_one_half():
    line = torch.linspace(0, 1, 12).view(1, 3, 4, 1).repeat(1, 1, 1, 2)
    found = patch_components(line)
    colours = found.colours()
    assert colours[..., 0].min() == 0
    assert (colours[..., 2] == 0.5).all()


def test_what_cannot_be_coloured():
    tokens, _ = scenes()
    with pytest.raises(InputError, match=r"expected a threshold of the foreground from 0 to 1, found 1\.5"):
        patch_components(tokens, foreground=1.5)
    with pytest.raises(DataError, match="expected at least 4 patches to colour, found 1"):
        patch_components(tokens[:1, :1, :1])
    with pytest.raises(DataError, match="expected features that differ"):
        patch_components(torch.ones(1, 3, 3, 4))
