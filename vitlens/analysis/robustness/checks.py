"""Self-checks of attacks: whether a robust accuracy is plausible, and signs of masked gradients.

A model looks robust when the attack is broken: gradients of zero, a step that is too small, examples outside the
budget. Each check states what is expected of a sound attack, what was found, and whether that is suspicious (Athalye
2018, "Obfuscated gradients"; Carlini 2019, "On evaluating adversarial robustness"). The attack is given as a function
(`Attempt`). An attack that searches for the smallest perturbation has no budget that could be made larger; it is
checked by the distances of its perturbations instead (`every_image_broken`, `same_distances`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.robustness.curve import Outcome
from vitlens.devices import evaluating
from vitlens.errors import NonFiniteError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels
from vitlens.uncertainty import mcnemar

SIGNIFICANT = 0.05  # p-value up to which a difference is not noise
NEAR = 0.05  # relative difference of the distances that a longer search may make
ROUNDING = 1e-6  # by how much a perturbation may exceed its budget
UNLIMITED_EPSILON = 1.0  # L-infinity epsilon within which any image can become any other


class CheckState(Enum):
    """The result of a check; INCONCLUSIVE: as expected, but it could not have failed, as nothing was fooled."""

    PASSED = "passed"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One self-check of an attack. attack: its name; expected, found: in words; passed: whether found is as expected.

    conclusive: False where it could not have failed, as nothing was fooled; against, of: how many of so many images
    contradict the expectation (None where that is no count of images).
    """

    name: str
    attack: str
    expected: str
    found: str
    passed: bool
    conclusive: bool = True
    against: int | None = None
    of: int | None = None

    @property
    def state(self) -> CheckState:
        """The result."""
        if not self.passed:
            return CheckState.FAILED
        return CheckState.PASSED if self.conclusive else CheckState.INCONCLUSIVE


@runtime_checkable
class AttackOutput(Protocol):
    """The result of an attack: the adversarial images, which of them fool the model, and which were attacked."""

    @property
    def images(self) -> Tensor:
        """(batch, 3, height, width) in [0, 1]."""

    @property
    def success(self) -> Tensor:
        """(batch,), predicted correctly before the attack and wrongly after it."""

    @property
    def tried(self) -> Tensor:
        """(batch,), predicted correctly before the attack."""


# One attack on one model: takes images and labels, and by name epsilon, steps and batch size (None: its own)
Attempt = Callable[..., AttackOutput]


def at_epsilon_zero(attack: str, attempt: Attempt, images: Images, labels: Labels) -> Check:
    """With epsilon 0 the model is fooled on no image and no pixel changes: robust accuracy is clean accuracy."""
    result = attempt(images, labels, epsilon=0.0)
    fooled = int(result.success.sum())
    moved = float((result.images.cpu() - images.cpu()).abs().max())
    return Check(
        "epsilon 0", attack, "no image fooled, no pixel changed",
        f"{fooled} of {len(images)} fooled, largest change {moved:.1e}", fooled == 0 and moved <= ROUNDING,
    )  # fmt: skip


def lengths(changes: Float[Tensor, "batch 3 height width"], norm: str) -> Float[Tensor, " batch"]:
    """The length of each perturbation: "linf" its largest entry, "l2" its Euclidean length."""
    flat = changes.flatten(1).double()
    return flat.abs().amax(1) if norm == "linf" else flat.norm(dim=1)


def within_budget(
    attack: str, model: Model, result: AttackOutput, images: Images, labels: Labels, *, epsilon: float, norm: str
) -> Check:
    """Examples lie within epsilon and in [0, 1]; each success was predicted correctly before and is wrong now.

    norm: "linf" or "l2"; for another norm only the range of pixels is checked.
    """
    adversarial, clean = result.images.cpu(), images.cpu()
    success = result.success.cpu()
    longest = float(lengths(adversarial - clean, norm).max()) if norm in ("linf", "l2") else 0.0
    low, high = float(adversarial.min()), float(adversarial.max())
    after, before = (predicted(model, which) for which in (result.images, images))
    truth = labels.cpu()
    false = int((success & ((after == truth) | (before != truth))).sum())
    limit = f"perturbations up to {epsilon:.4g}, " if norm in ("linf", "l2") else ""
    reach = f"longest {longest:.6f}, " if norm in ("linf", "l2") else ""
    return Check(
        "within the budget", attack, f"{limit}pixels in [0, 1], every success wrong now and right before",
        f"{reach}pixels {low:.3g} to {high:.3g}, {false} false successes of {int(success.sum())}",
        longest <= epsilon + ROUNDING and low >= 0 and high <= 1 and false == 0, conclusive=bool(success.any()),
    )  # fmt: skip


