"""Maps of a run as rows: other images have other sources, and intervals stay in bounds."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.kit.map_rows import IMPUTED
from tests.kit.select import select
from vitlens import load_data
from vitlens.commands.shared.maps.measure import CheckedMaps, map_rows, on_object_rows
from vitlens.uncertainty import Side


@pytest.mark.parametrize("sources", [None, [0, 0, 0, 0, 1, 2, 2]])
def test_other_images_are_of_other_sources(sources):
    def others(count, sources):
        settings = SimpleNamespace(seed=3)
        return CheckedMaps(
            None, torch.zeros(count, 3, 2, 2), None, {}, (), settings, sources=sources
        ).other_images()

    sources_tensor = None if sources is None else torch.tensor(sources)
    other = others(7, sources_tensor)
    source_of = torch.arange(7) if sources_tensor is None else sources_tensor
    assert not bool((source_of[other] == source_of).any())
    assert others(2, torch.zeros(2).int()) is None


def test_no_method_chooses_by_the_removals_that_judge_and_the_object_does_not_count(golden):
    record = golden("explain verified").record
    assert {row.check for row in record.checks if row.margin and row.needed} == {"mean", IMPUTED}
    checked = {row.method: row for row in record.checks if row.check == "object"}
    rows = select(record.on_object, score="roc_auc")
    assert rows
    for row in rows:
        checks_of_map = checked[row.maps]
        assert (checks_of_map.state, checks_of_map.needed, checks_of_map.value) == (
            "pass" if row.above else "warn",
            False,
            row.estimate,
        )


def test_intervals_end_at_what_is_possible():
    maps = torch.ones(9, 4, 4)
    maps[0, 0, 0] = 400.0  # one sharp map among uniform ones
    split = replace(load_data("digits", limit=len(maps)), masks=None)
    (row,) = map_rows("m", [("relevance", maps)], split)
    assert row.information.low == 0.0
    assert 0.0 <= row.by_place.low <= row.by_place.high <= 1.0


def test_maps_on_the_object_exceed_all_that_ignore_the_image():
    masks = torch.zeros(12, 8, 8, dtype=torch.bool)
    for at in range(12):
        masks[at, at % 3 * 2 : at % 3 * 2 + 2, at % 4 * 2 : at % 4 * 2 + 2] = True
    inside = masks.float()
    centre = torch.zeros(12, 8, 8)
    centre[:, 3:5, 3:5] = 1.0
    on_object, fixed = on_object_rows("vit", [("own", inside), ("fixed", centre)], "roc_auc", masks)
    assert (on_object.above, fixed.above) == (True, False)
    assert on_object.estimate.value == 1.0


def test_no_hits_on_few_images_are_not_shown_to_be_fewer_than_by_chance():
    """0 of 16 where chance is an eighth: the interval of the rate reaches 19 %."""
    masks = torch.zeros(16, 8, 8, dtype=torch.bool)
    maps = torch.zeros(16, 8, 8)
    for image in range(16):
        masks[image, :, image % 7] = True
    maps[:, 0, 7] = 1.0
    (row,) = on_object_rows("vit", [("map", maps)], "pointing", masks)
    assert (row.estimate.value, row.of_baseline.value < 0.2, row.side) == (
        0.0,
        True,
        Side.UNDECIDED,
    )


def test_no_baseline_is_of_the_same_photograph_stored_twice():
    masks = torch.zeros(8, 8, 8, dtype=torch.bool)
    for image in range(8):
        masks[image, image // 2] = True  # four photographs, each twice; each map is right
    twice = torch.arange(8) // 2
    maps = [("map", masks.float())]
    (apart,) = on_object_rows("vit", maps, "mass", masks, sources=twice)
    (mixed,) = on_object_rows("vit", maps, "mass", masks)
    # of the others, none is on the object
    assert apart.baseline in (
        "a uniform map",
        "a map of the centre",
    )
    assert mixed.of_baseline.value > apart.of_baseline.value
