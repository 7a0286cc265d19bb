"""A hidden part of an object is named where it causes errors, and only there."""

from collections.abc import Iterator

import pytest
import torch

import vitlens
from tests.kit.planted_failures import boxes, even, properties
from tests.kit.planted_methods import planted_methods
from tests.kit.planted_places import CLASSES, bars, covered_bars, failing, never, small, touched
from tests.kit.select import select_one
from tests.kit.splits import split_of

SIDE = 16


@pytest.fixture(autouse=True)
def without_maps() -> Iterator[None]:
    """Plant uniform maps, so that only pixels and masks have causes."""
    with planted_methods({"saliency": even}):
        yield


def test_errors_on_partly_covered_objects_have_this_cause():
    diagnosis = vitlens.failures(failing(touched), covered_bars(), method="saliency")
    assert diagnosis.causes[:1] == ("occlusion",)
    row = select_one(diagnosis.interventions, covariate="occlusion")
    assert row.matched
    assert row.mended > 0.8 * row.errors
    assert row.control_mended < 0.2 * row.errors


@pytest.mark.parametrize(
    ("rule", "split"), [(small, covered_bars()), (never, covered_bars()), (small, bars())]
)
def test_other_errors_do_not(rule, split):
    assert "occlusion" not in vitlens.failures(failing(rule), split, method="saliency").causes


def test_the_share_of_the_outline_that_touches_something_else():
    """A bar, cut at one end by a dark square or with the square apart from it; the ground is not
    something else.
    """
    pixels = torch.full((3, 3, SIDE, SIDE), 100, dtype=torch.uint8)
    masks = torch.zeros(3, SIDE, SIDE, dtype=torch.bool)
    masks[:, 7:9, 3:10] = True
    pixels[:, :, 7:9, 3:10] = 200
    pixels[0, :, 5:11, 10:15] = 0
    pixels[1, :, 0:3, 10:15] = 0
    values = properties(split_of(pixels, torch.arange(3) % 2, CLASSES, masks=masks))["occlusion"]
    assert 0.1 < float(values[0]) < 0.5
    assert values[1:].tolist() == [0.0, 0.0]


def test_objects_that_nothing_touches_do_not_differ_in_it():
    assert "occlusion" not in properties(boxes((2, 2, 4, 6), (5, 7, 6, 4), (8, 3, 3, 3)))
