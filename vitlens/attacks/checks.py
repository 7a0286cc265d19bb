"""Checks of an attack's arguments (epsilons, steps, restarts, targets, maps) before any model runs."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from vitlens.attacks.clean import CleanImages
from vitlens.attacks.registry import NormName
from vitlens.errors import InputError
from vitlens.shapes import Labels


def require_epsilons(epsilons: Sequence[float], norm: NormName) -> tuple[float, ...]:
    """The epsilons as floats. Raises InputError unless they are ascending, not negative, and at most 1 in L∞."""
    values = tuple(float(epsilon) for epsilon in epsilons)
    wrong = [epsilon for epsilon in values if not (0 <= epsilon < math.inf) or (norm == "linf" and epsilon > 1)]
    if wrong:
        bounds = "from 0 to 1 (the command's --epsilon: 0 to 255)" if norm == "linf" else "of 0 or more"
        raise InputError(f"expected epsilons {bounds} in pixel units, found {wrong[0]:g}; e.g. 4 / 255")
    if any(after <= before for before, after in pairwise(values)):
        raise InputError(f"expected epsilons in ascending order, found {', '.join(f'{e:g}' for e in values)}")
    return values


def require_counts(*, steps: int | None, restarts: int, keep: int = 0, batch_size: int | None = None) -> None:
    """Raise InputError unless there is at least one step, one restart and one image at a time."""
    counts = (("steps", steps, 1), ("restarts", restarts, 1), ("keep", keep, 0), ("batch size", batch_size, 1))
    for name, value, least in counts:
        if value is not None and value < least:
            raise InputError(f"expected {name} of at least {least}, found {value}")


def require_targets(targets: Tensor, clean: CleanImages, classes: int) -> Labels:
    """The target classes, on the CPU. Raises InputError unless there is one per image, different from its label."""
    if len(targets) != len(clean.labels):
        raise InputError(f"expected one target per image ({len(clean.labels)}), found {len(targets)}")
    targets = targets.detach().cpu().long()
    wrong = targets[(targets < 0) | (targets >= classes)]
    if len(wrong):
        raise InputError(f"expected target classes from 0 to {classes - 1}, found {int(wrong[0])}")
    equal = (targets == clean.labels).nonzero().flatten()
    if len(equal):
        raise InputError(
            f"expected targets other than the labels, found {int(targets[equal[0]])} for both on image "
            f"{int(clean.indices[equal[0]])}"
        )
    return targets


def require_maps(maps: Tensor | None, count: int) -> Tensor | None:
    """The maps in float32 on the CPU. Raises InputError unless there is one per image, and all are finite."""
    if maps is None:
        return None
    if maps.ndim != 3 or len(maps) != count:
        raise InputError(f"expected maps ({count}, rows, columns), found {tuple(maps.shape)}")
    if not torch.isfinite(maps).all():
        raise InputError("expected finite maps, found NaN or infinity")
    return maps.detach().cpu().float()
