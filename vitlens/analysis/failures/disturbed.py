"""How a model's accuracy falls as images are made harder, level by level."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitlens.analysis.answers.classes import reading
from vitlens.analysis.answers.evaluate import accuracy, fitting_batch_size, require_labels
from vitlens.analysis.failures.disturbances import DISTURBANCES
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.errors import UnknownNameError
from vitlens.models.model import Model
from vitlens.uncertainty import Estimate

KINDS = tuple(DISTURBANCES)


@dataclass(frozen=True)
class Hardened:
    """A model on images made harder in one way.

    kind: a name of DISTURBANCES; levels: in order; correct: (levels, n), which images are right at each;
    groups: (n,) what images share, or None.
    """

    kind: str
    levels: tuple[float, ...]
    correct: Tensor
    groups: Tensor | None = None

    def accuracies(self, *, seed: int = 0) -> list[Estimate]:
        """The accuracy at each level, with its interval over images (or over groups of them)."""
        return [accuracy(row, groups=self.groups, seed=seed) for row in self.correct]


def robustness(
    model: Model,
    split: Split,
    *,
    kinds: Sequence[str] = KINDS,
    batch_size: int | None = None,
    precision: str = "fp32",
    seed: int = 0,
    advance: Callable[[int], object] = lambda _: None,
) -> tuple[Hardened, ...]:
    """The model on a labelled split made harder in each of these ways, at each of its levels.

    Images are changed at the split's own size, before the model resizes them, and each with its place in the split
    as its key: two models see the same pixels. advance: told the number of passes over an image just done. Raises
    UnknownNameError for another kind, DataError without labels, InputError when the classes do not match.
    """
    for kind in kinds:
        if kind not in DISTURBANCES:
            raise UnknownNameError("way to make images harder", kind, KINDS)
    truth = require_labels(split)
    read = reading(model.classes, split.classes).read
    size = batch_size or fitting_batch_size(model)
    ways = [(kind, level) for kind in kinds for level in DISTURBANCES[kind].levels(split.size)]
    right = torch.zeros(len(ways), len(split), dtype=torch.bool)
    with torch.inference_mode(), evaluating(model), autocast(model.device, precision):
        for batch in split.batches(size, device=model.device):
            keys = batch.indices + (seed << 20)
            for row, (kind, level) in enumerate(ways):
                changed = DISTURBANCES[kind].apply(batch.images, level, keys)
                answers = read(model(changed)).argmax(-1).cpu()
                right[row, batch.indices] = answers == truth[batch.indices].cpu()
                advance(len(batch.images))
    return tuple(
        Hardened(
            kind,
            tuple(level for other, level in ways if other == kind),
            right[[row for row, (other, _) in enumerate(ways) if other == kind]].clone(),
            split.groups,
        )
        for kind in kinds
    )


def passes(split: Split, *, kinds: Sequence[str] = KINDS) -> int:
    """How many times an image is shown to the model in all: what progress counts to."""
    return len(split) * sum(len(DISTURBANCES[kind].levels(split.size)) for kind in kinds)
