"""The pointing game on maps made to hit, to miss and to tie."""

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from vitlens.analysis.faithfulness.localisation import (
    average_precision,
    baseline_scores,
    has_edge,
    mask_iou,
    mass_inside,
    pixel_accuracy,
    pointing_hits,
    pointing_rate,
    roc_auc,
)
from vitlens.errors import DataError, InputError


def mask() -> torch.Tensor:
    """The left half of 4x4 pixels."""
    inside = torch.zeros(1, 4, 4, dtype=torch.bool)
    inside[:, :, :2] = True
    return inside


@pytest.mark.parametrize(("column", "hit"), [(0, True), (1, True), (2, False), (3, False)])
def test_the_highest_point_decides(column, hit):
    maps = torch.zeros(1, 4, 4)
    maps[0, 1, column] = 1
    assert pointing_hits(maps, mask()).tolist() == [hit]


def test_ties_count_in_proportion_to_the_tied_points_inside():
    maps = torch.zeros(3, 4, 4)
    maps[0, 0, 0] = maps[0, 3, 1] = 1  # both inside
    maps[1, 0, 0] = maps[1, 0, 2] = maps[1, 0, 3] = 1  # two outside; the third map is constant
    assert pointing_hits(maps, mask().expand(3, 4, 4)).tolist() == pytest.approx([1, 1 / 3, 0.5])


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -2.5])
def test_a_uniform_map_points_everywhere_alike(value):
    """Neither before nor after interpolation, whose rounding makes one of its pixels the highest."""
    random = torch.Generator().manual_seed(0)
    uniform = torch.full((8, 7, 7), value) * (1 + 1e-7 * torch.rand(8, 7, 7, generator=random))
    inside = torch.ones(8, 50, 50, dtype=torch.bool)
    inside[:, 0, 0] = False
    torch.testing.assert_close(pointing_hits(uniform, inside), inside.flatten(1).float().mean(1))
    uniform[:, 3, 3] += 0.1
    assert (pointing_hits(uniform, inside) == 1).all()


def test_the_rate_of_a_point_at_the_centre_is_not_made_weaker_by_an_even_grid():
    """Objects that move one pixel around the centre: of the four tied points in the middle, most lie on them."""
    centre = torch.zeros(4, 4)
    centre[1:3, 1:3] = 1
    masks = torch.zeros(4, 4, 4, dtype=torch.bool)
    for index, (row, column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        masks[index, row : row + 2, column : column + 2] = True
    hits = pointing_hits(centre.expand(4, 4, 4), masks)
    assert hits.tolist() == [0.25, 0.5, 0.5, 1]
    rate = pointing_rate(hits)
    assert rate.value == pytest.approx(0.5625)
    assert rate.low < rate.value < rate.high


def test_an_empty_mask_is_refused():
    with pytest.raises(DataError, match="empty"):
        pointing_hits(torch.rand(1, 2, 2), torch.zeros(1, 4, 4, dtype=torch.bool))


def made(seed: int = 0, *, ties: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(5, 12, 10, generator=generator)
    masks = torch.rand(5, 12, 10, generator=generator) < torch.tensor([0.05, 0.3, 0.5, 0.7, 0.95])[:, None, None]
    return (maps.round() if ties else maps), masks


@pytest.mark.parametrize("ties", [False, True])
def test_ranks_are_scikit_learns(ties):
    maps, masks = made(ties=ties)
    for found, theirs in ((roc_auc, roc_auc_score), (average_precision, average_precision_score)):
        expected = [theirs(mask.flatten(), one.flatten()) for one, mask in zip(maps.numpy(), masks.numpy())]
        assert found(maps, masks).tolist() == pytest.approx(expected, abs=1e-6)


def test_what_no_knowledge_gives():
    _, masks = made()
    constant = torch.full((5, 3, 3), 2.0)
    assert roc_auc(constant, masks).tolist() == pytest.approx([0.5] * 5)
    areas = masks.flatten(1).float().mean(1)
    torch.testing.assert_close(average_precision(constant, masks), areas)
    torch.testing.assert_close(mass_inside(constant, masks), areas)


@pytest.mark.parametrize("value", [1.0, 0.1, 1 / 3])
def test_a_uniform_map_ranks_nothing_in_any_size(value):
    """Interpolation from 6x6 to 36x48 pixels rounds, and rounding must not rank pixels."""
    inside = torch.zeros(2, 36, 48, dtype=torch.bool)
    inside[:, 18:, :24] = True
    assert roc_auc(torch.full((2, 6, 6), value), inside).tolist() == [0.5, 0.5]
    assert average_precision(torch.full((2, 6, 6), value), inside).tolist() == [0.25, 0.25]


def test_a_perfect_map_and_its_opposite():
    _, masks = made()
    maps = masks.float()
    for score in (roc_auc, average_precision, mask_iou, pixel_accuracy, mass_inside):
        assert score(maps, masks).tolist() == pytest.approx([1.0] * 5)
    assert roc_auc(-maps, masks).tolist() == [0.0] * 5
    assert mask_iou(-maps, masks).tolist() == [0.0] * 5
    assert mass_inside(-maps, masks).tolist() == [0.0] * 5  # nothing positive anywhere


def test_thresholds_by_hand():
    maps = torch.tensor([[[4.0, 0.0], [1.0, 1.0]]])  # mean 1.5: one pixel lies above
    masks = torch.tensor([[[True, True], [False, False]]])
    assert mask_iou(maps, masks).tolist() == [0.5]
    assert pixel_accuracy(maps, masks).tolist() == [0.75]
    assert mass_inside(maps, masks).tolist() == pytest.approx([4 / 6])
    assert roc_auc(maps, masks).tolist() == [0.5]


def test_maps_are_brought_to_the_masks_bilinearly():
    maps = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0))
    masks = torch.zeros(2, 16, 16, dtype=torch.bool)
    masks[:, 3:9, 2:12] = True
    large = torch.nn.functional.interpolate(maps[:, None], size=(16, 16), mode="bilinear", align_corners=False)[:, 0]
    torch.testing.assert_close(roc_auc(maps, masks), roc_auc(large, masks))


