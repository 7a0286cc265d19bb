"""Every check passes for an attack that is sound, and fails for one that is broken in the way it looks for."""

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


@dataclass
class Result:
    images: Tensor
    success: Tensor
    tried: Tensor = EVERY


@pytest.fixture(scope="module")
def model() -> vitlens.Model:
    return perceptron()


@pytest.fixture(scope="module")
def batch(model: vitlens.Model) -> tuple[Tensor, Tensor]:
    images = pictures(8, low=0.1, high=0.9)
    return images, predictions(model, images)


def attacking(model: vitlens.Model, name: str = "pgd") -> Callable[..., object]:
    return lambda *some, **more: vitlens.attack(model, *some, method=name, **more)


def stuck(images: Tensor, success: Tensor, tried: Tensor = EVERY) -> Callable[..., Result]:
    """An attack that always gives these images."""
    return lambda *_, **__: Result(images, success, tried)


def by_steps(few: Tensor, many: Tensor) -> Callable[..., Result]:
    """An attack that succeeds on some images with 10 steps and on others with more."""
    return lambda images, _labels, *, steps, **_: Result(images, few if steps == 10 else many)


def test_a_sound_attack_passes(model, batch):
    sound = Trial("a", attacking(model), *batch)
    at = sound.at(epsilon=0.1)
    found = [
        sound.at_epsilon_zero(),
        sound.within_budget(model, sound.at(epsilon=0.3), epsilon=0.3, norm="linf"),
        sound.unlimited_budget(steps=30),
        sound.more_steps(epsilon=0.1, steps=10),
        checks.same_in_any_batch("a", at, at),
        checks.gradients_not_zero(model, *batch),
    ]
    assert {check.state for check in found} == {"passed"}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_change_at_epsilon_0_and_images_that_are_left_within_an_unlimited_budget(batch):
    for images, success, state in (
        (batch[0], ~EVERY, "passed"),
        (batch[0], FIRST, "failed"),
        (batch[0] + 1e-3, ~EVERY, "failed"),
    ):
        assert Trial("a", stuck(images, success), *batch).at_epsilon_zero().state == state
    for success, tried, state, counts in (
        (~FIRST, EVERY, "failed", (1, 8)),
        (~FIRST, ~FIRST, "passed", (0, 7)),
        (~EVERY, ~EVERY, "inconclusive", (0, 0)),
    ):
        check = Trial("a", stuck(batch[0], success, tried), *batch).unlimited_budget()
        assert (check.state, check.against, check.of) == (state, *counts)


def test_examples_beyond_the_budget_or_the_range_and_successes_that_are_none(model, batch):
    (images, labels), sound = batch, Trial("a", attacking(model), *batch)

    def judged(result, *, epsilon=1.0, norm="linf", given=sound):
        return given.within_budget(model, result, epsilon=epsilon, norm=norm).state

    moved = sound.at(epsilon=0.5, steps=30)
    assert bool(moved.success.all())
    assert judged(moved, epsilon=0.5) == "passed"
    assert judged(moved, epsilon=0.49) == "failed"
    for outside in (images + 0.5, images - 0.5):
        assert judged(Result(outside, ~EVERY)) == "failed"
        assert judged(Result(outside, ~EVERY), norm="patch") == "failed"
    assert judged(Result(images, ~EVERY)) == "inconclusive"
    unmoved = sound.within_budget(model, Result(images, EVERY), epsilon=1.0, norm="l2")
    assert unmoved.state == "failed"
    assert "8 false successes of 8" in unmoved.found
    assert judged(moved, given=Trial("a", sound.attempt, images, (labels + 1) % 5)) == "failed"  # wrong before
    length = float((moved.images - images).flatten(1).norm(dim=1).max())
    assert [judged(moved, epsilon=share * length, norm="l2") for share in (1, 0.99)] == ["passed", "failed"]
    assert judged(moved, epsilon=0.0, norm="patch") == "passed"  # of which the range alone is checked


def test_results_that_depend_on_the_batch(batch):
    for whole, parts, state in (
        (EVERY, ~EVERY, "failed"), (EVERY, EVERY, "passed"), (~EVERY, FIRST, "passed"),
        (~EVERY, ~EVERY, "inconclusive"), (~EVERY, torch.arange(8) < 2, "failed"),
    ):  # fmt: skip
        check = checks.same_in_any_batch("a", Result(batch[0], whole), Result(batch[0], parts))
        assert check.state == state


@pytest.mark.parametrize(
    ("few", "many", "state", "says", "counts"),
    [
        (~EVERY, EVERY, "failed", "too few steps, raise --steps", (8, 8)),
        (EVERY, ~EVERY, "failed", "more steps break fewer", (8, 8)),
        (EVERY, torch.arange(8) > 2, "passed", "8 fooled with 10 steps, 5 with 40", (3, 3)),
        (FIRST, ~FIRST, "passed", "1 fooled with 10 steps, 7 with 40", (7, 8)),
        (~EVERY, ~EVERY, "inconclusive", "", (0, 0)),
    ],
)
def test_more_steps_that_break_more_or_fewer(batch, few, many, state, says, counts):
    check = Trial("a", by_steps(few, many), *batch).more_steps(epsilon=0.1, steps=10)
    assert (check.state, check.against, check.of) == (state, *counts)
    assert says in check.found


