"""Every check passes for an attack that is sound, and fails for one that is broken in the way it looks for."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from vitlens.analysis.robustness import checks as checks
from vitlens.analysis.robustness.checks import (
    CheckState,
    never_rises,
    same_in_ascending_order,
    weaker_breaks_no_more,
)
from vitlens.analysis.robustness.curve import Outcome

from tests.attacks.models import perceptron, pictures, predictions
from tests.lens.tiny import images, ours
from vitlens.attacks.attack import attack
from vitlens.errors import NonFiniteError
from vitlens.models.model import Model

INF = float("inf")


@dataclass
class Result:
    images: Tensor
    success: Tensor
    tried: Tensor


@pytest.fixture(scope="module")
def model() -> Model:
    return ours()


@pytest.fixture(scope="module")
def batch(model: Model) -> tuple[Tensor, Tensor]:
    pictures = images(model.input_size, batch=8)
    with torch.no_grad():
        return pictures, model(pictures).argmax(-1)


def gradient_steps(model: Model, *, leak: float = 0.0, blind: bool = False, lazy: bool = False):
    """A plain iterated attack; leak: how far beyond epsilon it goes; blind: it sees no gradient; lazy: one step."""

    def attempt(pictures, labels, *, epsilon, steps=None, batch_size=None):
        found = pictures.clone()
        count = 1 if lazy else steps or 10
        for _ in range(count):
            inputs = found.clone().requires_grad_()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, inputs)
            sign = torch.zeros_like(gradient) if blind else gradient.sign()
            found = found + 2.5 * (epsilon + leak) / count * sign
            found = (pictures + (found - pictures).clamp(-epsilon - leak, epsilon + leak)).clamp(0, 1)
        with torch.no_grad():
            before, after = model(pictures).argmax(-1), model(found).argmax(-1)
        tried = before == labels
        success = tried & (after != labels)
        found = torch.where(success[:, None, None, None], found, pictures)
        return Result(found, success, tried)

    return attempt


def test_a_sound_attack_passes(model, batch):
    attempt = gradient_steps(model)
    found = [
        checks.at_epsilon_zero("a", attempt, *batch),
        checks.within_budget("a", model, attempt(*batch, epsilon=0.3), *batch, epsilon=0.3, norm="linf"),
        checks.same_in_any_batch("a", attempt(*batch, epsilon=0.1), attempt(*batch, epsilon=0.1)),
        checks.gradients_not_zero(model, *batch),
        checks.unlimited_budget("a", attempt, *batch, steps=30),
        checks.more_steps("a", attempt, *batch, epsilon=0.1, steps=10),
    ]
    assert {check.state for check in found} == {CheckState.PASSED}


def test_an_attack_that_sees_no_gradient_is_suspicious(model, batch):
    check = checks.unlimited_budget("a", gradient_steps(model, blind=True), *batch)
    assert check.state is CheckState.FAILED
    assert check.found.startswith("8 of 8")


def test_examples_beyond_the_budget_or_the_range_are_seen(model, batch):
    result = gradient_steps(model, leak=0.1)(*batch, epsilon=0.3)
    assert int(result.success.sum())
    assert not checks.within_budget("a", model, result, *batch, epsilon=0.3, norm="linf").passed
    outside = Result(batch[0] + 0.5, torch.zeros(8).bool(), torch.ones(8).bool())
    assert not checks.within_budget("a", model, outside, *batch, epsilon=1.0, norm="linf").passed


def test_successes_that_are_none_are_seen(model, batch):
    pictures, labels = batch
    unmoved = Result(pictures, torch.ones(8).bool(), torch.ones(8).bool())
    check = checks.within_budget("a", model, unmoved, pictures, labels, epsilon=1.0, norm="l2")
    assert "8 false successes of 8" in check.found
    assert not check.passed
    moved = gradient_steps(model)(pictures, labels, epsilon=1.0, steps=30)
    assert bool(moved.success.all())
    other = (labels + 1) % 5  # images that were wrong before
    assert not checks.within_budget("a", model, moved, pictures, other, epsilon=1.0, norm="linf").passed


def test_change_at_epsilon_0_is_seen(batch):
    def restless(pictures, labels, *, epsilon, steps=None, batch_size=None):
        return Result((pictures + 1e-3).clamp(0, 1), torch.zeros(8).bool(), torch.ones(8).bool())

    assert not checks.at_epsilon_zero("a", restless, *batch).passed


def test_results_that_hang_on_the_batch_are_seen(batch):
    every = torch.ones(8).bool()
    one, other = Result(batch[0], every, every), Result(batch[0], ~every, every)
    assert not checks.same_in_any_batch("a", one, other).passed
    assert checks.same_in_any_batch("a", one, one).passed


def test_more_steps_that_break_more_or_fewer_are_seen(batch):
    def counting(rises):
        def attempt(pictures, labels, *, epsilon, steps=None, batch_size=None):
            return Result(pictures, torch.full((8,), (steps > 10) == rises), torch.ones(8).bool())

        return attempt

    short = checks.more_steps("a", counting(True), *batch, epsilon=0.1, steps=10)
    assert not short.passed
    assert "too few steps" in short.found
    worse = checks.more_steps("a", counting(False), *batch, epsilon=0.1, steps=10)
    assert not worse.passed
    assert "more steps break fewer" in worse.found


def test_gradients_that_vanish_are_seen_and_broken_ones_named(batch):
    silent = ours()
    with torch.no_grad():
        silent.module.head.weight.zero_()
    assert not checks.gradients_not_zero(silent, *batch).passed
    broken = ours()
    with torch.no_grad():
        broken.module.head.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="from ours on image 0"):
        checks.gradients_not_zero(broken, *batch)


def test_parameters_get_no_gradient(model, batch):
    checks.gradients_not_zero(model, *batch)
    assert all(parameter.grad is None for parameter in model.parameters())


def outcome(name: str, broken_at: list[float]) -> Outcome:
    found = torch.tensor(broken_at)
    return Outcome(name, "m", (0.1, 0.2), found > 0, found)


def test_a_weaker_attack_that_breaks_more_is_a_sign_of_masking():
    weak, strong = outcome("fgsm", [0.1] * 12), outcome("pgd", [INF] * 12)
    assert not weaker_breaks_no_more(weak, strong, reason="r").passed
    assert weaker_breaks_no_more(strong, weak, reason="r").passed
    mixed = outcome("pgd", [0.1] * 6 + [INF] * 6)
    assert not weaker_breaks_no_more(weak, outcome("pgd", [0.1] * 3 + [INF] * 9), reason="r").passed
    assert weaker_breaks_no_more(mixed, outcome("pgd", [INF] * 3 + [0.1] * 9), reason="r").passed  # chance


def test_a_curve_that_rises_is_seen():
    assert never_rises(outcome("a", [0, 0.1, 0.2, INF])).passed


def test_lengths():
    change = torch.tensor([3.0, -4.0]).view(1, 1, 1, 2).expand(1, 3, 1, 2) / 10
    assert float(checks.lengths(change, "linf")) == pytest.approx(0.4)
    assert float(checks.lengths(change, "l2")) == pytest.approx(0.5 * 3**0.5)


def test_an_image_that_breaks_sooner_from_below_is_found():
    above, same = torch.tensor([0.2, INF, 0.1]), torch.tensor([0.2, INF, 0.1])
    assert same_in_ascending_order("pgd-linf", above, same).passed
    sooner = same_in_ascending_order("pgd-linf", above, torch.tensor([0.2, 0.1, 0.1]))
    assert not sooner.passed
    assert sooner.found.startswith("1 of 3")


def test_a_check_in_which_nothing_was_fooled_is_inconclusive_not_passed(batch):
    none, every = torch.zeros(8).bool(), torch.ones(8).bool()

    def attempt(pictures, labels, *, epsilon, steps=None, batch_size=None):
        return Result(pictures, none, every)

    idle, busy = Result(batch[0], none, every), Result(batch[0], every, every)
    assert checks.more_steps("a", attempt, *batch, epsilon=0.1, steps=10).state is CheckState.INCONCLUSIVE
    assert checks.same_in_any_batch("a", idle, idle).state is CheckState.INCONCLUSIVE
    assert checks.same_in_any_batch("a", busy, busy).state is CheckState.PASSED
    assert checks.same_in_any_batch("a", idle, busy).state is CheckState.FAILED
    whole = outcome("a", [INF] * 8)
    assert never_rises(whole).state is CheckState.INCONCLUSIVE
    assert weaker_breaks_no_more(whole, whole, reason="r").state is CheckState.INCONCLUSIVE


def searching(*, short: float, long: float, lost: bool = False):
    """An attack that goes this far in each pixel with 10 steps and with more; lost: more steps lose an image."""

    def attempt(images, labels, *, epsilon, steps=None, batch_size=None):
        success = torch.ones(len(images)).bool()
        success[0] = steps <= 10 or not lost
        moved = images + (short if steps <= 10 else long)
        return Result(torch.where(success[:, None, None, None], moved, images), success, torch.ones(len(images)).bool())

    return attempt


def test_an_image_without_any_change_found_is_seen():
    assert checks.every_image_broken(outcome("cw", [0, 0.1, 0.3])).passed
    check = checks.every_image_broken(outcome("cw", [0, 0.1, INF]))
    assert not check.passed
    assert check.found.endswith("1 of 2")


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
    still = torch.zeros(4, 3, 4, 4)
    check = checks.same_distances("cw", attempt, still, torch.zeros(4).long(), epsilon=7.0, steps=10)
    assert check.passed is passes
    assert says in check.found


def test_a_search_that_finds_nothing_is_seen():
    def blind(images, labels, *, epsilon, steps=None, batch_size=None):
        return Result(images, torch.zeros(len(images)).bool(), torch.ones(len(images)).bool())

    check = checks.same_distances("cw", blind, torch.zeros(4, 3, 4, 4), torch.zeros(4).long(), epsilon=7.0, steps=10)
    assert not check.passed
    assert check.found == "no change found for any of 4 images"


def test_deepfool_is_as_near_and_cw_with_too_few_steps_is_not():
    attacked, six = perceptron(), pictures(6, seed=3)
    labels = predictions(attacked, six)

    def attempt(name):
        return lambda some, labels, *, epsilon, steps=None, **_: attack(
            attacked, some, labels, method=name, epsilon=epsilon, steps=steps
        )

    assert checks.same_distances("deepfool", attempt("deepfool"), six, labels, epsilon=14.0, steps=30).passed
    check = checks.same_distances("cw", attempt("cw"), six, labels, epsilon=14.0, steps=4, times=10)
    assert not check.passed
    assert "raise --steps" in check.found
