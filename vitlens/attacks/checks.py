"""Self-checks of attacks: whether a robust accuracy is plausible, and signs of masked gradients.

A model looks robust if the attack is broken: gradients of zero, a step that is too small, examples
outside the budget. Each check states what a sound attack should do, what it did, and if that is
suspicious (Athalye 2018, "Obfuscated gradients"; Carlini 2019, "On evaluating adversarial
robustness").

An attack that searches for the smallest perturbation has no budget that could be made larger. It is
checked by the distances of its perturbations (`every_image_broken`, `same_distances`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vitlens.attacks.attack import AttackResult
from vitlens.attacks.norms import NORMS
from vitlens.attacks.registry import NormName
from vitlens.attacks.robustness import Outcome
from vitlens.devices import evaluating
from vitlens.errors import NonFiniteError, argument
from vitlens.lens.differentiable import needs_gradients
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels
from vitlens.uncertainty import paired_test

SIGNIFICANT = 0.05  # a difference with a larger p-value is noise
NEAR = 0.05  # a longer search may change distances by this part of them
ROUNDING = 1e-6  # a perturbation may exceed its budget by this much
UNLIMITED_EPSILON = 1.0  # within this L-infinity epsilon, any image can become any other

State: TypeAlias = Literal["passed", "inconclusive", "failed"]


@dataclass(frozen=True)
class Check:
    """One self-check of an attack.

    name: the name of the check.
    attack: the name of the attack.
    expected, found: the expected and the actual result, in words.
    state: "inconclusive" if the result is as expected, but the check could not have failed because
        no image fooled the model.
    against: the number of images that contradict the expectation. None if the check does not count
        images.
    of: the number of images that were counted, or None.
    """

    name: str
    attack: str
    expected: str
    found: str
    state: State
    against: int | None = None
    of: int | None = None


def state_of(passed: bool, *, conclusive: bool = True) -> State:
    """Return the result of a check.

    conclusive: True if the check could have failed.
    """
    if not passed:
        return "failed"
    return "passed" if conclusive else "inconclusive"


@dataclass(frozen=True)
class Trial:
    """An attack and the correctly classified images on which it is checked.

    attack: the name of the attack.
    attempt: runs the attack. It takes images and labels, and as keywords epsilon, steps and batch
        size (by default those of the attack).
    groups (n,): the source of each image, None if no images share a source.
    """

    attack: str
    attempt: Callable[..., AttackResult]
    images: Images
    labels: Labels
    groups: Tensor | None = None

    def at(self, **options: float) -> AttackResult:
        """Return the result with these options."""
        return self.attempt(self.images, self.labels, **options)

    def at_epsilon_zero(self) -> Check:
        """Check that with epsilon 0 no image fools the model and no pixel changes.

        Robust accuracy is then equal to clean accuracy.
        """
        result = self.at(epsilon=0.0)
        fooled = int(result.success.sum())
        moved = float((result.images.cpu() - self.images.cpu()).abs().max())
        return Check(
            name="epsilon 0",
            attack=self.attack,
            expected="no image fooled, no pixel changed",
            found=f"{fooled} of {len(self.images)} fooled, largest change {moved:.1e}",
            state=state_of(fooled == 0 and moved <= ROUNDING),
        )

    def within_budget(
        self, model: Model, result: AttackResult, *, epsilon: float, norm: NormName
    ) -> Check:
        """Check that examples lie within epsilon and in [0, 1], and that successes are real.

        For every success, the model must predict the clean image correctly and the adversarial one
        wrongly. A patch has no epsilon: only the range of its pixels is checked.
        """
        adversarial = result.images.cpu()
        clean = self.images.cpu()
        expected_length = ""
        found_length = ""
        longest = 0.0
        if norm != "patch":
            longest = float(NORMS[norm].length((adversarial - clean).double()).max())
            expected_length = f"perturbations up to {epsilon:.4g}, "
            found_length = f"longest {longest:.6f}, "
        low = float(adversarial.min())
        high = float(adversarial.max())
        with evaluating(model), torch.no_grad():
            after = model(adversarial.to(model.device).float()).argmax(-1).cpu()
            before = model(clean.to(model.device).float()).argmax(-1).cpu()
        truth = self.labels.cpu()
        success = result.success
        is_false_success = success & ((after == truth) | (before != truth))
        false = int(is_false_success.sum())
        is_allowed = longest <= epsilon + ROUNDING and low >= 0 and high <= 1
        return Check(
            name="within the budget",
            attack=self.attack,
            expected=f"{expected_length}pixels in [0, 1], every success wrong now and right before",
            found=f"{found_length}pixels {low:.3g} to {high:.3g}, {false} false successes of "
            f"{int(success.sum())}",
            state=state_of(is_allowed and false == 0, conclusive=bool(success.any())),
        )

    def unlimited_budget(self, *, epsilon: float = UNLIMITED_EPSILON, steps: int = 50) -> Check:
        """Check that the attack succeeds on every image within an unlimited budget."""
        result = self.at(epsilon=epsilon, steps=steps)
        left = int((result.tried & ~result.success).sum())
        tried = int(result.tried.sum())
        return Check(
            name="no limit",
            attack=self.attack,
            expected="0 % robust when any image may become any other",
            found=f"{left} of {tried} right images left after {steps} steps",
            state=state_of(left == 0, conclusive=tried > 0),
            against=left,
            of=tried,
        )

    def more_steps(self, *, epsilon: float, steps: int, times: int = 4) -> Check:
        """Check that more steps break as many images, except for chance.

        If they break more, the attack had too few steps.
        """
        fewer = self.at(epsilon=epsilon, steps=steps).success
        more = self.at(epsilon=epsilon, steps=times * steps).success
        lost = int((fewer & ~more).sum())
        gained = int((~fewer & more).sum())
        differs = paired_test(fewer, more, groups=self.groups) <= SIGNIFICANT
        reason = ""
        if differs and lost > gained:
            reason = "; more steps break fewer"
        elif differs:
            reason = f"; too few steps, raise {argument('steps')}"
        return Check(
            name="more steps",
            attack=self.attack,
            expected=f"{times} times as many steps break no more images, apart from chance",
            found=f"{int(fewer.sum())} fooled with {steps} steps, {int(more.sum())} with "
            f"{times * steps}{reason}",
            state=state_of(not differs, conclusive=bool((fewer | more).any())),
            against=max(lost, gained),
            of=lost + gained,
        )

    def same_distances(self, *, epsilon: float, steps: int, times: int = 2) -> Check:
        """Check that a longer search breaks the same images with perturbations about as large.

        Otherwise the search was too short.

        epsilon: an L2 length in pixel units, larger than any perturbation.
        """
        fewer = self.at(epsilon=epsilon, steps=steps)
        more = self.at(epsilon=epsilon, steps=times * steps)
        both = fewer.success & more.success
        lost = int((fewer.success & ~more.success).sum())
        gained = int((~fewer.success & more.success).sum())
        name = "more steps"
        expected = (
            f"{times} times as many steps find changes of the same size, within {100 * NEAR:.0f} %"
        )
        if not bool(both.any()):
            return Check(
                name=name,
                attack=self.attack,
                expected=expected,
                found=f"no change found for any of {len(both)} images",
                state="failed",
            )
        distances = self._l2_distances(fewer)[both]
        longer_search = self._l2_distances(more)[both]
        change = float(torch.median(longer_search / distances)) - 1
        reason = ""
        if change < -NEAR or gained:
            reason = f"; too few steps, raise {argument('steps')}"
        return Check(
            name=name,
            attack=self.attack,
            expected=expected,
            found=f"{100 * change:+.1f} % (median of {int(both.sum())} images), {lost} lost, "
            f"{gained} gained{reason}",
            state=state_of(abs(change) <= NEAR and lost == gained == 0),
        )

    def _l2_distances(self, result: AttackResult) -> Float[Tensor, " batch"]:
        """Return the L2 length of the perturbation of each image."""
        return NORMS["l2"].length((result.images.cpu() - self.images.cpu()).double())


def same_in_any_batch(attack: str, whole: AttackResult, parts: AttackResult) -> Check:
    """Check that the result of an image does not depend on the batch size.

    whole: the result of images that were attacked in one batch.
    parts: the result of the same images in smaller batches.
    """
    other = int((whole.success != parts.success).sum())
    # One image may differ: kernels round differently for other batch sizes, and a pixel changes if
    # the sign of its gradient flips by that.
    return Check(
        name="batch size",
        attack=attack,
        expected="the same images fooled, whatever the batch size (rounding may change one)",
        found=f"{other} of {len(whole.success)} differ",
        state=state_of(other <= 1, conclusive=bool((whole.success | parts.success).any())),
    )


@needs_gradients
def gradients_not_zero(model: Model, images: Images, labels: Labels) -> Check:
    """Check that the gradient of the cross-entropy is not zero for at least 9 images in 10.

    Raises NonFiniteError, with the names of model and image, for a NaN or infinite gradient.
    """
    inputs = images.detach().to(model.device).requires_grad_()
    with evaluating(model), torch.enable_grad():
        loss = F.cross_entropy(model(inputs), labels.to(model.device), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, inputs)
    flat = gradient.flatten(1)
    broken = (~flat.isfinite()).any(1).nonzero().flatten()
    if len(broken):
        raise NonFiniteError(
            f"expected finite gradients, found NaN or infinity from {model.alias} on image "
            f"{int(broken[0])}"
        )
    all_zero = int((flat == 0).all(1).sum())
    return gradients_read(name="gradients", attack="gradients", zero=all_zero, count=len(images))


def gradients_read(name: str, attack: str, zero: int, count: int) -> Check:
    """Return the check that at most one image in ten has gradients of exactly zero.

    zero: the number of images with such gradients.
    count: the number of all images.
    """
    return Check(
        name=name,
        attack=attack,
        expected="not all zero, for at least 9 images in 10",
        found=f"all zero for {zero} of {count}",
        state=state_of(10 * zero <= count),
        against=zero,
        of=count,
    )


def every_image_broken(outcome: Outcome) -> Check:
    """Check that a search without a budget finds an adversarial perturbation for every image."""
    right = int(outcome.clean.sum())
    missed = int((outcome.clean & outcome.broken_at.isinf()).sum())
    return Check(
        name="no limit",
        attack=outcome.name,
        expected="a change found for every right image",
        found=f"none found for {missed} of {right}",
        state=state_of(missed == 0, conclusive=right > 0),
        against=missed,
        of=right,
    )


def weaker_breaks_no_more(weaker: Outcome, stronger: Outcome, *, reason: str) -> Check:
    """Check that the weaker of two attacks breaks no more images at any epsilon, except for chance.

    Only the epsilons that both tried are compared.

    reason: why it is the weaker one, e.g. "one step against many".
    """
    least_p = 1.0
    found = "nowhere weaker"
    against = 0
    of = 0
    any_broken = False
    shared_epsilons = [epsilon for epsilon in weaker.epsilons if epsilon in stronger.epsilons]
    for epsilon in shared_epsilons:
        survives_weaker = weaker.robust(epsilon)
        survives_stronger = stronger.robust(epsilon)
        any_broken |= bool((weaker.clean & ~survives_weaker).any())
        any_broken |= bool((stronger.clean & ~survives_stronger).any())
        only_weaker = int((~survives_weaker & survives_stronger).sum())
        only_stronger = int((survives_weaker & ~survives_stronger).sum())
        p_of_epsilon = paired_test(survives_stronger, survives_weaker, groups=weaker.groups)
        # Bonferroni's correction, because the smallest p-value of all epsilons counts
        p = min(1.0, len(shared_epsilons) * p_of_epsilon)
        if only_weaker > only_stronger and p < least_p:
            least_p = p
            against = only_weaker
            of = only_weaker + only_stronger
            found = (
                f"at {epsilon:.3g}, {only_weaker} broken by {weaker.name} alone, {only_stronger} "
                f"by {stronger.name} alone (p = {p:.2g})"
            )
    return Check(
        name=reason,
        attack=f"{weaker.name}, {stronger.name}",
        expected=f"{stronger.name} breaks at least as many images as {weaker.name}",
        found=found,
        state=state_of(least_p > SIGNIFICANT, conclusive=any_broken),
        against=against,
        of=of,
    )


def never_rises(outcome: Outcome) -> Check:
    """Check that robust accuracy never rises as epsilon grows."""
    counts = [int(outcome.robust(epsilon).sum()) for epsilon in (0.0, *outcome.epsilons)]
    falls = all(after <= before for before, after in pairwise(counts))
    return Check(
        name="curve",
        attack=outcome.name,
        expected="never rises",
        found=f"{' '.join(map(str, counts))} images right",
        state=state_of(falls, conclusive=len(set(counts)) > 1),
    )


def same_in_ascending_order(
    attack: str, above: Float[Tensor, " batch"], below: Float[Tensor, " batch"]
) -> Check:
    """Check that an image that is robust at one epsilon is robust at all smaller ones.

    A sweep from the largest epsilon assumes this.

    above: the smallest epsilon that breaks each image, tried in descending order.
    below: the same, tried in ascending order.
    """
    sooner = int((below < above).sum())
    any_broken = bool((above.isfinite() | below.isfinite()).any())
    return Check(
        name="from below",
        attack=attack,
        expected="tried from the smallest epsilon up, no image breaks at a smaller one",
        found=f"{sooner} of {len(below)} do",
        state=state_of(sooner == 0, conclusive=any_broken),
    )
