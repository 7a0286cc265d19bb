"""One attack on some images: the public function, and what it shares with the sweep."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.attacks.algorithm import Algorithm, Setting, algorithm_of
from vitlens.attacks.checks import require_counts, require_epsilons, require_maps, require_targets
from vitlens.attacks.clean import CleanImages, clean_images
from vitlens.attacks.defaults import ATTACK, EPSILON, RESTARTS
from vitlens.attacks.plan import AttackOutcome, AttackPlan
from vitlens.attacks.registry import ATTACKS, Attack, NormName, members_of, targeted
from vitlens.attacks.sequence import worst_case
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.models.support import needs_of, require
from vitlens.pixels import takes_images
from vitlens.shapes import Images

BACKWARD = 3  # a backward pass holds about this many times what a forward pass does
_MOST_ON_CPU = 64


@dataclass(frozen=True)
class AttackResult:
    """Images after an attack.

    images: adversarial where success, else the clean image; success: was right and now is wrong, judged in fp32 on
    exactly these pixels (where targets were handed in: took its target for it); distance: of images from the clean
    ones, in the attack's norm, pixel units; tried: was right before; reached: has the class that was handed in as
    target; forwards, backwards: passes through the model; notes: what must be said beside the numbers.
    """

    images: Images
    success: Bool[Tensor, " batch"]
    distance: Float[Tensor, " batch"]
    tried: Bool[Tensor, " batch"]
    reached: Bool[Tensor, " batch"]
    forwards: Int[Tensor, " batch"]
    backwards: Int[Tensor, " batch"]
    notes: tuple[str, ...] = ()

    @property
    def robust_accuracy(self) -> float:
        """The fraction of all images that were right and still are."""
        return (self.tried & ~self.success).float().mean().item()


@takes_images
def attack(
    model: Model,
    images: Images,
    labels: Tensor | str | None = None,
    *,
    method: str = ATTACK,
    epsilon: float | None = None,
    steps: int | None = None,
    restarts: int = RESTARTS,
    targets: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    precision: str = "fp32",
    side: int | None = None,
    aligned: bool = True,
    maps: Tensor | None = None,
) -> AttackResult:
    """Images perturbed so that the model no longer gets them right.

    images: (batch, 3, height, width) in [0, 1]; labels: class indices, or "predicted" to attack the predictions;
    method: a name of ATTACKS; epsilon: in pixel units (None: 8/255 for L∞, 0.5 for L2, none for an attack that
    searches for the smallest perturbation); steps: None, the default of the method; targets: classes to reach instead
    of being wrong; precision: of gradients ("fp32", "bf16", "auto"), success is always judged in fp32; side, aligned,
    maps: of the patch attack: px (None: a quarter of the shorter side), on tokens or anywhere, and by what its place is
    chosen. Images that the model gets wrong already are left alone. Raises InputError for what cannot be attacked,
    NonFiniteError naming model and image.

    >>> import torch, vitlens
    >>> vit = vitlens.load("vit-digits")
    >>> result = vitlens.attack(vit, torch.rand(2, 3, 32, 32), "predicted", method="fgsm", epsilon=8 / 255)
    >>> result.success.shape
    torch.Size([2])
    """
    require_counts(steps=steps, restarts=restarts, batch_size=batch_size)
    members = members_of(method)
    require(model, *needs_of("attack"))
    clean = clean_images(model, images, labels, batch_size=batch_size)
    setting = setting_of(model, clean, side=side, aligned=aligned, maps=maps)
    algorithms = [built(member, setting, steps) for member in members]
    limit, level = _level(members[0], setting, epsilon)
    reach = None if targets is None else require_targets(targets, clean, setting.classes)
    if reach is not None and not ATTACKS[method].targets:
        raise InputError(f"expected {targeted()} to reach targets, found {method!r}")
    count = len(clean.labels)
    plan = AttackPlan(
        (level,), torch.full((count,), int(level > 0)), restarts, reach, seed,
        batch_size or fitting_batch(model), precision, keep=count,
    )  # fmt: skip
    outcome = worst_case(model, clean, algorithms, plan)
    return _result(clean, outcome, limit, model.alias, reached=reach is not None)


def _result(clean: CleanImages, outcome: AttackOutcome, limit: float, alias: str, *, reached: bool) -> AttackResult:
    """The adversarial images within the limit; reached: whether targets were asked for."""
    success = (outcome.level >= 0) & (outcome.distance <= limit)
    adversarial = clean.images.clone()
    for row in success.nonzero()[:, 0].tolist():
        adversarial[row] = outcome.adversarial[row]
    return AttackResult(
        adversarial,
        success,
        torch.where(success, outcome.distance, 0.0),
        clean.correct,
        success if reached else torch.zeros_like(success),
        outcome.forwards,
        outcome.backwards,
        clean.notes(alias),
    )


def setting_of(model: Model, clean: CleanImages, *, side: int | None, aligned: bool, maps: Tensor | None) -> Setting:
    """What algorithms are made for: this model, images of this size."""
    size = int(clean.images.shape[2]), int(clean.images.shape[3])
    layout = model.anatomy.layout
    token = None
    if layout is not None:
        scaled = [round(patch * own / whole) for patch, own, whole in zip(layout.patch_size, size, layout.image_size)]
        token = max(1, scaled[0]), max(1, scaled[1])
    checked = require_maps(maps, len(clean.labels))
    return Setting(1, len(model.classes), size, token, side, aligned, checked)


def built(member: Attack, setting: Setting, steps: int | None) -> Algorithm:
    """An attack's algorithm with so many steps, or its default number."""
    return algorithm_of(member, replace(setting, steps=steps or max(1, member.steps)))


def levels_of(norm: NormName, setting: Setting, epsilons: tuple[float, ...]) -> tuple[float, ...]:
    """The epsilons of an attack: those asked for; of a patch the share of the image that it covers."""
    if norm != "patch":
        return epsilons
    return (setting.square_side**2 / (setting.size[0] * setting.size[1]),)


def fitting_batch(model: Model) -> int:
    """Images at a time that fit with their gradients; on a CPU, where more are no faster, few: resumed sooner."""
    most = _MOST_ON_CPU if model.device.type == "cpu" else fitting_batch_size(model)
    return max(1, min(most, fitting_batch_size(model) // BACKWARD))


def _level(member: Attack, setting: Setting, epsilon: float | None) -> tuple[float, float]:
    """Within which distance a perturbation counts, and the epsilon that the algorithm is given."""
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
