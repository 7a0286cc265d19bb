"""Robust accuracy over epsilons of one attack: what `vitlens.attack(epsilons=[...])` gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vitlens.attacks.registry import members_of
from vitlens.errors import InputError
from vitlens.models.model import Model
from vitlens.pixels import Parts
from vitlens.summary import Summary


@dataclass(frozen=True, repr=False)
class AttackCurve(Summary):
    """An attack at several epsilons.

    epsilons: (epsilons,), pixel units, in the attack's norm; robust_accuracy: (epsilons,), the fraction of all images
    classified correctly within each, which never rises; success: (epsilons, batch), whether the attack succeeded within
    each; tried: whether the clean image was classified correctly, only then it is attacked; broken_at: (batch,), the
    smallest of the epsilons at which it succeeded, infinite where at none, 0 where the clean image is misclassified;
    distance: (batch,), of the smallest perturbation found, infinite where there is none; notes: caveats.
    """

    epsilons: Float[Tensor, " epsilons"]
    robust_accuracy: Float[Tensor, " epsilons"]
    success: Bool[Tensor, "epsilons batch"]
    tried: Bool[Tensor, " batch"]
    broken_at: Float[Tensor, " batch"]
    distance: Float[Tensor, " batch"]
    notes: tuple[str, ...] = ()


def curve(
    model: Model,
    images: Parts,
    labels: Tensor | str | None,
    *,
    method: str,
    epsilons: Sequence[float],
    **settings: Any,
) -> AttackCurve:
    """The curve of one attack, by `sweep` with these settings: robust images go on to the next epsilon."""
    from vitlens.attacks.sweep import sweep  # which imports attack.py

    norm = members_of(method)[0].norm
    if norm == "patch":
        raise InputError(f"expected an attack bounded by epsilon for epsilons, found {method!r}; give side instead")
    if not len(epsilons):
        raise InputError("expected at least one epsilon, found none; e.g. epsilons=[1 / 255, 2 / 255, 4 / 255]")
    axis: dict[str, Any] = {"epsilons" if norm == "linf" else "epsilons_l2": list(epsilons)}
    found = sweep(model, images, labels, attacks=[method], **axis, **settings)
    robust = torch.stack([found.robust(method, epsilon) for epsilon in found.epsilons[method]])
    return AttackCurve(
        torch.tensor(found.epsilons[method], dtype=torch.float64),
        robust.double().mean(1),
        found.clean & ~robust,
        found.clean,
        found.broken_at[method],
        found.distance[method],
        found.notes,
    )


def require_none_of(arguments: Mapping[str, object]) -> None:
    """Raise InputError for the first argument that belongs to an attack at one epsilon."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise InputError(f"expected epsilons, or an attack at one epsilon, found also {given[0]}; leave one out")
