"""`vitlens.attack`: one attack on a batch of images; also the functions that it shares with the sweep."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.answers.evaluate import BACKWARD, fitting_batch_size
from vitlens.attacks.algorithm import Algorithm, Setting, algorithm_of
from vitlens.attacks.checks import require_counts, require_epsilons, require_maps, require_targets
from vitlens.attacks.clean import CleanImages, clean_images
from vitlens.attacks.curve import AttackCurve, curve, require_none_of
from vitlens.attacks.defaults import ATTACK, EPSILON, PRECISION, RESTARTS
from vitlens.attacks.plan import AttackOutcome, AttackPlan
from vitlens.attacks.registry import ATTACKS, Attack, NormName, members_of, targeted
from vitlens.attacks.sequence import worst_case
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.models.support import needs_of, require
from vitlens.names import DEFAULT_SEED
from vitlens.pixels import AnyImages, Targets, as_images, as_parts, as_targets, takes_images
from vitlens.shapes import Images
from vitlens.summary import Line, Summary

_CPU_BATCH = 64  # images at a time on a CPU: more are no faster, and a small batch makes resuming finer


@dataclass(frozen=True, repr=False)
class AttackResult(Summary):
    """Images after an attack.

    images: adversarial where success, else the clean image; success: whether the prediction was right and now is wrong,
    in fp32 on exactly these pixels (with `targets`: now is the target); distance: of images from the clean ones, in the
    attack's norm, pixel units; tried: whether the clean image was classified correctly, only then it is attacked;
    reached: whether the prediction is the given target; forwards, backwards: passes through the model; notes: caveats
    that belong to the numbers.
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
        """Robust accuracy, and the fields."""
        yield Line("robust_accuracy", self.robust_accuracy, "fraction")
        yield from super().summary()

    @property
    def robust_accuracy(self) -> float:
        """The fraction of all images that are classified correctly before and after the attack."""
        return (self.tried & ~self.success).float().mean().item()


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
) -> AttackResult | AttackCurve:
    """Adversarial images: perturbed so that the model's prediction becomes wrong; or robust accuracy over epsilons.

    images: (batch, 3, height, width) in [0, 1], or any form that `vitlens.images` takes; labels: class indices, or
    "predicted" to attack the predictions (None: those of the Split or the class folders); method: a name of
    `vitlens.list_attacks()`; epsilon: in pixel units (None: 8/255 for L∞, 0.5 for L2, none for an attack that searches
    for the smallest perturbation); epsilons: several instead, ascending, of which the result is an `AttackCurve` (not
    of a patch or a targeted attack); steps: None, the default of the method; targets: for a targeted attack, a class by
    name or index, or class indices (batch,); precision: of gradients ("fp32", "bf16", "auto"), success is always
    evaluated in fp32; side, aligned, maps: of the patch attack: px (None: a quarter of the shorter side), on tokens or
    anywhere, and attribution maps by which its position is chosen. Misclassified images are not attacked. Raises
    InputError for invalid arguments, NonFiniteError naming model and image.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> result = vitlens.attack(vit, torch.rand(2, 3, 32, 32), "predicted", method="fgsm", epsilon=8 / 255)
    >>> result.success.shape
    torch.Size([2])
    >>> found = vitlens.attack(vit, torch.rand(2, 3, 32, 32), "predicted", method="fgsm", epsilons=[0, 1 / 255])
    >>> found.robust_accuracy.shape, found.success.shape  # (epsilons,), (epsilons, images)
    (torch.Size([2]), torch.Size([2, 2]))
    """
    targets = as_targets(targets)
    if epsilons is not None:
        require_none_of({"epsilon": epsilon, "targets": targets, "side": side, "maps": maps})
        shared = {"steps": steps, "restarts": restarts, "seed": seed, "batch_size": batch_size, "precision": precision}
        return curve(model, as_parts(images), labels, method=method, epsilons=_listed(epsilons), **shared)
    require_counts(steps=steps, restarts=restarts, batch_size=batch_size)
    members = members_of(method)
    require(model, *needs_of("attack"))
    pixels = as_images(images).detach()
    clean = clean_images(model, pixels, labels, batch_size=batch_size)
    setting = setting_of(model, clean, side=side, aligned=aligned, maps=maps)
    algorithms = [build_algorithm(member, setting, steps) for member in members]
    limit, level = _level(members[0], setting, epsilon)
    classes = None if targets is None else require_targets(targets, clean, setting.classes)
    if classes is not None and not ATTACKS[method].targets:
        raise InputError(f"expected {targeted()} to reach targets, found {method!r}")
    plan = AttackPlan(
        (level,), torch.full((len(clean.labels),), int(level > 0)), restarts, classes, seed,
        batch_size or fitting_batch(model), precision, keep=len(clean.labels),
    )  # fmt: skip
    outcome = worst_case(model, clean, algorithms, plan)
    return _result(clean, pixels, outcome, limit, model.alias, targeted=classes is not None)


