"""`vitlens.attack`: an attack on images at one epsilon, or at several.

Over several epsilons an image that is robust at one is attacked at the next; one on which the
attack succeeds counts as broken at every larger epsilon, so that robust accuracy never rises with
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
from vitlens.attacks.plan import AttackPlan, clean_images
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
from vitlens.shapes import Images
from vitlens.summary import Line, Table

_PLAN = AttackPlan()
# for L∞; a larger epsilon is most often a number of 255ths that was not divided
_LARGEST_USUAL: Final = 32 / 255


@dataclass(frozen=True, repr=False)
class AttackResult(Table):
    """Images after an attack.

    images: adversarial where success, else the clean image, in fp32 also for a module in 16 bits.
    success: whether the prediction was right and now is wrong, without autocast, on exactly these
        pixels (with `targets`: now is the target).
    distance: the distance of images from the clean ones, in the attack's norm, pixel units.
    tried: whether the clean image was classified correctly, only then it is attacked.
    reached: whether the prediction is the given target.
    forwards, backwards: passes through the model.
    notes: caveats that belong to the numbers.
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
        """Return a row for each image: all fields but its pixels."""
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

    epsilons: (epsilons,), pixel units, in the attack's norm.
    robust_accuracy: (epsilons,), the fraction of all images classified correctly within each, which
        never rises.
    success: (epsilons, batch), whether the attack succeeded within each.
    tried: whether the clean image was classified correctly, only then it is attacked.
    broken_at: (batch,), the smallest of the epsilons at which it succeeded, infinite where at none,
        0 where the clean image is misclassified.
    distance: (batch,), of the smallest perturbation found, infinite where there is none.
    notes: caveats.
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

    images: (batch, 3, height, width) in [0, 1], or any form that `vitlens.images` takes; labels:
    class indices, or "predicted" to attack the predictions (None: those of the Split or the class
    folders); method: a name of `vitlens.list_attacks()`; epsilon: in pixel units, such as 4 / 255
    (None: 8/255 for L∞, 0.5 for L2, none for an attack that searches for the smallest
    perturbation); epsilons: several instead, ascending, of which the result is an `AttackCurve`
    (not of a patch or a targeted attack); steps: None, the default of the method; targets: for a
    targeted attack, a class by name or index, or class indices (batch,); precision: of gradients
    ("fp32", "bf16", "auto"), success is always evaluated in fp32; side, aligned, maps: of the patch
    attack: px (None: a quarter of the shorter side), on tokens or anywhere, and attribution maps by
    which its position is chosen; stride: of PGD, its step as a multiple of epsilon / steps (None:
    2.5). Misclassified images are not attacked. Raises InputError for invalid arguments,
    NonFiniteError naming model and image; warns of an L∞ epsilon above 32/255.

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
                raise InputError(
                    f"expected epsilons, or an attack at one epsilon, found also {name}; leave one "
                    "out"
                )
        return _attack_curve(model, as_parts(images), labels, plan, entry, epsilons)
    model.require_classifier()
    if epsilon is not None and not entry.takes_epsilon:
        raise InputError(
            f"expected no epsilon for a patch, whose size is its side in px, found {epsilon:g}"
        )
    pixels = as_images(images).detach()
    clean = clean_images(model, pixels, labels, batch_size=batch_size)
    size = EPSILON.get(entry.norm, 0.0) if epsilon is None else epsilon
    (level,) = plan.epsilons(entry, model, clean, [size])
    limit = torch.inf
    _warn_of_large_epsilon(entry, [size])
    if entry.kind == "minimum":
        # it searches without an epsilon, and its result counts within this distance
        level = 1.0
        limit = torch.inf if epsilon is None else epsilon
    if plan.targets is not None:
        if not entry.targets:
            targeted = " or ".join(other.name for other in ATTACKS.values() if other.targets)
            raise InputError(f"expected {targeted} to reach targets, found {method!r}")
        equal = (plan.targets.cpu() == clean.labels).nonzero().flatten()
        if len(equal):
            raise InputError(
                f"expected targets other than the labels, found {int(plan.targets[equal[0]])} for "
                f"both on image {int(clean.indices[equal[0]])}"
            )
    plan = replace(plan, levels=(level,) if level > 0 else (), keep=True)  # at 0 no image changes
    outcome = worst_case(model, clean, entry, plan)
    success = (outcome.level >= 0) & (outcome.distance <= limit)
    adversarial = pixels.clone()
    for row in success.nonzero()[:, 0].tolist():
        adversarial[row] = outcome.adversarial[row]
    return AttackResult(
        adversarial,
        success,
        torch.where(success, outcome.distance, 0.0),
        clean.correct,
        torch.zeros_like(success) if plan.targets is None else success,
        outcome.forwards,
        outcome.backwards,
        clean.notes,
    )


def _attack_curve(
    model: Model,
    images: Parts,
    labels: Tensor | str | None,
    plan: AttackPlan,
    entry: Attack,
    epsilons: Sequence[float],
) -> AttackCurve:
    """Return an attack at several epsilons. Raises InputError for wrong ones."""
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
            stacklevel=4,  # of the user, who calls through takes_images
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

    epsilons: in pixel units, ascending, 0 allowed (None: the defaults of the attack's norm; a patch
        has its own).
    indices: the indices of the images in the data set, which seed the random draws, so that the
        parts of a data set give the same results as the whole.
    on_progress: called with the number of images just finished.

    Raises the errors of `vitlens.attack`.
    """
    entry = attack_named(attack)
    clean = clean_images(model, images, labels, indices=indices, batch_size=plan.batch_size)
    axis = plan.epsilons(entry, model, clean, epsilons)
    above_0 = tuple(epsilon for epsilon in axis if epsilon > 0)  # at 0 no image changes
    levels = above_0
    if entry.kind == "minimum":  # a search for the smallest perturbation runs once
        levels = (1.0,)
    start = time.perf_counter()
    outcome = worst_case(model, clean, entry, replace(plan, levels=levels), advance=on_progress)
    seconds = time.perf_counter() - start
    tried = torch.tensor([*above_0, torch.inf], dtype=torch.float64)
    if entry.kind == "minimum":  # the first epsilon that is not below the distance
        broken = torch.searchsorted(tried, outcome.distance.double())
    else:
        broken = outcome.level.where(outcome.level >= 0, len(tried) - 1)
    is_wrong = ~clean.correct
    return Outcome(
        name=entry.slug,
        alias=model.alias,
        epsilons=axis,
        clean=clean.correct,
        broken_at=tried[broken].masked_fill(is_wrong, 0.0),
        distance=outcome.distance.masked_fill(is_wrong, 0.0),
        zero_gradients=outcome.zero_gradients,
        forwards=int(outcome.forwards.sum()),
        backwards=int(outcome.backwards.sum()),
        seconds=seconds,
        notes=clean.notes,
    )