def test_masks_that_say_nothing():
    maps, masks = made()
    masks[2] = True
    masks[4] = False
    assert has_edge(masks).tolist() == [True, True, False, True, False]
    with pytest.raises(DataError, match="2 without \\(image 2"):
        roc_auc(maps, masks)
    with pytest.raises(InputError, match="5 maps, found 4"):
        mask_iou(maps, masks[:4])


def test_objects_in_one_place_are_found_without_an_image():
    masks = torch.zeros(12, 16, 16, dtype=torch.bool)
    masks[:, :4, :4] = True
    found = baseline_scores(mass_inside, masks.float(), masks)
    assert found["a uniform map"].tolist() == pytest.approx([1 / 16] * 12)
    assert found["the mean mask of the other images"].tolist() == [1.0] * 12  # no map can score more
    assert found["the map of another image"].tolist() == [1.0] * 12
    assert float(found["a map of the centre"].max()) < 1 / 16


def test_the_others_of_an_image_are_of_other_groups():
    groups = torch.tensor([0, 1, 0, 2, 1, 1, 0])
    masks = torch.zeros(7, 8, 8, dtype=torch.bool)
    for image, group in enumerate(groups.tolist()):
        masks[image, group, image] = True  # a row for each group
    rows = torch.eye(8)[groups][:, :, None].expand(7, 8, 8)  # each map: the row of its group
    seen = []

    def by_group(maps, given):
        seen.append(maps)
        return mass_inside(maps, given)

    found = baseline_scores(by_group, rows, masks, groups=groups, seed=3)
    assert found["the map of another image"].tolist() == [0.0] * 7
    mean, other = seen[2], seen[3]
    for image in range(7):
        outside = groups != groups[image]
        assert torch.allclose(mean[image], masks[outside].float().mean(0), atol=1e-6)
        assert other[image].sum(1).argmax() != groups[image]
    assert len({tuple(maps.flatten().tolist()) for maps in other}) > 1
    alone = baseline_scores(mass_inside, rows, masks, groups=torch.zeros(7))
    assert set(alone) == {"a uniform map", "a map of the centre"}
