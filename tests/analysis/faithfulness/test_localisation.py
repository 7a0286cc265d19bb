"""Localisation beside scikit-learn's scores, on maps made to hit, miss and tie; baselines that ignore the image."""

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch.nn import functional as F

from vitlens.analysis.faithfulness.localisation import (
    SCORES,
    average_precision,
    baseline_scores,
    centre_maps,
    has_edge,
    mask_iou,
    mass_inside,
    pixel_accuracy,
    pointing_hits,
    pointing_rate,
    random_maps,
    roc_auc,
)
from vitlens.errors import DataError


def made(*, ties: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(5, 12, 10, generator=generator)
    masks = torch.rand(5, 12, 10, generator=generator) < torch.tensor([0.05, 0.3, 0.5, 0.7, 0.95])[:, None, None]
    return (maps.round() if ties else maps), masks


def test_the_highest_point_decides_and_ties_count_in_proportion():
    mask = (torch.arange(4) < 2).expand(6, 4, 4)  # the left half
    maps = torch.zeros(6, 4, 4)
    maps[0, 1, 1] = maps[1, 1, 2] = 1
    maps[2, 0, 0] = maps[2, 3, 1] = 1  # both inside
    maps[3, 0, 0] = maps[3, 0, 2] = maps[3, 0, 3] = 1  # two outside; the fifth map is constant
    maps[5, 1, 1], maps[5, 1, 2] = -1, 2
    assert pointing_hits(maps, mask).tolist() == pytest.approx([1, 0, 1, 1 / 3, 0.5, 0])
    with pytest.raises(DataError, match="empty"):
        pointing_hits(maps[:1], torch.zeros(1, 4, 4, dtype=torch.bool))


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


@pytest.mark.parametrize("ties", [False, True])
def test_ranks_are_scikit_learns(ties):
    maps, masks = made(ties=ties)
    for found, theirs in ((roc_auc, roc_auc_score), (average_precision, average_precision_score)):
        expected = [theirs(mask.flatten(), one.flatten()) for one, mask in zip(maps.numpy(), masks.numpy())]
        assert found(maps, masks).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("value", [1.0, 0.1, 1 / 3, 2.0])
def test_a_uniform_map_ranks_nothing_in_any_size(value):
    """Interpolation from 6x6 to 36x48 pixels rounds, and rounding must not rank pixels: chance is the area."""
    inside = torch.zeros(2, 36, 48, dtype=torch.bool)
    inside[:, 18:, :24] = True
    uniform = torch.full((2, 6, 6), value)
    assert roc_auc(uniform, inside).tolist() == [0.5, 0.5]
    assert average_precision(uniform, inside).tolist() == [0.25, 0.25]
    assert mass_inside(uniform, inside).tolist() == pytest.approx([0.25, 0.25])


def test_a_perfect_map_and_its_opposite():
    _, masks = made()
    maps = masks.float()
    for score in SCORES.values():
        assert score(maps, masks).tolist() == pytest.approx([1.0] * 5)
    for score in (roc_auc, mask_iou, mass_inside, pointing_hits):
        assert score(-maps, masks).tolist() == [0.0] * 5  # nothing positive anywhere


def test_thresholds_by_hand():
    maps = torch.tensor([[[4.0, 0.0], [1.0, 1.0]]])  # mean 1.5: one pixel lies above
    masks = torch.tensor([[[True, True], [False, False]]])
    found = [score(maps, masks).item() for score in (mask_iou, pixel_accuracy, mass_inside, roc_auc)]
    assert found == pytest.approx([0.5, 0.75, 4 / 6, 0.5])


def test_maps_are_brought_to_the_masks_bilinearly():
    maps = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0))
    masks = torch.zeros(2, 16, 16, dtype=torch.bool)
    masks[:, 3:9, 2:12] = True
    large = F.interpolate(maps[:, None], size=(16, 16), mode="bilinear", align_corners=False)[:, 0]
    for score in SCORES.values():
        torch.testing.assert_close(score(maps, masks), score(large, masks))
    masks[0], masks[1] = True, False
    assert has_edge(torch.cat([masks, maps.repeat_interleave(4, 1).repeat_interleave(4, 2) > 0.5])).tolist() == [
        False, False, True, True,
    ]  # fmt: skip


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
    rows, seen = torch.eye(8)[groups][:, :, None].expand(7, 8, 8), []  # each map: the row of its group

    def by_group(maps, given):
        seen.append(maps)
        return mass_inside(maps, given)

    found = baseline_scores(by_group, rows, masks, groups=groups, seed=3)
    assert found["the map of another image"].tolist() == [0.0] * 7
    mean, other = seen[2], seen[3]
    for image in range(7):
        torch.testing.assert_close(mean[image], masks[groups != groups[image]].float().mean(0))
        assert other[image].sum(1).argmax() != groups[image]
    assert len({tuple(maps.flatten().tolist()) for maps in other}) > 1
    alone = baseline_scores(mass_inside, rows, masks, groups=torch.zeros(7))
    assert set(alone) == {"a uniform map", "a map of the centre"}


def test_maps_that_ignore_the_image():
    assert torch.equal(random_maps(3, (4, 5)), random_maps(7, (4, 5))[:3])
    assert not torch.equal(random_maps(3, (4, 5)), random_maps(3, (4, 5), seed=1))
    centre = centre_maps(2, (4, 6))
    assert torch.equal(centre, centre.flip(1))
    torch.testing.assert_close(centre, centre.flip(2))
    # one and three twelfths of the width from the centre; the standard deviation is a quarter
    torch.testing.assert_close(centre[0, 1, 2].log() - centre[0, 1, 1].log(), torch.tensor(4 / 9))
