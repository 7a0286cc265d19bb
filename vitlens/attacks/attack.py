"""`vitlens.attack`: an attack on images at one epsilon, or at several.

With several epsilons, an image that is robust at one epsilon is attacked at the next. An image that
is broken at one epsilon counts as broken at every larger one, so robust accuracy never rises with
epsilon.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.attacks.engine import worst_case
from vitlens.attacks.plan import AttackPlan, CleanImages, clean_images
from vitlens.attacks.registry import (
    ATTACK,
    ATTACKS,
    EPSILON,
    PRECISION,
    RESTARTS,
    Attack,
    attack_named,
)
from vitlens.attacks.robustness import Outcome
from vitlens.errors import InputError, flags_are_typed
from vitlens.inputs import takes_images
from vitlens.models.model import Model
from vitlens.names import DEFAULT_SEED
from vitlens.pixels import AnyImages, Parts, Targets, as_images, as_parts, as_targets
from vitlens.shapes import Images, Labels
from vitlens.summary import Line, Table

_PLAN = AttackPlan()  # all defaults
# A larger L∞ epsilon is usually a mistake: a number of 255ths that was not divided by 255.
_LARGEST_USUAL: Final = 32 / 255


@dataclass(frozen=True, repr=False)
class AttackResult(Table):
    """Images after an attack.

    images: the adversarial image if the attack succeeded, else the clean image. In fp32, also for a
        module in 16 bits.
    success: True if the prediction was right and now is wrong (with `targets`: now is the target).
        It is evaluated on exactly these pixels, without autocast.
    distance: the distance from the clean image, in the attack's norm and pixel units.
    tried: True if the clean image was classified correctly. Only such images are attacked.
    reached: True if the target is predicted, False without targets.
    forwards, backwards: the numbers of passes through the model.
    notes: caveats of the numbers.
    """

    images: Images
    success: Bool[Tensor, " batch"]
    distance: Float[Tensor, " batch"]
    tried: Bool[Tensor, " batch"]
    reached: Bool[Tensor, " batch"]
    forwards: Int[Tensor, " batch"]
    backwards: Int[Tensor, " batch"]
    notes: tuple[str, ...] = ()

    def summary(self) -> Iterator[Line]:
        """Yield the robust accuracy, and the fields."""
        yield Line("robust_accuracy", self.robust_accuracy, "fraction")
        yield from super().summary()

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each image: all fields except its pixels."""
        names = ("tried", "success", "reached", "distance", "forwards", "backwards")
        columns = {name: getattr(self, name).tolist() for name in names}
        for image in range(len(self.tried)):
            row: dict[str, object] = {"image": image}
            for name, values in columns.items():
                row[name] = values[image]
            yield row

    @property
    def robust_accuracy(self) -> float:
        """Return the fraction of all images classified correctly before and after the attack."""
        return (self.tried & ~self.success).float().mean().item()


