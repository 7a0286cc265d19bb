"""Self-checks of attacks: whether a robust accuracy is plausible, and signs of masked gradients.

A model looks robust when the attack is broken: gradients of zero, a step that is too small,
examples outside the budget. Each check states what is expected of a sound attack, what was found,
and whether that is suspicious (Athalye 2018, "Obfuscated gradients"; Carlini 2019, "On evaluating
adversarial robustness"). An attack that searches for the smallest perturbation has no budget that
could be made larger; it is checked by the distances of its perturbations instead
(`every_image_broken`, `same_distances`).
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

SIGNIFICANT = 0.05  # p-value up to which a difference is not noise
NEAR = 0.05  # relative difference of the distances that a longer search may make
ROUNDING = 1e-6  # by how much a perturbation may exceed its budget
UNLIMITED_EPSILON = 1.0  # L-infinity epsilon within which any image can become any other

State: TypeAlias = Literal["passed", "inconclusive", "failed"]


@dataclass(frozen=True)
class Check:
    """One self-check of an attack.

    attack: its name.
    expected, found: in words.
    state: inconclusive where the result is as expected but the check could not have failed, because
        no image fooled the model.
    against, of: the number of images that contradict the expectation, and of how many (None where
        that is no count of images).
    """

    name: str
    attack: str
    expected: str
    found: str
    state: State
    against: int | None = None
    of: int | None = None


def state_of(passed: bool, conclusive: bool = True) -> State:
    """Return the result of a check."""
    if not passed:
        return "failed"
    return "passed" if conclusive else "inconclusive"


@dataclass(frozen=True)
class Trial:
    """An attack, by name, and the correctly classified images on which it is checked.

    attempt: takes images and labels, and by name epsilon, steps and batch size (None: the defaults
        of the attack).
    groups (n,): the source of each image.
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

        Robust accuracy is then the clean accuracy.
        """
        result = self.at(epsilon=0.0)
        fooled = int(result.success.sum())
        moved = float((result.images.cpu() - self.images.cpu()).abs().max())
        return Check(
            "epsilon 0",
            self.attack,
            "no image fooled, no pixel changed",
            f"{fooled} of {len(self.images)} fooled, largest change {moved:.1e}",
            state_of(fooled == 0 and moved <= ROUNDING),
        )

    def within_budget(
        self, model: Model, result: AttackResult, *, epsilon: float, norm: NormName
    ) -> Check:
        """Check that examples lie within epsilon and in [0, 1], and that successes are real.

        The model predicts the clean image of every success correctly and the adversarial one
        wrongly. Of a patch, only the range of pixels is checked.
        """
        adversarial = result.images.cpu()
        clean = self.images.cpu()
        limit = ""
        reach = ""
        longest = 0.0
        if norm != "patch":
            longest = float(NORMS[norm].length((adversarial - clean).double()).max())
            limit = f"perturbations up to {epsilon:.4g}, "
            reach = f"longest {longest:.6f}, "
        low = float(adversarial.min())
        high = float(adversarial.max())
        with evaluating(model), torch.no_grad():
            after = model(adversarial.to(model.device).float()).argmax(-1).cpu()
            before = model(clean.to(model.device).float()).argmax(-1).cpu()
        truth = self.labels.cpu()
        success = result.success
        false = int((success & ((after == truth) | (before != truth))).sum())
        allowed = longest <= epsilon + ROUNDING and low >= 0 and high <= 1
        return Check(
            "within the budget",
            self.attack,
            f"{limit}pixels in [0, 1], every success wrong now and right before",
            f"{reach}pixels {low:.3g} to {high:.3g}, {false} false successes of "
            f"{int(success.sum())}",
            state_of(allowed and false == 0, bool(success.any())),
        )

    def unlimited_budget(self, *, epsilon: float = UNLIMITED_EPSILON, steps: int = 50) -> Check:
        """Check that the attack succeeds on every image within an unlimited budget.

        Within it every image can become any other.
        """
        result = self.at(epsilon=epsilon, steps=steps)
        left = int((result.tried & ~result.success).sum())
        tried = int(result.tried.sum())
        return Check(
            "no limit",
            self.attack,
            "0 % robust when any image may become any other",
            f"{left} of {tried} right images left after {steps} steps",
            state_of(left == 0, tried > 0),
            left,
            tried,
        )

    def more_steps(self, *, epsilon: float, steps: int, times: int = 4) -> Check:
        """Check that more steps break as many images, but for chance.

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
            "more steps",
            self.attack,
            f"{times} times the steps break as many images, but for chance",
            f"{int(fewer.sum())} fooled with {steps} steps, {int(more.sum())} with {times * steps}"
            f"{reason}",
            state_of(not differs, bool((fewer | more).any())),
            max(lost, gained),
            lost + gained,
        )

    def same_distances(self, *, epsilon: float, steps: int, times: int = 2) -> Check:
        """Check that a longer search breaks the same images with perturbations about as large.

        Otherwise the search was too short. epsilon: L2, pixel units, greater than any perturbation.
        """
        fewer = self.at(epsilon=epsilon, steps=steps)
        more = self.at(epsilon=epsilon, steps=times * steps)
        both = fewer.success & more.success
        lost = int((fewer.success & ~more.success).sum())
        gained = int((~fewer.success & more.success).sum())
        name = "more steps"
        expected = f"{times} times the steps find changes as small, within {100 * NEAR:.0f} %"
        if not bool(both.any()):
            return Check(
                name,
                self.attack,
                expected,
                f"no change found for any of {len(both)} images",
                "failed",
            )
        distances = self._l2_distances(fewer)[both]
        longer_search = self._l2_distances(more)[both]
        change = float(torch.median(longer_search / distances)) - 1
        reason = f"; too few steps, raise {argument('steps')}" if change < -NEAR or gained else ""
        return Check(
            name,
            self.attack,
            expected,
            f"{100 * change:+.1f} % (median of {int(both.sum())} images), {lost} lost, {gained} "
            f"gained{reason}",
            state_of(abs(change) <= NEAR and lost == gained == 0),
        )

    def _l2_distances(self, result: AttackResult) -> Float[Tensor, " batch"]:
        """Return the L2 length of the perturbation of each image."""
        return NORMS["l2"].length((result.images.cpu() - self.images.cpu()).double())


