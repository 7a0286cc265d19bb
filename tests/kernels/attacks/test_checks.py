"""Every check passes for a sound attack, and fails for one with the fault that it looks for."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import vitlens
from tests.kit.attacked import INF, outcome, perceptron, pictures, predictions
from vitlens.attacks import checks
from vitlens.attacks.checks import Trial
from vitlens.errors import NonFiniteError

EVERY = torch.ones(8, dtype=torch.bool)
FIRST = torch.arange(8) == 0
NONE = ~EVERY
MODEL = perceptron()
IMAGES = pictures(8, low=0.1, high=0.9)
LABELS = predictions(MODEL, IMAGES)


@dataclass
class Result:
    images: Tensor
    success: Tensor
    tried: Tensor = EVERY


def trial(attempt: Callable[..., object], labels: Tensor = LABELS) -> Trial:
    return Trial("a", attempt, IMAGES, labels)  # type: ignore[arg-type]


def stuck(images: Tensor, success: Tensor, tried: Tensor = EVERY) -> Trial:
    """Return an attack that always gives these images."""
    return trial(lambda *_, **__: Result(images, success, tried))


def test_at_epsilon_0_nothing_changes_and_within_an_unlimited_budget_no_image_is_left():
    cases = (IMAGES, NONE), (IMAGES, FIRST), (IMAGES + 1e-3, NONE)
    assert [stuck(*case).at_epsilon_zero().state for case in cases] == [
        "passed",
        "failed",
        "failed",
    ]
    for success, tried, expected in (
        (~FIRST, EVERY, ("failed", 1, 8)),
        (~FIRST, ~FIRST, ("passed", 0, 7)),
        (NONE, NONE, ("inconclusive", 0, 0)),
    ):
        check = stuck(IMAGES, success, tried).unlimited_budget()
        assert (check.state, check.against, check.of) == expected


def test_examples_beyond_the_budget_or_the_range_and_successes_that_are_none():
    def judged(result, *, epsilon=1.0, norm="linf", labels=LABELS):
        return (
            trial(vitlens.attack, labels)
            .within_budget(MODEL, result, epsilon=epsilon, norm=norm)
            .state
        )

    moved = vitlens.attack(MODEL, IMAGES, LABELS, epsilon=0.5, steps=30)
    assert bool(moved.success.all())
    length = float((moved.images - IMAGES).flatten(1).norm(dim=1).max())
    assert [judged(moved, epsilon=epsilon) for epsilon in (0.5, 0.49)] == ["passed", "failed"]
    assert [judged(moved, epsilon=share * length, norm="l2") for share in (1, 0.99)] == [
        "passed",
        "failed",
    ]
    # of which only the range is checked
    assert judged(moved, epsilon=0.0, norm="patch") == "passed"
    for outside in (IMAGES + 0.5, IMAGES - 0.5):
        assert [judged(Result(outside, NONE), norm=norm) for norm in ("linf", "patch")] == [
            "failed",
            "failed",
        ]
    assert judged(Result(IMAGES, NONE)) == "inconclusive"
    assert judged(Result(IMAGES, EVERY)) == "failed"  # not wrong now
    assert judged(moved, labels=(LABELS + 1) % 5) == "failed"  # wrong before


def test_results_that_depend_on_the_batch():
    two = torch.arange(8) < 2
    for full, parts, state in (
        (EVERY, NONE, "failed"),
        (EVERY, EVERY, "passed"),
        (NONE, FIRST, "passed"),
        (NONE, NONE, "inconclusive"),
        (NONE, two, "failed"),
    ):
        assert (
            checks.same_in_any_batch("a", Result(IMAGES, full), Result(IMAGES, parts)).state
            == state
        )


@pytest.mark.parametrize(
    ("few", "many", "expected", "says"),
    [
        (NONE, EVERY, ("failed", 8, 8), "too few steps, raise steps="),
        (EVERY, NONE, ("failed", 8, 8), "more steps break fewer"),
        (EVERY, torch.arange(8) > 2, ("passed", 3, 3), "8 fooled with 10 steps, 5 with 40"),
        (FIRST, ~FIRST, ("passed", 7, 8), "1 fooled with 10 steps, 7 with 40"),
        (NONE, NONE, ("inconclusive", 0, 0), ""),
    ],
)
def test_more_steps_that_break_more_or_fewer(few, many, expected, says):
    check = trial(
        lambda images, _, *, steps, **__: Result(images, few if steps == 10 else many)
    ).more_steps(epsilon=0.1, steps=10)
    assert (check.state, check.against, check.of) == expected
    assert says in check.found


def test_gradients_that_vanish_and_gradients_that_are_not_finite():
    silent = perceptron()
    broken = perceptron()
    silent.module[3].weight.zero_()
    broken.module[1].weight.fill_(float("nan"))
    assert checks.gradients_not_zero(MODEL, IMAGES, LABELS).state == "passed"
    for parameter in MODEL.parameters():
        assert parameter.grad is None
    check = checks.gradients_not_zero(silent, IMAGES, LABELS)
    assert (check.state, check.against, check.of) == ("failed", 8, 8)
    with pytest.raises(NonFiniteError, match="from made on image 0"):
        checks.gradients_not_zero(broken, IMAGES, LABELS)
    assert [checks.gradients_read("g", "a", zero, 20).state for zero in (2, 3)] == [
        "passed",
        "failed",
    ]


@pytest.mark.parametrize(
    ("weak", "strong", "expected"),
    [
        ([0.1] * 12, [INF] * 12, ("failed", 12, 12)),
        ([INF] * 12, [0.1] * 12, ("passed", 0, 0)),
        ([0.1] * 10 + [INF] * 2, [INF] * 10 + [0.1, INF], ("failed", 10, 11)),
        ([0.2] * 12, [INF] * 12, ("failed", 12, 12)),
        ([0.1] * 6 + [INF] * 6, [INF] * 3 + [0.1] * 9, ("passed", 0, 0)),  # by chance
        ([INF] * 8, [INF] * 8, ("inconclusive", 0, 0)),
        ([0.1] * 6, [INF] * 6, ("passed", 6, 6)),  # p = 2 x 2 / 2^6, as two epsilons are compared
    ],
)
def test_a_weaker_attack_that_breaks_more_is_a_sign_of_masking(weak, strong, expected):
    check = checks.weaker_breaks_no_more(outcome("fgsm", weak), outcome("pgd", strong), reason="r")
    assert (check.state, check.against, check.of) == expected


@pytest.mark.parametrize(("epsilons", "state"), [((0.1, 0.2), "failed"), ((0.2,), "inconclusive")])
def test_only_epsilons_that_both_tried_are_compared(epsilons, state):
    weak = outcome("x", [0.1] * 6, epsilons=(0.1, 0.3))
    strong = outcome("x", [INF] * 6, epsilons=epsilons)
    assert checks.weaker_breaks_no_more(weak, strong, reason="r").state == state  # p = 2 / 2^6


def test_checks_of_outcomes():
    assert checks.never_rises(outcome("a", [0, 0.1, 0.2, INF])).state == "passed"
    assert checks.never_rises(outcome("a", [INF] * 8)).state == "inconclusive"
    for broken_at, expected in (
        ([0, 0.1, 0.3], ("passed", 0, 2)),
        ([0, 0], ("inconclusive", 0, 0)),
        ([0, 0.1, INF], ("failed", 1, 2)),
    ):
        check = checks.every_image_broken(outcome("cw", broken_at))
        assert (check.state, check.against, check.of) == expected
    above = torch.tensor([0.2, INF, 0.1])
    never = torch.full((3,), INF)
    for first, second, state in (
        (above, above, "passed"),
        (never, never, "inconclusive"),
        (above, torch.tensor([0.2, 0.1, 0.1]), "failed"),
    ):
        assert checks.same_in_ascending_order("a", first, second).state == state


@pytest.mark.parametrize(
    ("far", "lost", "state", "raise_steps"),
    [
        (0.1, 0, "passed", False),
        (0.08, 0, "failed", True),
        (0.12, 0, "failed", False),
        (0.1, 1, "failed", False),
        (0.1, -1, "failed", True),
    ],
)
def test_a_search_that_was_too_short_or_too_long(far, lost, state, raise_steps):
    """It goes 0.1 in each pixel with 10 steps, and this far with more, which lose an image or gain
    one (-1).
    """

    def search(images, _labels, *, epsilon, steps):
        fewer = steps == 10
        success = torch.arange(8) >= (lost < 0 if fewer else lost > 0)
        moved = images + (0.1 if fewer else far)
        return Result(torch.where(success[:, None, None, None], moved, images), success)

    check = trial(search).same_distances(epsilon=7.0, steps=10)
    assert (check.state, "raise steps=" in check.found) == (state, raise_steps)
    assert stuck(IMAGES, NONE).same_distances(epsilon=7.0, steps=10).state == "failed"
