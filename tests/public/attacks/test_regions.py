"""Regions of allowed changes: bands of frequencies and squares of pixels."""

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.attacked import asked, perceptron, pictures, robust, tiny_vit


@pytest.mark.parametrize("part", ["low", "high"])
def test_changes_have_the_frequencies_of_their_part_alone(part):
    """Low: up to half of Nyquist's."""
    model, images = perceptron((16, 12)), pictures(10, (16, 12), low=0.4, high=0.6)
    result = vitlens.attack(model, images, "predicted", method=f"{part}-frequency", epsilon=0.2)
    assert result.success.any()
    spectrum = torch.fft.rfft2((result.images - images)[result.success]).abs()
    down, across = 2 * torch.fft.fftfreq(16), 2 * torch.fft.rfftfreq(12)
    inside = (torch.hypot(down[:, None], across[None]) <= 0.5 + 1e-6) == (part == "low")
    assert spectrum[..., ~inside].max() < 1e-4 * spectrum[..., inside].max()
    assert 0.19 < result.distance.max() <= 0.2 + 1e-6  # the whole budget is used


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
    result = vitlens.attack(
        model, images, "predicted", method="patch", side=side, aligned=aligned, restarts=6, steps=5, seed=3
    )
    assert result.success.sum() > 3
    changed, length = boxes(result.images[result.success], images[result.success]), side or 3
    for top, left, bottom, right in changed:
        assert max(bottom - top, right - left) < length
        assert not aligned or (top // 4 == bottom // 4 and left // 4 == right // 4)
    assert aligned or any(top % 4 and left % 4 for top, left, _, _ in changed)
    assert len({(top // 4, left // 4) for top, left, _, _ in changed}) > 1
    assert max(bottom - top for top, _, bottom, _ in changed) == length - 1


def test_a_patch_may_lie_at_every_place():
    model, images = robust((6, 4)), pictures(200, (6, 4)).double()
    with asked(model) as seen:
        vitlens.attack(model, images, "predicted", method="patch", side=2, aligned=False, steps=1, batch_size=200)
    starts = torch.cat([points.detach() for points in seen])
    moved = [row for row in range(len(starts)) if len(starts) and not torch.equal(starts[row], images[row % 200])]
    places = {box[:2] for row in moved for box in boxes(starts[row : row + 1], images[row % 200 : row % 200 + 1])}
    assert places >= {(top, left) for top in range(5) for left in range(3)}


def test_each_restart_takes_the_place_of_the_next_largest_attribution():
    """Of equal ones the first in reading order; after the last place the first again."""
    model, images = robust((4, 6)), pictures(2, (4, 6), low=0.2, high=0.8).double()
    maps = torch.tensor([[[0.0, 3.0, 5.0], [1.0, 2.0, 4.0]], [[-1.0, -2.0, 0.0], [5.0, 5.0, -3.0]]])
    with asked(model) as seen:
        vitlens.attack(model, images, "predicted", method="patch", side=2, maps=maps, steps=1, restarts=7)
    firsts = [boxes(points.detach(), images) for points in seen[1::2]]
    found = [[3 * (both[row][0] // 2) + both[row][1] // 2 for both in firsts] for row in range(2)]
    assert found == [[2, 5, 1, 4, 3, 0, 2], [3, 4, 2, 0, 1, 5, 3]]
