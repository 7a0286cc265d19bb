"""RISE: its masks, a plain loop over them, and a model that depends on one corner only."""

import pytest
import torch
from torch import Tensor, nn

from tests.attribution.models import with_layout
from tests.lens.tiny import images, ours
from vitlens.attribution import masked as module
from vitlens.attribution.masked import rise
from vitlens.errors import InputError
from vitlens.shapes import TokenLayout

TARGETS = torch.tensor([1, 4])


class Corner(nn.Module):
    """The brighter the lower right corner, the likelier class 1."""

    def forward(self, pixels: Tensor) -> Tensor:
        seen = pixels[:, :, -6:, -6:].mean((1, 2, 3))
        return torch.stack((torch.zeros_like(seen), 8 * seen, *[torch.full_like(seen, -9.0)] * 3), 1)


def test_masks_are_soft_and_half_visible():
    generator = torch.Generator().manual_seed(0)
    masks = torch.stack([module._mask((30, 44), generator) for _ in range(400)])
    assert masks.shape == (400, 30, 44)
    assert masks.min() == 0
    assert masks.max() == 1
    assert ((masks > 0.1) & (masks < 0.9)).float().mean() > 0.2
    torch.testing.assert_close(masks.mean((0,)), torch.full((30, 44), 0.5), atol=0.12, rtol=0)


def test_values_equal_a_plain_loop():
    model, batch = ours(), images((32, 48))
    maps = rise(model, batch, TARGETS, masks=9, seed=3)
    generator = torch.Generator().manual_seed(3)
    expected, covered = torch.zeros(2, 32, 48), torch.zeros(32, 48)
    for _ in range(9):
        mask = module._mask((32, 48), generator)
        with torch.no_grad():  # black after normalisation is the mean colour
            logits = model.module(model.prepare(batch) * mask)
        expected += logits.softmax(-1).gather(1, TARGETS[:, None])[:, :, None] * mask
        covered += mask
    torch.testing.assert_close(maps, expected / covered, atol=1e-5, rtol=1e-4)


def test_it_finds_the_place_that_matters():
    model = with_layout(Corner(), TokenLayout((4, 4), (8, 8)))
    maps = rise(model, torch.ones(1, 3, 32, 32), torch.tensor([1]), masks=400)
    row, column = divmod(int(maps[0].argmax()), 32)
    assert row >= 22
    assert column >= 22


def test_the_map_of_a_constant_model_is_constant():
    model = with_layout(nn.Sequential(Corner(), nn.Threshold(99.0, 1.0)), TokenLayout((4, 4), (8, 8)))
    maps = rise(model, torch.rand(2, 3, 32, 32), TARGETS, masks=40)
    torch.testing.assert_close(maps, torch.full_like(maps, 0.2))


def test_no_mask_is_refused():
    with pytest.raises(InputError, match="masks of at least 1, found 0"):
        rise(ours(), images((32, 48)), TARGETS, masks=0)
