"""Attacks that look for the smallest change: one that gives up, or stops too far out, is seen."""

import pytest
import torch

from tests.analysis.robustness.test_checks import INF, Result, outcome
from tests.attacks.models import answers, perceptron, pictures
from vitlens.analysis.robustness.minimum import all_found, as_near
from vitlens.attacks.attack import attack


def searching(*, short: float, long: float, lost: bool = False):
    """An attack that goes this far in each pixel with 10 steps and with more; lost: more steps lose an image."""

    def attempt(images, labels, *, epsilon, steps=None, batch_size=None):
        success = torch.ones(len(images)).bool()
        success[0] = steps <= 10 or not lost
        moved = images + (short if steps <= 10 else long)
        return Result(torch.where(success[:, None, None, None], moved, images), success, torch.ones(len(images)).bool())

    return attempt


def test_an_image_without_any_change_found_is_seen():
    assert all_found(outcome("cw", [0, 0.1, 0.3])).passed
    check = all_found(outcome("cw", [0, 0.1, INF]))
    assert not check.passed
    assert check.found == "none found for 1 of 2"


@pytest.mark.parametrize(
    ("attempt", "passes", "says"),
    [
        (searching(short=0.1, long=0.1), True, "+0.0 % (median of 4 images), 0 lost, 0 gained"),
        (
            searching(short=0.1, long=0.08),
            False,
            "-20.0 % (median of 4 images), 0 lost, 0 gained; too few steps",
        ),
        (searching(short=0.1, long=0.12), False, "+20.0 %"),
        (searching(short=0.1, long=0.1, lost=True), False, "1 lost"),
    ],
)
def test_a_search_that_was_too_short_or_too_long_is_seen(attempt, passes, says):
    images = torch.zeros(4, 3, 4, 4)
    check = as_near("cw", attempt, images, torch.zeros(4).long(), epsilon=7.0, steps=10)
    assert check.passed is passes
    assert says in check.found


def test_a_search_that_finds_nothing_is_seen():
    def blind(images, labels, *, epsilon, steps=None, batch_size=None):
        return Result(images, torch.zeros(len(images)).bool(), torch.ones(len(images)).bool())

    check = as_near("cw", blind, torch.zeros(4, 3, 4, 4), torch.zeros(4).long(), epsilon=7.0, steps=10)
    assert not check.passed
    assert check.found == "no change found for any of 4 images"


def test_deepfool_is_as_near_and_cw_with_too_few_steps_is_not():
    model, images = perceptron(), pictures(6, seed=3)
    labels = answers(model, images)

    def attempt(name):
        return lambda pictures, labels, *, epsilon, steps=None, **_: attack(
            model, pictures, labels, method=name, epsilon=epsilon, steps=steps
        )

    assert as_near("deepfool", attempt("deepfool"), images, labels, epsilon=14.0, steps=30).passed
    check = as_near("cw", attempt("cw"), images, labels, epsilon=14.0, steps=4, times=10)
    assert not check.passed
    assert "raise --steps" in check.found