def same_in_any_batch(attack: str, whole: AttackOutput, parts: AttackOutput) -> Check:
    """The result of an image does not depend on the batch size.

    whole, parts: of the same images, attacked in one batch and in smaller ones.
    """
    count = len(whole.success)
    other = int((whole.success.cpu() != parts.success.cpu()).sum())
    # kernels round differently for other batch sizes; a gradient whose sign flips by that changes a pixel
    return Check(
        "batch size", attack, "the same images fooled, whatever the batch size (rounding may decide one)",
        f"{other} of {count} differ", other <= 1, conclusive=bool(whole.success.any() or parts.success.any()),
    )  # fmt: skip


def gradients_not_zero(model: Model, images: Images, labels: Labels, *, attack: str = "gradients") -> Check:
    """The gradient of the cross-entropy with respect to the pixels is not all zero for at least 9 images in 10.

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
            f"expected finite gradients, found NaN or infinity from {model.alias} on image {int(broken[0])}"
        )
    zero = (flat == 0).all(1)
    share = float(zero.float().mean())
    return Check(
        "gradients", attack, "not all zero, for at least 9 images in 10",
        f"all zero for {int(zero.sum())} of {len(images)}", share <= 0.1, against=int(zero.sum()), of=len(images),
    )  # fmt: skip


def unlimited_budget(
    attack: str,
    attempt: Attempt,
    images: Images,
    labels: Labels,
    *,
    epsilon: float = UNLIMITED_EPSILON,
    steps: int = 50,
) -> Check:
    """Within an unlimited budget every image can become any other, so the attack succeeds on every image."""
    result = attempt(images, labels, epsilon=epsilon, steps=steps)
    left = int((result.tried & ~result.success).sum())
    tried = int(result.tried.sum())
    return Check(
        "no limit", attack, "0 % robust when any image may become any other",
        f"{left} of {tried} right images left after {steps} steps", left == 0, conclusive=tried > 0,
        against=left, of=tried,
    )  # fmt: skip


def more_steps(
    attack: str, attempt: Attempt, images: Images, labels: Labels, *, epsilon: float, steps: int, times: int = 4
) -> Check:
    """More steps break as many images, but for chance; if they break more, the attack had too few steps."""
    fewer, more = (attempt(images, labels, epsilon=epsilon, steps=count) for count in (steps, times * steps))
    lost = int((fewer.success & ~more.success).sum())
    gained = int((~fewer.success & more.success).sum())
    p = mcnemar(lost, gained)
    differs = p <= SIGNIFICANT
    reason = "; more steps break fewer" if lost > gained else "; too few steps, raise --steps"
    return Check(
        "more steps", attack, f"{times} times the steps break as many images, but for chance",
        f"{int(fewer.success.sum())} fooled with {steps} steps, {int(more.success.sum())} with {times * steps}"
        f"{reason if differs else ''}",
        not differs, conclusive=bool(fewer.success.any() or more.success.any()),
        against=max(lost, gained), of=lost + gained,
    )  # fmt: skip


def every_image_broken(outcome: Outcome) -> Check:
    """A search without a budget found a perturbation that fools the model for every image."""
    right = int(outcome.clean.sum())
    missed = int((outcome.clean & outcome.broken_at.isinf()).sum())
    return Check(
        "no limit", outcome.name, "a change found for every right image", f"none found for {missed} of {right}",
        missed == 0, conclusive=right > 0, against=missed, of=right,
    )  # fmt: skip


def same_distances(
    attack: str, attempt: Attempt, images: Images, labels: Labels, *, epsilon: float, steps: int, times: int = 2
) -> Check:
    """A longer search succeeds on the same images with perturbations about as large; otherwise it was too short.

    epsilon: L2, pixel units, greater than any perturbation.
    """
    fewer, more = (attempt(images, labels, epsilon=epsilon, steps=count) for count in (steps, times * steps))
    short, long = (lengths(result.images.cpu() - images.cpu(), "l2") for result in (fewer, more))
    both = fewer.success.cpu() & more.success.cpu()
    lost = int((fewer.success & ~more.success).sum())
    name, expected = "more steps", f"{times} times the steps find changes as small, within {100 * NEAR:.0f} %"
    if not bool(both.any()):
        return Check(name, attack, expected, f"no change found for any of {len(images)} images", passed=False)
    change = float(torch.median(long[both] / short[both])) - 1
    gained = int((~fewer.success & more.success).sum())
    reason = "; too few steps, raise --steps" if change < -NEAR or gained else ""
    return Check(
        name, attack, expected,
        f"{100 * change:+.1f} % (median of {int(both.sum())} images), {lost} lost, {gained} gained{reason}",
        abs(change) <= NEAR and lost == gained == 0,
    )  # fmt: skip


def predicted(model: Model, images: Images) -> Int[Tensor, " batch"]:
    """The predictions for a few images, in fp32."""
    with evaluating(model), torch.no_grad():
        answers: Tensor = model(images.to(model.device).float()).argmax(-1).cpu()
    return answers


def weaker_breaks_no_more(weaker: Outcome, stronger: Outcome, *, reason: str) -> Check:
    """The weaker of two attacks breaks no more images than the stronger at any epsilon, but for chance.

    reason: why it is the weaker one ("one step against many"). Only the epsilons that both tried are compared.
    """
    least_p, worst = 1.0, None
    against = of = 0
    both = [epsilon for epsilon in weaker.epsilons if epsilon in stronger.epsilons]
    for epsilon in both:
        by_weaker, by_stronger = ~weaker.robust(epsilon), ~stronger.robust(epsilon)
        only_weaker = int((by_weaker & ~by_stronger).sum())
        only_stronger = int((~by_weaker & by_stronger).sum())
        p = min(1.0, len(both) * mcnemar(only_weaker, only_stronger))  # Bonferroni, as the least is taken
        if only_weaker > only_stronger and p < least_p:
            least_p, worst = p, (epsilon, only_weaker, only_stronger)
            against, of = only_weaker, only_weaker + only_stronger
    result = "nowhere weaker"
    if worst is not None:
        result = (
            f"at {worst[0]:.3g}, {worst[1]} broken by {weaker.name} alone, {worst[2]} by {stronger.name} alone "
            f"(p = {least_p:.2g})"
        )
    return Check(
        reason, f"{weaker.name}, {stronger.name}", f"{stronger.name} breaks at least what {weaker.name} does",
        result, least_p > SIGNIFICANT,
        conclusive=any(bool((each.clean & ~each.robust(at)).any()) for each in (weaker, stronger) for at in both),
        against=against, of=of,
    )  # fmt: skip


def never_rises(outcome: Outcome) -> Check:
    """Robust accuracy falls or stays as epsilon grows."""
    counts = [int(outcome.robust(epsilon).sum()) for epsilon in (0.0, *outcome.epsilons)]
    rises = sum(after > before for before, after in pairwise(counts))
    return Check(
        "curve", outcome.name, "never rises", f"{' '.join(map(str, counts))} images right", rises == 0,
        conclusive=len(set(counts)) > 1,
    )  # fmt: skip


def same_in_ascending_order(attack: str, above: Float[Tensor, " batch"], below: Float[Tensor, " batch"]) -> Check:
    """An image that is robust at one epsilon is robust at all smaller ones, as a sweep from the largest assumes.

    above, below: the smallest epsilon that breaks each image, tried in descending and in ascending order.
    """
    sooner = int((below < above).sum())
    return Check(
        "from below", attack, "tried from the smallest epsilon up, no image breaks at a smaller one",
        f"{sooner} of {len(below)} do", sooner == 0, conclusive=bool((above.isfinite() | below.isfinite()).any()),
    )  # fmt: skip