def _result(
    clean: CleanImages, pixels: Images, outcome: AttackOutcome, limit: float, alias: str, *, targeted: bool
) -> AttackResult:
    """The adversarial images within the limit; targeted: whether targets were given."""
    success = (outcome.level >= 0) & (outcome.distance <= limit)
    adversarial = pixels.clone()
    for row in success.nonzero()[:, 0].tolist():
        adversarial[row] = outcome.adversarial[row]
    return AttackResult(
        adversarial,
        success,
        torch.where(success, outcome.distance, 0.0),
        clean.correct,
        success if targeted else torch.zeros_like(success),
        outcome.forwards,
        outcome.backwards,
        clean.notes(alias),
    )


def setting_of(model: Model, clean: CleanImages, *, side: int | None, aligned: bool, maps: Tensor | None) -> Setting:
    """The setting of algorithms for this model and images of this size."""
    size = int(clean.images.shape[2]), int(clean.images.shape[3])
    layout = model.anatomy.layout
    token = None
    if layout is not None:
        scaled = [round(patch * side / whole) for patch, side, whole in zip(layout.patch_size, size, layout.image_size)]
        token = max(1, scaled[0]), max(1, scaled[1])
    checked = require_maps(maps, len(clean.labels))
    return Setting(1, len(model.classes), size, token, side, aligned, checked)


def build_algorithm(member: Attack, setting: Setting, steps: int | None) -> Algorithm:
    """An attack's algorithm with this number of steps; None: its default."""
    return algorithm_of(member, replace(setting, steps=steps or max(1, member.steps)))


def levels_of(norm: NormName, setting: Setting, epsilons: tuple[float, ...]) -> tuple[float, ...]:
    """The epsilons of an attack as given; for a patch, the share of the image that it covers."""
    if norm != "patch":
        return epsilons
    return (setting.square_side**2 / (setting.size[0] * setting.size[1]),)


def fitting_batch(model: Model) -> int:
    """The number of images whose passes with gradients fit into memory at once."""
    most = _CPU_BATCH if model.device.type == "cpu" else fitting_batch_size(model)
    return max(1, min(most, fitting_batch_size(model) // BACKWARD))


def _listed(epsilons: object) -> list[float]:
    """Several epsilons. Raises InputError for a single one."""
    if not isinstance(epsilons, Iterable):
        raise InputError(f"expected several epsilons, found {epsilons!r}; give epsilons=[0, {epsilons!r}] or epsilon=")
    return list(map(float, epsilons))


def _level(member: Attack, setting: Setting, epsilon: float | None) -> tuple[float, float]:
    """The largest distance that counts as a success, and the epsilon of the algorithm."""
    if not member.takes_epsilon:
        if epsilon is not None:
            raise InputError(f"expected no epsilon for a patch, whose size is its side in px, found {epsilon:g}")
        return torch.inf, levels_of(member.norm, setting, ())[0]
    if epsilon is not None:
        require_epsilons([epsilon], member.norm)
    if member.kind == "minimum":
        return (torch.inf if epsilon is None else epsilon), 1.0
    level = EPSILON[member.norm] if epsilon is None else epsilon
    return torch.inf, level
