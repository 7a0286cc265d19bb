"""Which images a model classifies correctly after each of several disturbances, and what it loses to corruptions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from vitlens.analysis.evaluation.classes import reading
from vitlens.analysis.evaluation.evaluate import accuracy, fitting_batch_size, require_labels
from vitlens.analysis.evaluation.intervals import resampled_means
from vitlens.analysis.failures.disturbances import CORRUPTIONS
from vitlens.analysis.failures.operations import Keys
from vitlens.data.split import Split
from vitlens.devices import autocast, evaluating
from vitlens.models.model import Model
from vitlens.references import resolved
from vitlens.uncertainty import Estimate, bootstrap_mean


def correct_after(
    model: Model,
    split: Split,
    changes: Sequence[tuple[str, float]],
    *,
    keys: Keys,
    batch_size: int | None = None,
    precision: str = "fp32",
    advance: Callable[[int], object] = lambda _: None,
) -> Bool[Tensor, "changes batch"]:
    """Which images are classified correctly after each change, a function of the table of disturbances at a level.

    keys: (n,), one per image, which seeds its random numbers, so that all models and processes have the same pixels.
    Images are changed at the split's own size, before the model resizes them. advance: called with the number of passes
    over an image just done. Raises DataError without labels, InputError when the classes do not match.
    """
    truth = require_labels(split).cpu()
    read = reading(model.classes, split.classes).read
    size = batch_size or fitting_batch_size(model)
    right = torch.zeros(len(changes), len(split), dtype=torch.bool)
    with torch.inference_mode(), evaluating(model), autocast(model.device, precision):
        for batch in split.batches(size, device=model.device):
            own = batch.indices.cpu()
            for row, (function, level) in enumerate(changes):
                changed = resolved(function)(batch.images, level, keys[own]).clamp(0, 1)
                right[row, own] = read(model(changed)).argmax(-1).cpu() == truth[own]
                advance(len(own))
    return right


@dataclass(frozen=True)
class Corrupted:
    """One model on corrupted images. correct: (kinds, severities, n), kinds as in CORRUPTIONS; groups: (n,)."""

    alias: str
    correct: Bool[Tensor, "kinds severities batch"]
    groups: Tensor | None = None

    def accuracy(self, kind: str, severity: int, *, seed: int = 0) -> Estimate:
        """The accuracy under one corruption at a severity from 1 to 5."""
        row = self.correct[list(CORRUPTIONS).index(kind), severity - 1]
        return accuracy(row, groups=self.groups, seed=seed)

    def mean_error(self, *, seed: int = 0) -> Estimate:
        """The mean of the errors of all kinds and severities, a fraction, with its bootstrap interval over images."""
        return self._mean(1 - self.correct.double().mean((0, 1)), "fraction", seed)

    def lost(self, clean: Bool[Tensor, " batch"], *, seed: int = 0) -> Estimate:
        """Clean accuracy minus the mean accuracy of all kinds and severities, points, with its interval paired over
        images; clean: which clean images are classified correctly."""
        return self._mean(100.0 * (clean.double() - self.correct.double().mean((0, 1))), "points", seed)

    def _mean(self, values: Tensor, unit: str, seed: int) -> Estimate:
        groups = None if self.groups is None else self.groups.numpy()
        return bootstrap_mean(values.numpy(), groups=groups, seed=seed, unit=unit)

    def relative_error(self, baseline: "Corrupted", *, seed: int = 0) -> Estimate | None:
        """Mean corruption error: for each kind the errors summed over severities, divided by the baseline's, averaged
        over kinds (Hendrycks & Dietterich 2019); a fraction, 1 for the baseline itself.

        The interval is a paired bootstrap over images. None where the baseline makes no error under one of the kinds.
        """
        own, other = ((~each.correct).double().mean(1) for each in (self, baseline))  # (kinds, n)
        if bool((other.sum(1) == 0).any()):
            return None
        kinds = len(own)
        means = resampled_means(torch.cat((own, other)), groups=self.groups, seed=seed)
        ratios = (means[:, :kinds] / means[:, kinds:]).mean(1).numpy()
        ratios = ratios[np.isfinite(ratios)]  # the ratio is undefined in draws where the baseline makes no error
        low, high = np.quantile(ratios, [0.025, 0.975])
        value = float((own.mean(1) / other.mean(1)).mean())
        return Estimate(value, min(float(low), value), max(float(high), value), own.shape[1])
