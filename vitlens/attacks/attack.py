"""One attack on some images: the public function, and what it shares with the sweep."""

from dataclasses import replace

import torch
from torch import Tensor

from vitlens.analysis.answers.evaluate import fitting_batch_size
from vitlens.attacks.checks import require_counts, require_epsilons, require_maps, require_targets
from vitlens.attacks.clean import Clean, look
from vitlens.attacks.jobs import Machine
from vitlens.attacks.norms import NormName
from vitlens.attacks.plan import Plan
from vitlens.attacks.registry import ATTACKS, Attack, Setting, machine_of, members_of, side_of
from vitlens.attacks.result import AttackResult
from vitlens.attacks.sequence import worst_case
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.models.support import NEEDS, require
from vitlens.pixels import takes_images
from vitlens.shapes import Images

BACKWARD = 3  # a backward pass holds about this many times what a forward pass does
_MOST_ON_CPU = 64
_USUAL = {"linf": 8 / 255, "l2": 0.5}


@takes_images
def attack(
    model: Model,
    images: Images,
    labels: Tensor | str | None = None,
    *,
    method: str = "pgd",
    epsilon: float | None = None,
    steps: int | None = None,
    restarts: int = 1,
    targets: Tensor | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    precision: str = "fp32",
    side: int | None = None,
    aligned: bool = True,
    maps: Tensor | None = None,
) -> AttackResult:
    """Images changed so that the model no longer gets them right.

    images: (batch, 3, height, width) in [0, 1]; labels: class indices, or "predicted" to attack what the model says;
    method: a name of ATTACKS; epsilon: in pixel units (None: 8/255 for L∞, 0.5 for L2, none for an attack that looks
    for the smallest change); steps: None, as many as is usual for the method; targets: classes to reach instead of
    being wrong; precision: of gradients ("fp32", "bf16", "auto"), success is always judged in fp32; side, aligned,
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
    require(model, *NEEDS["attack"])
    clean = look(model, images, labels, batch_size=batch_size)
    setting = setting_of(model, clean, side=side, aligned=aligned, maps=maps)
    machines = [built(member, setting, steps) for member in members]
    limit, level = _level(members[0], setting, epsilon)
    aimed = None if targets is None else require_targets(targets, clean, setting.classes)
    if aimed is not None and not ATTACKS[method].targeted:
        raise InputError(f"expected pgd-targeted or apgd-targeted to reach targets, found {method!r}")
    count = len(clean.labels)
    plan = Plan(
        (level,), torch.full((count,), int(level > 0)), restarts, aimed, seed,
        batch_size or fitting_batch(model), precision, keep=count,
    )  # fmt: skip
    found = worst_case(model, clean, machines, plan)
    success = (found.level >= 0) & (found.distance <= limit)
    adversarial = clean.images.clone()
    for row in success.nonzero()[:, 0].tolist():
        adversarial[row] = found.found[row]
    return AttackResult(
        adversarial,
        success,
        torch.where(success, found.distance, 0.0),
        clean.correct,
        success if aimed is not None else torch.zeros_like(success),
        found.forwards,
        found.backwards,
        clean.notes(model.alias),
    )


def setting_of(model: Model, clean: Clean, *, side: int | None, aligned: bool, maps: Tensor | None) -> Setting:
    """What machines are made for: this model, images of this size."""
    size = int(clean.images.shape[2]), int(clean.images.shape[3])
    layout = model.anatomy.layout
    token = None
    if layout is not None:
        scaled = [round(patch * own / whole) for patch, own, whole in zip(layout.patch_size, size, layout.image_size)]
        token = max(1, scaled[0]), max(1, scaled[1])
    checked = require_maps(maps, len(clean.labels))
    return Setting(1, len(model.classes), size, token, side, aligned, checked)


def built(member: Attack, setting: Setting, steps: int | None) -> Machine:
    """An attack's machine with so many steps, or its usual number."""
    return machine_of(member, replace(setting, steps=steps or max(1, member.steps)))


def levels_of(norm: NormName, setting: Setting, epsilons: tuple[float, ...]) -> tuple[float, ...]:
    """The epsilons of an attack: those asked for; of a patch the share of the image that it covers."""
    if norm != "patch":
        return epsilons
    return (side_of(setting) ** 2 / (setting.size[0] * setting.size[1]),)


def fitting_batch(model: Model) -> int:
    """Images at a time that fit with their gradients; on a CPU, where more are no faster, few: resumed sooner."""
    most = _MOST_ON_CPU if model.device.type == "cpu" else fitting_batch_size(model)
    return max(1, min(most, fitting_batch_size(model) // BACKWARD))


def _level(member: Attack, setting: Setting, epsilon: float | None) -> tuple[float, float]:
    """Within which distance a change counts, and the epsilon that the machine is given."""
    if member.norm == "patch":
        if epsilon is not None:
            raise InputError(f"expected no epsilon for a patch, whose size is its side in px, found {epsilon:g}")
        return torch.inf, levels_of("patch", setting, ())[0]
    if epsilon is not None:
        require_epsilons([epsilon], member.norm)
    if member.kind == "minimum":
        return (torch.inf if epsilon is None else epsilon), 1.0
    level = _USUAL[member.norm] if epsilon is None else epsilon
    return torch.inf, level
