"""The head whose attention overlaps objects, by a plain loop and with planted heads."""

import pytest
import torch

from vitlens.analysis.features.objectness import area_iou, objectness
from vitlens.errors import DataError

# cells of a map along a side, px of a cell
SIDE = 4
CELL = 3


def masks(count: int, *, seed: int = 0) -> torch.Tensor:
    """Draw rectangles at random places, which cover any part of a cell."""
    generator = torch.Generator().manual_seed(seed)
    side = SIDE * CELL
    drawn = torch.zeros(count, side, side, dtype=torch.bool)
    for mask in drawn:
        top, left = torch.randint(0, side - 5, (2,), generator=generator).tolist()
        tall, wide = torch.randint(2, 6, (2,), generator=generator).tolist()
        mask[top : top + tall, left : left + wide] = True
    return drawn


def noise(count: int, heads: int, *, seed: int = 1) -> torch.Tensor:
    return torch.rand(count, heads, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def planted(count: int, *, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw maps of noise, except for a head that sees the object's share of each cell."""
    objects = masks(count)
    maps = noise(count, 4)
    cells = objects.view(count, SIDE, CELL, SIDE, CELL).double().mean((2, 4))
    maps[:, head] = cells.float() + 0.01 * maps[:, head]
    return maps, objects


def looped(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Compute the overlap by a loop from the highest cell down until the mask's area is marked.

    Equal cells share what is left.
    """
    left = float(mask.sum())
    both = 0.0
    for level in sorted(set(values.flatten().tolist()), reverse=True):
        equal = [
            (row, column)
            for row in range(SIDE)
            for column in range(SIDE)
            if values[row, column] == level
        ]
        share = min(1.0, left / (len(equal) * CELL**2))
        for row, column in equal:
            cell = mask[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
            both += share * float(cell.sum())
        left -= share * len(equal) * CELL**2
    return both / (2 * float(mask.sum()) - both)


def test_overlap_is_that_of_a_plain_loop_with_ties_in_proportion():
    objects = masks(70)
    maps = noise(70, 3)
    maps[:, 1] = (4 * maps[:, 1]).floor()  # ties
    maps[:, 2] = 0.5  # all equal
    overlap = area_iou(maps, objects)
    for image in range(70):
        expected = [looped(maps[image, head], objects[image]) for head in range(3)]
        assert overlap[image].tolist() == pytest.approx(expected, rel=1e-9)
    area = objects.double().mean((1, 2))
    assert torch.allclose(overlap[:, 2], area / (2 - area))  # of a constant map: chance


def test_a_planted_head_is_found_and_measured_on_the_other_half():
    maps, objects = planted(60, head=2)
    result = objectness(maps, objects)
    assert result.heads == (2, 2)
    assert torch.equal(result.iou, area_iou(maps, objects)[:, 2])
    assert result.iou.mean() > result.mean_mask.mean() + 0.2
    assert result.iou.mean() > result.shuffled.mean() + 0.2


def test_maps_of_other_images_do_not_pass():
    maps, objects = planted(60, head=2)
    result = objectness(maps.roll(1, 0), objects)  # each map is of another image
    assert abs(float(result.iou.mean() - result.shuffled.mean())) < 0.1
    assert result.mean_mask.mean() > result.iou.mean() - 0.1


def test_a_head_that_is_best_by_chance_is_not_measured_where_it_was_chosen():
    objects = masks(40)
    maps = noise(40, 30)
    result = objectness(maps, objects)
    every = area_iou(maps, objects)
    first, second = result.heads
    assert first != second
    best = every.mean(0).max()
    assert result.iou.mean() < best  # the maximum over heads on the same images is too high
    assert {*result.iou.tolist()} <= {*every[:, first].tolist(), *every[:, second].tolist()}


def test_the_mean_mask_is_of_images_that_are_not_measured():
    """One image has its own mask: the mean that it is compared with is that of all others."""
    objects = torch.zeros(4, SIDE * CELL, SIDE * CELL, dtype=torch.bool)
    objects[:, :5, :5] = True
    objects[3] = objects[3].flip(0, 1)
    result = objectness(noise(4, 2), objects)
    mean_of_others = objects[:1].view(1, 1, SIDE, CELL, SIDE, CELL).double().mean((3, 5))
    assert result.mean_mask[3] == area_iou(mean_of_others, objects[3:4])[0, 0]


@pytest.mark.parametrize(
    ("count", "empty", "says"), [(3, False, "at least 4 images"), (8, True, r"image 5\)")]
)
def test_what_cannot_be_measured_is_refused(count, empty, says):
    objects = masks(count)
    if empty:
        objects[5] = False
    with pytest.raises(DataError, match=says):
        objectness(noise(count, 2), objects)
