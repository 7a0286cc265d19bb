"""Every check passes for an attack that is sound, and fails for one that is broken in the way it looks for."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.attacks.models import INF, outcome, perceptron, pictures, predictions
from tests.lens.tiny import images, ours
from vitlens.attacks import checks
from vitlens.attacks.attack import attack
from vitlens.attacks.checks import Trial
from vitlens.errors import NonFiniteError
from vitlens.models.model import Model

EVERY = torch.ones(8, dtype=torch.bool)


@dataclass
class Result:
    images: Tensor
    success: Tensor
    tried: Tensor = EVERY


@pytest.fixture(scope="module")
def model() -> Model:
    return ours()


@pytest.fixture(scope="module")
def batch(model: Model) -> tuple[Tensor, Tensor]:
    pictures = images(model.input_size, batch=8)
    with torch.no_grad():
        return pictures, model(pictures).argmax(-1)


def trial(attempt: Callable[..., Result], batch: tuple[Tensor, Tensor]) -> Trial:
    return Trial("a", attempt, *batch)


def gradient_steps(model: Model, *, leak: float = 0.0, blind: bool = False) -> Callable[..., Result]:
    """A plain iterated attack; leak: how far beyond epsilon it goes; blind: it sees no gradient."""

    def attempt(pictures, labels, *, epsilon, steps=10):
        found = pictures.clone()
        for _ in range(steps):
            inputs = found.clone().requires_grad_()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, inputs)
            sign = torch.zeros_like(gradient) if blind else gradient.sign()
            found = found + 2.5 * (epsilon + leak) / steps * sign
            found = (pictures + (found - pictures).clamp(-epsilon - leak, epsilon + leak)).clamp(0, 1)
        tried, success = (predictions(model, each) == labels for each in (pictures, found))
        success = tried & ~success
        return Result(torch.where(success[:, None, None, None], found, pictures), success, tried)

    return attempt


def stuck(images: Tensor, success: Tensor) -> Callable[..., Result]:
    """An attack that always gives these images."""
    return lambda *_, **__: Result(images, success)


def by_steps(few: Tensor, many: Tensor) -> Callable[..., Result]:
    """An attack that succeeds on some images with 10 steps and on others with more."""
    return lambda images, _labels, *, steps, **_: Result(images, few if steps == 10 else many)


def test_a_sound_attack_passes(model, batch):
    sound = trial(gradient_steps(model), batch)
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


def test_a_change_at_epsilon_0_and_a_gradient_that_is_not_seen(model, batch):
    assert trial(stuck(batch[0] + 1e-3, ~EVERY), batch).at_epsilon_zero().state == "failed"
    check = trial(gradient_steps(model, blind=True), batch).unlimited_budget()
    assert (check.state, check.against, check.of) == ("failed", 8, 8)


def test_examples_beyond_the_budget_or_the_range_and_successes_that_are_none(model, batch):
    (pictures, labels), sound = batch, trial(gradient_steps(model), batch)

    def judged(result, *, epsilon=1.0, norm="linf", given=sound):
        return given.within_budget(model, result, epsilon=epsilon, norm=norm)

    leaking = trial(gradient_steps(model, leak=0.1), batch).at(epsilon=0.3)
    assert int(leaking.success.sum())
    assert judged(leaking, epsilon=0.3).state == "failed"
    assert judged(Result(pictures + 0.5, ~EVERY)).state == "failed"
    unmoved = judged(Result(pictures, EVERY), norm="l2")
    assert unmoved.state == "failed"
    assert "8 false successes of 8" in unmoved.found
    moved = sound.at(epsilon=1.0, steps=30)
    assert bool(moved.success.all())
    wrong_before = Trial("a", sound.attempt, pictures, (labels + 1) % 5)
    assert judged(moved, given=wrong_before).state == "failed"
    length = float((moved.images - pictures).flatten(1).norm(dim=1).max())
    assert judged(moved, epsilon=length, norm="l2").state == "passed"
    assert judged(moved, epsilon=0.99 * length, norm="l2").state == "failed"


def test_results_that_depend_on_the_batch(batch):
    none, all_, one = (Result(batch[0], success) for success in (~EVERY, EVERY, torch.arange(8) == 0))
    for whole, parts, state in (
        (all_, none, "failed"), (all_, all_, "passed"), (none, one, "passed"), (none, none, "inconclusive"),
    ):  # fmt: skip
        assert checks.same_in_any_batch("a", whole, parts).state == state


@pytest.mark.parametrize(
    ("few", "many", "state", "says"),
    [
        (~EVERY, EVERY, "failed", "0 fooled with 10 steps, 8 with 40; too few steps, raise --steps"),
        (EVERY, ~EVERY, "failed", "more steps break fewer"),
        (EVERY, torch.arange(8) > 2, "passed", "8 fooled with 10 steps, 5 with 40"),
        (~EVERY, ~EVERY, "inconclusive", ""),
    ],
)
def test_more_steps_that_break_more_or_fewer(batch, few, many, state, says):
    check = trial(by_steps(few, many), batch).more_steps(epsilon=0.1, steps=10)
    assert check.state == state
    assert says in check.found
    assert (check.against, check.of) == (abs(int(few.sum()) - int(many.sum())),) * 2


def test_gradients_that_vanish_and_gradients_that_are_not_finite(batch):
    silent, broken = ours(), ours()
    with torch.no_grad():
        silent.module.head.weight.zero_()
        broken.module.head.weight.fill_(float("nan"))
    assert checks.gradients_not_zero(silent, *batch).state == "failed"
    with pytest.raises(NonFiniteError, match="from ours on image 0"):
        checks.gradients_not_zero(broken, *batch)
    assert [checks.gradients_read("g", "a", zero, 20).state for zero in (2, 3)] == ["passed", "failed"]


@pytest.mark.parametrize(
    ("weak", "strong", "state"),
    [
        ([0.1] * 12, [INF] * 12, "failed"),
        ([INF] * 12, [0.1] * 12, "passed"),
        ([0.1] * 12, [0.1] * 3 + [INF] * 9, "failed"),
        ([0.1] * 6 + [INF] * 6, [INF] * 3 + [0.1] * 9, "passed"),  # by chance
        ([INF] * 8, [INF] * 8, "inconclusive"),
    ],
)
def test_a_weaker_attack_that_breaks_more_is_a_sign_of_masking(weak, strong, state):
    check = checks.weaker_breaks_no_more(outcome("fgsm", weak), outcome("pgd", strong), reason="r")
    assert check.state == state
    if state == "failed":
        only = sum(at == INF for at in strong)
        assert (check.against, check.of) == (only, only)
        assert f"at 0.1, {only} broken by fgsm alone, 0 by pgd alone" in check.found


def test_checks_of_outcomes():
    assert checks.never_rises(outcome("a", [0, 0.1, 0.2, INF])).state == "passed"
    assert checks.never_rises(outcome("a", [INF] * 8)).state == "inconclusive"
    assert checks.every_image_broken(outcome("cw", [0, 0.1, 0.3])).state == "passed"
    missed = checks.every_image_broken(outcome("cw", [0, 0.1, INF]))
    assert (missed.state, missed.against, missed.of) == ("failed", 1, 2)
    above = torch.tensor([0.2, INF, 0.1])
    assert checks.same_in_ascending_order("a", above, above).state == "passed"
    sooner = checks.same_in_ascending_order("a", above, torch.tensor([0.2, 0.1, 0.1]))
    assert (sooner.state, sooner.found[:6]) == ("failed", "1 of 3")


@pytest.mark.parametrize(
    ("far", "lost", "says"),
    [
        (0.1, False, "+0.0 % (median of 8 images), 0 lost, 0 gained"),
        (0.08, False, "-20.0 % (median of 8 images), 0 lost, 0 gained; too few steps"),
        (0.12, False, "+20.0 %"),
        (0.1, True, "1 lost"),
    ],
)
def test_a_search_that_was_too_short_or_too_long(far, lost, says):
    """It goes 0.1 in each pixel with 10 steps, and this far with more, which lose an image."""
    still = torch.zeros(8, 3, 4, 4)

    def search(images, _labels, *, epsilon, steps):
        success = EVERY if steps == 10 or not lost else torch.arange(8) > 0
        moved = images + (0.1 if steps == 10 else far)
        return Result(torch.where(success[:, None, None, None], moved, images), success)

    check = trial(search, (still, torch.zeros(8).long())).same_distances(epsilon=7.0, steps=10)
    assert (check.state == "passed") == (far == 0.1 and not lost)
    assert says in check.found
    nothing = trial(stuck(still, ~EVERY), (still, torch.zeros(8).long())).same_distances(epsilon=7.0, steps=10)
    assert (nothing.state, nothing.found) == ("failed", "no change found for any of 8 images")


def test_deepfool_is_as_near_and_cw_with_too_few_steps_is_not():
    attacked, six = perceptron(), pictures(6, seed=3)

    def searching(name):
        return Trial(name, lambda *some, **more: attack(attacked, *some, method=name, **more), six, labels)

    labels = predictions(attacked, six)
    assert searching("deepfool").same_distances(epsilon=14.0, steps=30).state == "passed"
    check = searching("cw").same_distances(epsilon=14.0, steps=4, times=10)
    assert check.state == "failed"
    assert "raise --steps" in check.found