def test_gradients_that_vanish_and_gradients_that_are_not_finite(batch):
    silent, broken = perceptron(), perceptron()
    silent.module.layers[3].weight.zero_()
    broken.module.layers[1].weight.fill_(float("nan"))
    check = checks.gradients_not_zero(silent, *batch)
    assert (check.state, check.against, check.of) == ("failed", 8, 8)
    with pytest.raises(NonFiniteError, match="from made on image 0"):
        checks.gradients_not_zero(broken, *batch)
    assert [checks.gradients_read("g", "a", zero, 20).state for zero in (2, 3)] == ["passed", "failed"]


@pytest.mark.parametrize(
    ("weak", "strong", "state", "counts"),
    [
        ([0.1] * 12, [INF] * 12, "failed", (12, 12)),
        ([INF] * 12, [0.1] * 12, "passed", (0, 0)),
        ([0.1] * 12, [0.1] * 3 + [INF] * 9, "failed", (9, 9)),
        ([0.1] * 10 + [INF] * 2, [INF] * 10 + [0.1, INF], "failed", (10, 11)),
        ([0.2] * 12, [INF] * 12, "failed", (12, 12)),
        ([0.1] * 6 + [INF] * 6, [INF] * 3 + [0.1] * 9, "passed", (0, 0)),  # by chance
        ([INF] * 8, [INF] * 8, "inconclusive", (0, 0)),
    ],
)
def test_a_weaker_attack_that_breaks_more_is_a_sign_of_masking(weak, strong, state, counts):
    check = checks.weaker_breaks_no_more(outcome("fgsm", weak), outcome("pgd", strong), reason="r")
    assert check.state == state
    if state == "failed":
        assert (check.against, check.of) == counts


def test_only_epsilons_that_both_tried_are_compared_and_each_is_one_test_more():
    weak = outcome("fgsm", [0.1] * 7, epsilons=(0.1, 0.3))
    alone = checks.weaker_breaks_no_more(weak, outcome("pgd", [INF] * 7, epsilons=(0.1, 0.2)), reason="r")
    assert alone.state == "failed"  # p = 2 / 2^7
    one = outcome("fgsm", [0.1] * 6, epsilons=(0.1, 0.2))
    both = checks.weaker_breaks_no_more(one, outcome("pgd", [INF] * 6), reason="r")
    assert both.state == "passed"  # p = 2 x 2 / 2^6
    neither = checks.weaker_breaks_no_more(weak, outcome("pgd", [INF] * 7, epsilons=(0.2,)), reason="r")
    assert neither.state == "inconclusive"


def test_checks_of_outcomes():
    assert checks.never_rises(outcome("a", [0, 0.1, 0.2, INF])).state == "passed"
    assert checks.never_rises(outcome("a", [INF] * 8)).state == "inconclusive"
    assert checks.every_image_broken(outcome("cw", [0, 0.1, 0.3])).state == "passed"
    assert checks.every_image_broken(outcome("cw", [0, 0])).state == "inconclusive"
    missed = checks.every_image_broken(outcome("cw", [0, 0.1, INF]))
    assert (missed.state, missed.against, missed.of) == ("failed", 1, 2)
    above, never = torch.tensor([0.2, INF, 0.1]), torch.full((3,), INF)
    assert checks.same_in_ascending_order("a", above, above).state == "passed"
    assert checks.same_in_ascending_order("a", never, never).state == "inconclusive"
    assert checks.same_in_ascending_order("a", above, torch.tensor([0.2, 0.1, 0.1])).state == "failed"


@pytest.mark.parametrize(
    ("far", "lost", "state", "raise_steps"),
    [(0.1, 0, "passed", False), (0.08, 0, "failed", True), (0.12, 0, "failed", False), (0.1, 1, "failed", False),
     (0.1, -1, "failed", True)],
)  # fmt: skip
def test_a_search_that_was_too_short_or_too_long(far, lost, state, raise_steps):
    """It goes 0.1 in each pixel with 10 steps, and this far with more, which lose an image or gain one (-1)."""
    still = torch.zeros(8, 3, 4, 4)

    def search(images, _labels, *, epsilon, steps):
        fewer = steps == 10
        success = torch.arange(8) >= (lost < 0 if fewer else lost > 0)
        moved = images + (0.1 if fewer else far)
        return Result(torch.where(success[:, None, None, None], moved, images), success)

    check = Trial("a", search, still, torch.zeros(8).long()).same_distances(epsilon=7.0, steps=10)
    assert check.state == state
    assert ("raise --steps" in check.found) == raise_steps
    nothing = Trial("a", stuck(still, ~EVERY), still, torch.zeros(8).long())
    assert nothing.same_distances(epsilon=7.0, steps=10).state == "failed"


def test_deepfool_is_as_near_and_cw_with_too_few_steps_is_not():
    model, six = perceptron(), pictures(6, seed=3)
    labels = predictions(model, six)
    near = Trial("deepfool", attacking(model, "deepfool"), six, labels).same_distances(epsilon=14.0, steps=30)
    assert near.state == "passed"
    far = Trial("cw", attacking(model, "cw"), six, labels).same_distances(epsilon=14.0, steps=4, times=10)
    assert far.state == "failed"
