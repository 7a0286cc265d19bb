"""Transfer: whether adversarial images of one model fool another."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from vitlens.analysis.evaluation.evaluate import accuracy
from vitlens.errors import InputError
from vitlens.uncertainty import Estimate

CorrectByModel = Bool[Tensor, "models batch"]


@dataclass(frozen=True)
class Transfer:
    """Whether each model (target) predicts the adversarial images of each model (source) correctly, by their aliases.

    clean: (models, n), which model predicts which clean image correctly; adversarial: for each source (models, n), the
    same for its adversarial images; fooled: (models, n), which images fool their own source; groups: (n,) what images
    share, or None.
    """

    aliases: tuple[str, ...]
    clean: CorrectByModel
    adversarial: tuple[CorrectByModel, ...]
    fooled: CorrectByModel
    groups: Tensor | None = None

    def clean_accuracy(self, target: int, *, seed: int = 0) -> Estimate:
        """The accuracy of one model on the clean images."""
        return accuracy(self.clean[target], groups=self.groups, seed=seed)

    def accuracy(self, source: int, target: int, *, seed: int = 0) -> Estimate:
        """The accuracy of the target on all images of the source, clean ones where its attack failed."""
        return accuracy(self.adversarial[source][target], groups=self.groups, seed=seed)

    def rate(self, source: int, target: int, *, seed: int = 0) -> Estimate | None:
        """The share that fool the target, of the images that fool the source and whose clean version it predicts right.

        None where there is no such image; 1 where source and target are the same model.
        """
        counted = self.fooled[source] & self.clean[target]
        if not bool(counted.any()):
            return None
        groups = None if self.groups is None else self.groups[counted]
        return accuracy(~self.adversarial[source][target][counted], groups=groups, seed=seed)


def transfer(
    aliases: Sequence[str],
    clean: CorrectByModel,
    adversarial: Sequence[CorrectByModel],
    fooled: CorrectByModel,
    *,
    groups: Tensor | None = None,
) -> Transfer:
    """The transfer between all pairs of models. Raises InputError unless each model has a row of the same images."""
    shapes = {tuple(table.shape) for table in (clean, fooled, *adversarial)}
    if len(adversarial) != len(aliases) or shapes != {(len(aliases), clean.shape[1])}:
        raise InputError(f"expected results of {len(aliases)} models on the same images, found shapes {sorted(shapes)}")
    return Transfer(tuple(aliases), clean, tuple(torch.as_tensor(table) for table in adversarial), fooled, groups)
