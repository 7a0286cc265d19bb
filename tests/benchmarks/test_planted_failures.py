"""Causes planted in a trained model are named first in nearly all seeds, and nothing is named without a cause."""

import pytest

from benchmarks.planted_failures import PLANTS, diagnosis, images_for, planted

pytestmark = pytest.mark.slow
SEEDS = range(4)


@pytest.mark.parametrize("cause", PLANTS)
def test_a_planted_cause_is_named_first_and_no_other(cause):
    model, right = planted(cause), PLANTS[cause].names
    named = [diagnosis(model, images_for(cause, seed, 450, masks=True)).causes for seed in SEEDS]
    assert sum(causes[:1] != () and causes[0] in right for causes in named) >= 3 * bool(right)
    assert sum(any(name not in right for name in causes) for causes in named) <= 1
