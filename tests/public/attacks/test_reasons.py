"""A difference in robustness is accounted for by the candidate that was planted, and no other."""

import pytest

from tests.kit.planted_robustness import Weakness, explained

ABOVE = 1.0  # points: what counts as a difference here


def test_a_planted_high_frequency_is_the_frequency_content_and_the_gradient():
    gap, rows = explained(Weakness(), Weakness(fine=3000))
    assert gap.differs
    assert gap.better == "strong"
    assert rows["frequency"].accounts
    assert rows["gradient"].accounts
    assert not rows["margin"].accounts
    assert rows["frequency"].value_second > rows["frequency"].value_first


def test_a_planted_pattern_on_the_patch_grid_is_found_by_shifts():
    gap, rows = explained(Weakness(), Weakness(on_grid=60))
    assert gap.differs
    assert rows["patch-grid"].accounts
    assert not rows["margin"].accounts


def test_a_planted_smaller_margin_is_the_margin_and_not_the_gradient():
    gap, rows = explained(Weakness(), Weakness(constant=4.7))
    assert gap.differs
    assert rows["margin"].accounts
    assert rows["distance"].accounts
    assert not rows["gradient"].accounts
    assert not rows["frequency"].accounts


@pytest.mark.parametrize("name", ["frequency", "patch-grid", "gradient", "margin", "distance"])
def test_without_a_weakness_nothing_differs_and_nothing_is_accounted_for(name):
    gap, rows = explained(Weakness(), Weakness())
    assert not gap.differs
    assert not rows[name].accounts
    assert abs(rows[name].accounted.value) < ABOVE
