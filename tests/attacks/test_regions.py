"""Regions of allowed changes: bands of frequencies and squares of pixels."""

import pytest
import torch
from torch import Tensor

from tests.attacks.models import linear, perceptron, pictures, tiny_vit
from vitlens.attacks.attack import attack
from vitlens.attacks.descent import CUTOFF, ranked_positions, squares


@pytest.mark.parametrize("part", ["low", "high"])
def test_changes_have_the_frequencies_of_their_part_alone(part):
    model, images = perceptron((16, 12)), pictures(10, (16, 12), low=0.4, high=0.6)
    result = attack(model, images, "predicted", method=f"{part}-frequency", epsilon=0.2)
    assert result.success.any()
    spectrum = torch.fft.rfft2((result.images - images)[result.success]).abs()
    down, across = 2 * torch.fft.fftfreq(16), 2 * torch.fft.rfftfreq(12)
    inside = (torch.hypot(down[:, None], across[None]) <= CUTOFF + 1e-6) == (part == "low")
    assert spectrum[..., ~inside].max() < 1e-4 * spectrum[..., inside].max()


def boxes(images: Tensor, clean: Tensor) -> list[tuple[int, int, int, int]]:
    """Top, left, bottom and right of what was changed."""
    found = []
    for changed in (images != clean).any(1):
        rows, columns = changed.any(1).nonzero()[:, 0].tolist(), changed.any(0).nonzero()[:, 0].tolist()
        found.append((rows[0], columns[0], rows[-1], columns[-1]))
    return found


@pytest.mark.parametrize(("aligned", "side"), [(True, 4), (False, 3), (True, None)])
def test_a_patch_is_one_square_on_tokens_or_anywhere(aligned, side):
    model, images = tiny_vit((16, 12)), pictures(16, (16, 12))
    result = attack(model, images, "predicted", method="patch", side=side, aligned=aligned, restarts=6, steps=5, seed=3)
    assert result.success.sum() > 3
    changed, length = boxes(result.images[result.success], images[result.success]), side or 3
    for top, left, bottom, right in changed:
        assert max(bottom - top, right - left) < length
        assert not aligned or (top // 4 == bottom // 4 and left // 4 == right // 4)
    assert len({(top // 4, left // 4) for top, left, _, _ in changed}) > 1
    assert (result.distance <= length**2 / (16 * 12) + 1e-6).all()


def test_a_patch_lies_where_the_attribution_is_largest_and_each_restart_takes_the_next_place():
    model, images = linear((8, 12)), pictures(12, (8, 12))
    maps, best = torch.zeros(12, 4, 6), [(row % 4, row % 6) for row in range(12)]
    for row, place in enumerate(best):
        maps[(row, *place)] = 1.0 + row
    result = attack(model, images, "predicted", method="patch", side=2, maps=maps, steps=20)
    assert result.success.sum() > 2
    rows = result.success.nonzero()[:, 0].tolist()
    for row, (top, left, _, _) in zip(rows, boxes(result.images[rows], images[rows])):
        assert (top // 2, left // 2) == best[row]
    model, images = perceptron((8, 8), seed=4), pictures(12, (8, 8), seed=4)
    maps = torch.rand(12, 2, 2, generator=torch.Generator().manual_seed(1))
    one, two, four = (
        attack(model, images, "predicted", method="patch", side=4, maps=maps, restarts=restarts, steps=10).success
        for restarts in (1, 2, 4)
    )
    assert (one <= two).all()
    assert (two <= four).all()
    assert one.sum() < four.sum()


def test_positions_are_ranked_by_the_attribution_within_the_square():
    maps = torch.tensor([[[0.0, 3.0], [1.0, 2.0]], [[-1.0, -2.0], [5.0, 5.0]]])
    assert ranked_positions(maps, (4, 4), side=2, step=(2, 2)).tolist() == [[1, 3, 2, 0], [2, 3, 0, 1]]
    ranked = ranked_positions(maps, (4, 4), side=2, step=(1, 1))
    assert (ranked.shape, ranked[1, 0]) == ((2, 9), 6)
    masks = squares((3, 4), torch.tensor([0, 1]), torch.tensor([2, 0]), torch.tensor([1, 2]))
    assert masks[0, 0].int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert masks[1, 0].int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
