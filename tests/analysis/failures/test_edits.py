"""What the causal tests change in an image, and what they leave."""

import pytest
import torch

from vitlens.analysis.failures.edits import (
    can_be_enlarged,
    changed_cells,
    enlarged_objects,
    random_cells,
    without_marked,
    without_part,
    zooms,
)
from vitlens.analysis.failures.rules import map_cells
from vitlens.analysis.faithfulness.masking import pixel_masks

GRID = (8, 8)


@pytest.fixture
def scene() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two images of 32 px with a bright object of 8 px and a bright patch off it, masks, and maps that mark both."""
    images = torch.full((2, 3, 32, 32), 0.2)
    masks = torch.zeros(2, 32, 32, dtype=torch.bool)
    masks[0, 8:16, 8:16] = masks[1, 4:12, 16:24] = True
    images[masks[:, None].expand_as(images)] = 0.9
    images[:, :, 28:, 28:] = 0.8
    maps = torch.full((2, *GRID), 1e-3)
    maps[:, 7, 7] = 1.0
    maps[0, 2, 2] = maps[1, 1, 4] = 0.9
    return images, masks, maps


def test_marked_cells_off_the_object_become_their_surroundings(scene):
    images, masks, maps = scene
    edited = without_marked(images, masks, map_cells(maps, masks, grid=GRID))
    kept = masks[:, None].expand_as(images)
    assert (edited.changed[:, :, 28:, 28:] - 0.2).abs().max() < 0.06
    for changed in edited:
        assert torch.equal(changed[kept], images[kept])
        different = changed_cells(changed, images, GRID)
        assert different.sum(1).max() <= 1, "as many cells as are marked"
    assert torch.equal(edited.changed[:, :, :28], images[:, :, :28])


def test_the_marked_part_of_an_object_becomes_its_surroundings(scene):
    images, masks, maps = scene
    cells = map_cells(maps, masks, grid=GRID)
    edited = without_part(images, masks, cells)
    assert (edited.changed[0, :, 8:12, 8:12] - 0.2).abs().max() < 0.06
    assert torch.equal(edited.changed[0, :, 12:16], images[0, :, 12:16])
    different = changed_cells(edited.control, images, GRID)
    assert different.sum(1).tolist() == [1, 1]
    assert (different & cells.objects).sum(1).tolist() == [1, 1]


def test_an_object_is_enlarged_and_the_control_keeps_its_size(scene):
    images, masks, _ = scene
    zoom = zooms(masks)
    assert zoom.tolist() == pytest.approx([32 / (8 * 1.1 + 2)] * 2)
    changed, control = enlarged_objects(images, masks)
    area = masks[0].sum()
    for image, factor in ((changed, float(zoom[0]) ** 2), (control, 1.0)):
        bright = (image > 0.55).float().mean(1).sum((1, 2))
        assert bright.tolist() == pytest.approx([float(area) * factor] * 2, rel=0.15)
        assert (image[:, :, 14:18, 14:18] > 0.8).all(), "the object is in the centre"
        assert (image[:, :, -2:, -2:] < 0.3).all(), "nothing from outside the crop is left"


def test_objects_that_fill_the_image_are_not_enlarged():
    masks = torch.zeros(3, 32, 32, dtype=torch.bool)
    masks[0, 2:30, 2:30] = masks[1, 10:20, 10:20] = True
    assert can_be_enlarged(masks).tolist() == [False, True, False]


def test_random_cells_are_as_many_as_asked_among_the_allowed():
    allowed = torch.rand(6, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    counts = torch.arange(6)
    chosen = random_cells(allowed, counts, seed=1)
    assert torch.equal(chosen.sum(1), counts)
    assert not (chosen & ~allowed).any()
    assert torch.equal(chosen, random_cells(allowed, counts, seed=1))
    assert not torch.equal(chosen, random_cells(allowed, counts, seed=2))


def test_images_whose_sides_the_grid_does_not_divide_keep_their_object():
    masks = torch.zeros(1, 30, 30, dtype=torch.bool)
    masks[0, 3:17, 5:19] = True
    images = torch.rand(1, 3, 30, 30, generator=torch.Generator().manual_seed(0))
    maps = torch.rand(1, *GRID, generator=torch.Generator().manual_seed(1))
    cells = map_cells(maps, masks, grid=GRID)
    assert cells.known.all()
    kept = masks[:, None].expand_as(images)
    for changed in without_marked(images, masks, cells):
        assert torch.equal(changed[kept], images[kept])
    assert pixel_masks(cells.objects, GRID, (30, 30)).shape == (1, 1, 30, 30)