@dataclass(frozen=True, repr=False)
class AttackCurve(Table):
    """An attack at several epsilons.

    epsilons (epsilons,): the epsilons in pixel units, in the attack's norm.
    robust_accuracy (epsilons,): the fraction of all images that are classified correctly at each
        epsilon. It never rises.
    success (epsilons, batch): True if the attack succeeded at this epsilon or a smaller one.
    tried (batch,): True if the clean image was classified correctly. Only such images are attacked.
    broken_at (batch,): the smallest epsilon at which the attack succeeded. Infinite if it never
        did, 0 if the clean image is misclassified.
    distance (batch,): the length of the smallest perturbation, infinite if there is none.
    notes: caveats of the numbers.
    """

    epsilons: Float[Tensor, " epsilons"]
    robust_accuracy: Float[Tensor, " epsilons"]
    success: Bool[Tensor, "epsilons batch"]
    tried: Bool[Tensor, " batch"]
    broken_at: Float[Tensor, " batch"]
    distance: Float[Tensor, " batch"]
    notes: tuple[str, ...] = ()

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each epsilon: robust accuracy, and the number of successes."""
        successes = self.success.sum(1).tolist()
        for index, epsilon in enumerate(self.epsilons.tolist()):
            yield {
                "epsilon": epsilon,
                "robust_accuracy": float(self.robust_accuracy[index]),
                "images": len(self.tried),
                "success": successes[index],
            }


@overload
def attack(
    model: Model,
    images: AnyImages,
    labels: Tensor | str | None = None,
    *,
    method: str = ATTACK,
    epsilon: float | None = None,
    epsilons: None = None,
    steps: int | None = None,
    restarts: int = RESTARTS,
    targets: Targets = None,
    seed: int = DEFAULT_SEED,
    batch_size: int | None = None,
    precision: str = PRECISION,
    side: int | None = None,
    aligned: bool = True,
    maps: Tensor | None = None,
    stride: float | None = None,
) -> AttackResult: ...


@overload
def attack(
    model: Model,
    images: AnyImages,
    labels: Tensor | str | None = None,
    *,
    epsilons: Sequence[float],
    method: str = ATTACK,
    steps: int | None = None,
    restarts: int = RESTARTS,
    seed: int = DEFAULT_SEED,
    batch_size: int | None = None,
    precision: str = PRECISION,
    stride: float | None = None,
) -> AttackCurve: ...


@takes_images
def attack(
    model: Model,
    images: AnyImages,
    labels: Tensor | str | None = None,
    *,
    method: str = ATTACK,
    epsilon: float | None = None,
    epsilons: Sequence[float] | None = None,
    steps: int | None = None,
    restarts: int = RESTARTS,
    targets: Targets = None,
    seed: int = DEFAULT_SEED,
    batch_size: int | None = None,
    precision: str = PRECISION,
    side: int | None = None,
    aligned: bool = True,
    maps: Tensor | None = None,
    stride: float | None = None,
) -> AttackResult | AttackCurve:
    """Return adversarial images, or robust accuracy over epsilons.

    Images are perturbed so that the model's prediction becomes wrong.

    Misclassified images are not attacked.

    images: (batch, 3, height, width) in [0, 1], or any form that `vitlens.images` takes.
    labels: class indices, or "predicted" to attack the predictions (None: the labels of the Split
        or the class folders).
    method: a name of `vitlens.list_attacks()`.
    epsilon: the budget in pixel units, such as 4 / 255 (None: 8/255 for L∞, 0.5 for L2, none for an
        attack that searches for the smallest perturbation).
    epsilons: several epsilons instead, ascending. The result is then an `AttackCurve`. A patch or a
        targeted attack cannot have several.
    steps: the number of steps (None: the default of the method).
    restarts: the number of restarts from another random start.
    targets: the targets of a targeted attack: a class by name or index, or class indices (batch,).
    seed: the seed of random starts and draws.
    batch_size: the number of images at a time (None: chosen to fit into memory).
    precision: the precision of gradients, "fp32", "bf16" or "auto". Success is always evaluated in
        fp32.
    side: the side of the patch attack's square in px (None: a quarter of the shorter side).
    aligned: True if the square lies on whole tokens, False if it may lie anywhere.
    maps: attribution maps that choose the position of the square (None: random positions).
    stride: the step of PGD as a multiple of epsilon / steps (None: 2.5).

    Raises InputError for invalid arguments. Raises NonFiniteError, with the names of model and
    image. Warns of an L∞ epsilon above 32/255.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> images = torch.rand(2, 3, 32, 32)
    >>> result = vitlens.attack(vit, images, "predicted", method="fgsm", epsilon=8 / 255)
    >>> result.success.shape
    torch.Size([2])
    >>> curve = vitlens.attack(vit, images, "predicted", method="fgsm", epsilons=[0, 1 / 255])
    >>> curve.robust_accuracy.shape, curve.success.shape  # (epsilons,), (epsilons, images)
    (torch.Size([2]), torch.Size([2, 2]))
    """
    plan = AttackPlan(
        steps=steps,
        restarts=restarts,
        targets=as_targets(targets),
        seed=seed,
        batch_size=batch_size,
        precision=precision,
        side=side,
        aligned=aligned,
        maps=maps,
        stride=stride,
    )
    entry = attack_named(method)
    if epsilons is not None:
        single = {"epsilon": epsilon, "targets": plan.targets, "side": side, "maps": maps}
        for name, value in single.items():
            if value is not None:
                raise InputError(f"expected epsilons or {name}, found both; leave one out")
        return _attack_curve(model, as_parts(images), labels, plan, entry, epsilons)
    model.require_classifier()
    if epsilon is not None and not entry.takes_epsilon:
        raise InputError(
            f"expected no epsilon for a patch, whose size is its side in px, found {epsilon:g}"
        )
    pixels = as_images(images).detach()
    clean = clean_images(model, pixels, labels, batch_size=batch_size)
    budget = EPSILON.get(entry.norm, 0.0) if epsilon is None else epsilon
    (level,) = plan.epsilons(entry, model, clean, [budget])
    _warn_of_large_epsilon(entry, [budget])
    longest = torch.inf  # the longest perturbation that counts as a success: any
    if entry.kind == "minimum":
        level = 1.0  # the search itself has no epsilon, so any level will do
        if epsilon is not None:
            longest = epsilon
    if plan.targets is not None:
        _check_targets(entry, plan.targets, clean)
    levels = (level,) if level > 0 else ()  # with epsilon 0 no image changes
    plan = replace(plan, levels=levels, keep=True)
    outcome = worst_case(model, clean, entry, plan)
    success = (outcome.level_index >= 0) & (outcome.distance <= longest)
    adversarial = pixels.clone()
    for row in success.nonzero()[:, 0].tolist():
        adversarial[row] = outcome.adversarial[row]
    return AttackResult(
        images=adversarial,
        success=success,
        distance=torch.where(success, outcome.distance, 0.0),
        tried=clean.correct,
        reached=torch.zeros_like(success) if plan.targets is None else success,
        forwards=outcome.forwards,
        backwards=outcome.backwards,
        notes=clean.notes,
    )


def _check_targets(entry: Attack, targets: Labels, clean: CleanImages) -> None:
    """Raise InputError for an attack without targets, or a target that is the label."""
    if not entry.targets:
        targeted = " or ".join(other.name for other in ATTACKS.values() if other.targets)
        raise InputError(f"expected {targeted} to reach targets, found {entry.name!r}")
    equal = (targets.cpu() == clean.labels).nonzero().flatten()
    if len(equal):
        raise InputError(
            f"expected targets other than the labels, found {int(targets[equal[0]])} for "
            f"both on image {int(clean.indices[equal[0]])}"
        )


def _attack_curve(
    model: Model,
    images: Parts,
    labels: Tensor | str | None,
    plan: AttackPlan,
    entry: Attack,
    epsilons: Sequence[float],
) -> AttackCurve:
    """Return an attack at several epsilons. Raises InputError for invalid epsilons."""
    if not isinstance(epsilons, Iterable):
        raise InputError(
            f"expected several epsilons, found {epsilons!r}; give epsilons=[0, {epsilons!r}] "
            "or epsilon="
        )
    levels = [float(epsilon) for epsilon in epsilons]
    if not entry.takes_epsilon:
        raise InputError(
            f"expected an attack bounded by epsilon for epsilons, found {entry.name!r}; give side "
            "instead"
        )
    if not levels:
        raise InputError(
            "expected at least one epsilon, found none; e.g. epsilons=[1 / 255, 2 / 255, 4 / 255]"
        )
    _warn_of_large_epsilon(entry, levels)
    outcome = sweep(model, images, labels, plan, attack=entry.name, epsilons=levels)
    axis = torch.tensor(levels, dtype=torch.float64)
    robust = outcome.clean & (outcome.broken_at > axis[:, None])
    return AttackCurve(
        epsilons=axis,
        robust_accuracy=robust.double().mean(1),
        success=outcome.clean & ~robust,
        tried=outcome.clean,
        broken_at=outcome.broken_at,
        distance=outcome.distance,
        notes=outcome.notes,
    )


def _warn_of_large_epsilon(entry: Attack, levels: Sequence[float]) -> None:
    largest = max(levels)
    if entry.norm == "linf" and _LARGEST_USUAL < largest <= 1 and not flags_are_typed():
        warnings.warn(
            f"expected epsilon of at most 32/255 in pixel units, found {largest:g}, which is "
            f"{255 * largest:.4g}/255; give {largest:g} / 255 if you mean that",
            UserWarning,
            stacklevel=4,  # the call of the user, which goes through takes_images
        )


def sweep(
    model: Model,
    images: Parts,
    labels: Tensor | str | None = None,
    plan: AttackPlan = _PLAN,
    *,
    attack: str = ATTACK,
    epsilons: Sequence[float] | None = None,
    indices: Sequence[int] | None = None,
    on_progress: Callable[[int], object] = lambda _: None,
) -> Outcome:
    """Attack every image at every epsilon, up to the first at which the attack succeeds.

    epsilons: ascending, in pixel units; 0 is allowed (None: the defaults of the attack's norm). A
        patch takes none: its epsilon is the share of the image that it covers.
    indices: the indices of the images in the data set. They seed the random draws, so the parts of
        a data set give the same results as the whole.
    on_progress: called with the number of images just finished.

    Raises the errors of `vitlens.attack`.
    """
    entry = attack_named(attack)
    clean = clean_images(model, images, labels, indices=indices, batch_size=plan.batch_size)
    all_epsilons = plan.epsilons(entry, model, clean, epsilons)
    above_0 = tuple(epsilon for epsilon in all_epsilons if epsilon > 0)  # at 0 no image changes
    levels = above_0
    if entry.kind == "minimum":
        levels = (1.0,)  # the search has no epsilon and runs once, so any level will do
    start = time.perf_counter()
    outcome = worst_case(model, clean, entry, replace(plan, levels=levels), advance=on_progress)
    seconds = time.perf_counter() - start
    # ends[i] is the epsilon that breaks an image with the index i; the last, infinity, is that of
    # robust images
    ends = torch.tensor([*above_0, torch.inf], dtype=torch.float64)
    if entry.kind == "minimum":
        broken_index = torch.searchsorted(ends, outcome.distance.double())
    else:
        broken_index = outcome.level_index.where(outcome.level_index >= 0, len(ends) - 1)
    is_wrong = ~clean.correct
    return Outcome(
        name=entry.slug,
        alias=model.alias,
        epsilons=all_epsilons,
        clean=clean.correct,
        broken_at=ends[broken_index].masked_fill(is_wrong, 0.0),
        distance=outcome.distance.masked_fill(is_wrong, 0.0),
        zero_gradients=outcome.zero_gradients,
        forwards=int(outcome.forwards.sum()),
        backwards=int(outcome.backwards.sum()),
        seconds=seconds,
        notes=clean.notes,
    )
