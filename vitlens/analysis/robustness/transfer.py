"""Do images made to fool one model fool another?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from vitlens.analysis.answers.evaluate import accuracy
from vitlens.errors import InputError
from vitlens.uncertainty import Estimate

Judged = Bool[Tensor, "models batch"]


@dataclass(frozen=True)
class Transfer:
    """What each model (source) made, shown to each (target); rows are sources, columns targets, in order of aliases.

    clean: (models, n), who is right on the clean images; adversarial: for each source (models, n), who is right on its
    images; fooled: (models, n), which images fooled their own source; groups: (n,) what images share, or None.
    """

    aliases: tuple[str, ...]
    clean: Judged
    adversarial: tuple[Judged, ...]
    fooled: Judged
    groups: Tensor | None = None

    def clean_accuracy(self, target: int, *, seed: int = 0) -> Estimate:
        """The accuracy of one model on the clean images."""
        return accuracy(self.clean[target], groups=self.groups, seed=seed)

    def accuracy(self, source: int, target: int, *, seed: int = 0) -> Estimate:
        """The accuracy of the target on all images of the source, those where its attack found nothing left clean."""
        return accuracy(self.adversarial[source][target], groups=self.groups, seed=seed)

    def rate(self, source: int, target: int, *, seed: int = 0) -> Estimate | None:
        """Of the images that fooled the source and that the target has right when clean, the share that fool it too.

        None where there is no such image; 1 where source and target are one.
        """
        asked = self.fooled[source] & self.clean[target]
        if not bool(asked.any()):
            return None
        groups = None if self.groups is None else self.groups[asked]
        return accuracy(~self.adversarial[source][target][asked], groups=groups, seed=seed)


def transfer(
    aliases: Sequence[str],
    clean: Judged,
    adversarial: Sequence[Judged],
    fooled: Judged,
    *,
    groups: Tensor | None = None,
) -> Transfer:
    """The matrix of who fools whom. Raises InputError unless there is a row for every model, of the same images."""
    shapes = {tuple(found.shape) for found in (clean, fooled, *adversarial)}
    if len(adversarial) != len(aliases) or shapes != {(len(aliases), clean.shape[1])}:
        raise InputError(f"expected judgements of {len(aliases)} models on the same images, found {sorted(shapes)}")
    return Transfer(tuple(aliases), clean, tuple(torch.as_tensor(found) for found in adversarial), fooled, groups)
