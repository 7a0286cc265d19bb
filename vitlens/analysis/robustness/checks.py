"""Self-checks of attacks: whether a robust accuracy can be believed, and signs of masked gradients.

A model looks robust when its attack is broken: gradients that vanish, a step that is too small, examples outside the
budget. Each check says what is expected of a sound attack, what was found, and whether that is suspicious (Athalye
2018, "Obfuscated gradients"; Carlini 2019, "On evaluating adversarial robustness"). What runs an attack is handed in.
An attack that searches for the smallest perturbation has no budget that could be made larger; one that gives up, or
stops too far out, shows in its distances.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from vitlens.analysis.robustness.curve import Outcome
from vitlens.analysis.robustness.verdict import Check
from vitlens.devices import evaluating
from vitlens.errors import NonFiniteError
from vitlens.models.model import Model
from vitlens.shapes import Images, Labels
from vitlens.uncertainty import mcnemar

SIGNIFICANT = 0.05  # p-value up to which a difference is not noise
NEAR = 0.05  # of a distance: by how much a longer search may differ
ROUNDING = 1e-6  # numerics: how far beyond its budget a perturbation may reach
EVERYTHING = 1.0  # the epsilon (largest difference of a pixel) within which every image is every other


@runtime_checkable
class Attacked(Protocol):
    """What an attack gives back: the images it found, which of them fool the model, and which it tried."""

    @property
    def images(self) -> Tensor:
        """(batch, 3, height, width) in [0, 1]."""
        ...

    @property
    def success(self) -> Tensor:
        """(batch,), right before and wrong now."""
        ...

    @property
    def tried(self) -> Tensor:
        """(batch,), right before."""
        ...


@runtime_checkable
class Attempt(Protocol):
    """One attack on one model, ready to run with another budget, number of steps or batch size (None: its own)."""

    def __call__(
        self,
        images: Images,
        labels: Labels,
        *,
        epsilon: float,
        steps: int | None = None,
        batch_size: int | None = None,
    ) -> Attacked:
        """Attack these images."""
        ...


def at_epsilon_zero(attack: str, attempt: Attempt, images: Images, labels: Labels) -> Check:
    """With epsilon 0 no image is fooled and no pixel changes: robust accuracy is clean accuracy."""
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
    attack: str, model: Model, result: Attacked, images: Images, labels: Labels, *, epsilon: float, norm: str
) -> Check:
    """Examples lie within epsilon and in [0, 1], and what counts as fooled is wrong now and was right before.

    norm: "linf", "l2", or another, of which only the range of pixels is known.
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


def same_in_any_batch(attack: str, whole: Attacked, parts: Attacked) -> Check:
    """The result of an image does not depend on the batch size.

    whole, parts: of the same images, attacked in one batch and in smaller ones.
    """
    count = len(whole.success)
    other = int((whole.success.cpu() != parts.success.cpu()).sum())
    # kernels round differently for other sizes, and a sign that flips there moves a pixel: an image may go another way
    return Check(
        "batch size", attack, "the same images fooled, whatever the batch size (rounding may decide one)",
        f"{other} of {count} differ", other <= 1, conclusive=bool(whole.success.any() or parts.success.any()),
    )  # fmt: skip


def visible_gradients(model: Model, images: Images, labels: Labels, *, attack: str = "gradients") -> Check:
    """The loss has a gradient that is not 0 at (nearly) every image, for attacks to follow."""
    zero = vanishing(model, images, labels)
    share = float(zero.float().mean())
    return Check(
        "gradients", attack, "not all zero, for at least 9 images in 10",
        f"all zero for {int(zero.sum())} of {len(images)}", share <= 0.1,
    )  # fmt: skip


def vanishing(model: Model, images: Images, labels: Labels) -> Bool[Tensor, " batch"]:
    """For which images the gradient of the cross-entropy by pixels is zero everywhere.

    Raises NonFiniteError, naming model and image, where it is NaN or infinite.
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
    return (flat == 0).all(1).cpu()


def unlimited(
    attack: str, attempt: Attempt, images: Images, labels: Labels, *, epsilon: float = EVERYTHING, steps: int = 50
) -> Check:
    """Without a limit every image can become any other, so no image stays right."""
    result = attempt(images, labels, epsilon=epsilon, steps=steps)
    left = int((result.tried & ~result.success).sum())
    tried = int(result.tried.sum())
    return Check(
        "no limit", attack, "0 % robust when any image may become any other",
        f"{left} of {tried} right images left after {steps} steps", left == 0, conclusive=tried > 0,
    )  # fmt: skip


def more_steps(
    attack: str, attempt: Attempt, images: Images, labels: Labels, *, epsilon: float, steps: int, times: int = 4
) -> Check:
    """More steps break no fewer images but by chance; and where they break many more, the attack was too short."""
    few, many = (attempt(images, labels, epsilon=epsilon, steps=count) for count in (steps, times * steps))
    lost = int((few.success & ~many.success).sum())
    gained = int((~few.success & many.success).sum())
    p = mcnemar(lost, gained)
    apart = p <= SIGNIFICANT
    word = "" if not apart else ("; more steps break fewer" if lost > gained else "; too few steps, raise --steps")
    return Check(
        "more steps", attack, f"{times} times the steps break as many images, but for chance",
        f"{int(few.success.sum())} fooled with {steps} steps, {int(many.success.sum())} with {times * steps}{word}",
        not apart, conclusive=bool(few.success.any() or many.success.any()),
    )  # fmt: skip


def all_found(outcome: Outcome) -> Check:
    """Without a limit some perturbation fools the model on every image, so an attack that finds none has given up."""
    right = int(outcome.clean.sum())
    missed = int((outcome.clean & outcome.broken_at.isinf()).sum())
    return Check(
        "no limit", outcome.name, "a change found for every right image", f"none found for {missed} of {right}",
        missed == 0,
    )  # fmt: skip


def as_near(
    attack: str, attempt: Attempt, images: Images, labels: Labels, *, epsilon: float, steps: int, times: int = 2
) -> Check:
    """A longer search loses no image and finds perturbations about as small; otherwise the search was too short.

    epsilon: L2, pixel units, large enough to count whatever is found.
    """
    few, many = (attempt(images, labels, epsilon=epsilon, steps=count) for count in (steps, times * steps))
    short, long = (lengths(result.images.cpu() - images.cpu(), "l2") for result in (few, many))
    both = few.success.cpu() & many.success.cpu()
    lost = int((few.success & ~many.success).sum())
    name, expected = "more steps", f"{times} times the steps find changes as small, within {100 * NEAR:.0f} %"
    if not bool(both.any()):
        return Check(name, attack, expected, f"no change found for any of {len(images)} images", passed=False)
    change = float(torch.median(long[both] / short[both])) - 1
    gained = int((~few.success & many.success).sum())
    word = "; too few steps, raise --steps" if change < -NEAR or gained else ""
    return Check(
        name, attack, expected,
        f"{100 * change:+.1f} % (median of {int(both.sum())} images), {lost} lost, {gained} gained{word}",
        abs(change) <= NEAR and lost == gained == 0,
    )  # fmt: skip


def predicted(model: Model, images: Images) -> Int[Tensor, " batch"]:
    """The classes that the model gives to a few images, in fp32."""
    with evaluating(model), torch.no_grad():
        answers: Tensor = model(images.to(model.device).float()).argmax(-1).cpu()
    return answers