def same_in_any_batch(attack: str, whole: AttackResult, parts: AttackResult) -> Check:
    """Check that the result of an image does not depend on the batch size.

    whole, parts: of the same images, attacked in one batch and in smaller ones.
    """
    other = int((whole.success != parts.success).sum())
    # kernels round differently for other batch sizes; a gradient whose sign flips by that changes a
    # pixel
    return Check(
        "batch size",
        attack,
        "the same images fooled, whatever the batch size (rounding may decide one)",
        f"{other} of {len(whole.success)} differ",
        state_of(other <= 1, bool((whole.success | parts.success).any())),
    )


@needs_gradients
def gradients_not_zero(model: Model, images: Images, labels: Labels) -> Check:
    """Check that the gradient in the pixels is not zero for at least 9 images in 10.

    The gradient is that of the cross-entropy.
    Raises NonFiniteError, naming model and image, for a NaN or infinite gradient.
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
    return gradients_read("gradients", "gradients", int((flat == 0).all(1).sum()), len(images))


def gradients_read(name: str, attack: str, zero: int, count: int) -> Check:
    """Return the check that at most one image in ten has gradients of exactly zero.

    zero: the number of such images, of all `count`.
    """
    return Check(
        name,
        attack,
        "not all zero, for at least 9 images in 10",
        f"all zero for {zero} of {count}",
        state_of(10 * zero <= count),
        zero,
        count,
    )


def every_image_broken(outcome: Outcome) -> Check:
    """Check that a search without a budget finds an adversarial perturbation of every image."""
    right = int(outcome.clean.sum())
    missed = int((outcome.clean & outcome.broken_at.isinf()).sum())
    return Check(
        "no limit",
        outcome.name,
        "a change found for every right image",
        f"none found for {missed} of {right}",
        state_of(missed == 0, right > 0),
        missed,
        right,
    )


def weaker_breaks_no_more(weaker: Outcome, stronger: Outcome, *, reason: str) -> Check:
    """Check that the weaker of two attacks breaks no more images at any epsilon, but for chance.

    Only the epsilons that both tried are compared. reason: why it is the weaker one ("one step
    against many").
    """
    least_p = 1.0
    found = "nowhere weaker"
    against = 0
    of = 0
    any_broken = False
    both = [epsilon for epsilon in weaker.epsilons if epsilon in stronger.epsilons]
    for epsilon in both:
        left = weaker.robust(epsilon)
        also_left = stronger.robust(epsilon)
        any_broken |= bool((weaker.clean & ~left).any() or (stronger.clean & ~also_left).any())
        only_weaker = int((~left & also_left).sum())
        only_stronger = int((left & ~also_left).sum())
        p_alone = paired_test(also_left, left, groups=weaker.groups)
        p = min(1.0, len(both) * p_alone)  # Bonferroni, as the least is taken
        if only_weaker > only_stronger and p < least_p:
            least_p = p
            against = only_weaker
            of = only_weaker + only_stronger
            found = (
                f"at {epsilon:.3g}, {only_weaker} broken by {weaker.name} alone, {only_stronger} "
                f"by {stronger.name} alone (p = {p:.2g})"
            )
    return Check(
        reason,
        f"{weaker.name}, {stronger.name}",
        f"{stronger.name} breaks at least what {weaker.name} does",
        found,
        state_of(least_p > SIGNIFICANT, any_broken),
        against,
        of,
    )


def never_rises(outcome: Outcome) -> Check:
    """Check that robust accuracy never rises as epsilon grows."""
    counts = [int(outcome.robust(epsilon).sum()) for epsilon in (0.0, *outcome.epsilons)]
    falls = all(after <= before for before, after in pairwise(counts))
    return Check(
        "curve",
        outcome.name,
        "never rises",
        f"{' '.join(map(str, counts))} images right",
        state_of(falls, len(set(counts)) > 1),
    )


def same_in_ascending_order(
    attack: str, above: Float[Tensor, " batch"], below: Float[Tensor, " batch"]
) -> Check:
    """Check that an image that is robust at one epsilon is robust at all smaller ones.

    A sweep from the largest epsilon assumes this. above, below: the smallest epsilon that breaks
    each image, tried in descending and in ascending order.
    """
    sooner = int((below < above).sum())
    return Check(
        "from below",
        attack,
        "tried from the smallest epsilon up, no image breaks at a smaller one",
        f"{sooner} of {len(below)} do",
        state_of(sooner == 0, bool((above.isfinite() | below.isfinite()).any())),
    )
